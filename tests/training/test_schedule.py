"""The learning rate's factor: known values of every shape."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.training.schedule import ScheduleConfig


def test_warm_up_is_linear_and_never_zero():
    schedule = ScheduleConfig(kind="constant", warmup=4)
    assert [schedule.factor(step, 100) for step in range(6)] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]


def test_cosine_falls_to_the_minimum():
    schedule = ScheduleConfig(kind="cosine", warmup=10, min_ratio=0.1)
    assert schedule.factor(10, 110) == 1.0
    assert schedule.factor(60, 110) == pytest.approx(0.55)
    assert schedule.factor(110, 110) == pytest.approx(0.1)


def test_wsd_stays_and_then_falls_linearly():
    schedule = ScheduleConfig(kind="wsd", warmup=10, min_ratio=0.0, decay_fraction=0.2)
    assert schedule.factor(80, 100) == 1.0
    assert schedule.factor(90, 100) == pytest.approx(0.5)
    assert schedule.factor(100, 100) == pytest.approx(0.0)


def test_inverse_sqrt_is_capped_and_has_a_floor():
    schedule = ScheduleConfig(kind="inverse_sqrt", warmup=10, hold=100, min_ratio=0.2)
    assert schedule.factor(99, 10_000) == 1.0
    assert schedule.factor(400, 10_000) == pytest.approx(math.sqrt(100 / 400))
    assert schedule.factor(9_000, 10_000) == 0.2
    assert ScheduleConfig(kind="inverse_sqrt", warmup=16, min_ratio=0.0).factor(64, 100) == pytest.approx(0.5)


@given(
    kind=st.sampled_from(["cosine", "wsd", "inverse_sqrt", "constant"]),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    min_ratio=st.floats(0, 1),
    decay_fraction=st.floats(0, 1),
)
def test_factor_stays_between_zero_and_one_and_falls_after_the_warm_up(kind, warmup, steps, min_ratio, decay_fraction):
    schedule = ScheduleConfig.from_dict(
        {"kind": kind, "warmup": warmup, "min_ratio": min_ratio, "decay_fraction": decay_fraction}
    )
    factors = [schedule.factor(step, steps) for step in range(steps + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    after = factors[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
