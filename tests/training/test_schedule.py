"""The learning rate's factor: known values of every shape."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.training.schedule import ScheduleConfig


@pytest.mark.parametrize(("options", "steps", "factors"), [
    ({"kind": "constant", "warmup": 4}, 100, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1.0, 5: 1.0}),
    ({"kind": "cosine", "warmup": 10, "min_ratio": 0.1}, 110, {10: 1.0, 60: 0.55, 110: 0.1}),
    ({"kind": "wsd", "warmup": 10, "min_ratio": 0.0, "decay_fraction": 0.2}, 100, {80: 1.0, 90: 0.5, 100: 0.0}),
    # A decay as long as the run begins where the warm-up ends.
    ({"kind": "wsd", "warmup": 50, "min_ratio": 0.0, "decay_fraction": 1.0}, 100, {50: 1.0, 75: 0.5, 100: 0.0}),
    ({"kind": "inverse_sqrt", "warmup": 10, "hold": 100, "min_ratio": 0.2}, 9_999, {99: 1.0, 400: 0.5, 9_000: 0.2}),
    ({"kind": "inverse_sqrt", "warmup": 16, "min_ratio": 0.0}, 100, {64: 0.5}),
    ({}, 1000, {0: 1 / 51, 24: 25 / 51, 50: 1.0, 525: 0.55, 1000: 0.1}),  # a warm-up of 50 steps
    ({}, 20, {0: 1 / 3, 1: 2 / 3, 2: 1.0, 11: 0.55, 20: 0.1}),  # and of a tenth of them
    ({}, 5, {0: 1.0, 5: 0.1}),
    ({}, None, {0: 1 / 51, 24: 25 / 51, 50: 1.0, 5_000: 1.0}),  # how many steps fit is not known yet
    ({"warmup": 3}, None, {0: 0.25, 2: 0.75, 3: 1.0, 5_000: 1.0}),
])  # fmt: skip
def test_known_values(options, steps, factors):
    schedule = ScheduleConfig(**options)
    assert {step: schedule.factor(step, steps) for step in factors} == pytest.approx(factors)


@given(
    kind=st.sampled_from(["cosine", "wsd", "inverse_sqrt", "constant"]),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    min_ratio=st.floats(0, 1),
    decay_fraction=st.floats(0, 1),
)
def test_factor_stays_between_zero_and_one_and_falls_after_the_warm_up(kind, warmup, steps, min_ratio, decay_fraction):
    schedule = ScheduleConfig(kind=kind, warmup=warmup, min_ratio=min_ratio, decay_fraction=decay_fraction)
    factors = [schedule.factor(step, steps) for step in range(steps + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(factors[warmup:]))
