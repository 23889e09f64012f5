"""The contract that every mechanism keeps: the laws as tests for pytest, some on inputs that hypothesis draws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from subquad.extras import needed
from subquad.testing.laws import Laws
from subquad.testing.tools import LOW_PRECISION

with needed("AttentionContract"):
    from hypothesis import HealthCheck, given, settings, strategies

# All subclasses share one test body, whose inputs don't depend on the subclass that runs it. A profile that a project
# loads after this module does not reach its tests, and a first call may take as long as it does.
drawn = partial(settings, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


class AttentionContract(Laws):
    """Test the laws on the mechanism `name` with `options`: a test class sets these two and inherits every test."""

    @drawn(max_examples=6)
    @given(cuts=strategies.lists(strategies.integers(0, 70), min_size=1, max_size=4))
    def test_split_anywhere_gives_the_same_result(self, cuts: Sequence[int]) -> None:
        super().test_split_anywhere_gives_the_same_result(cuts)

    @drawn(max_examples=8)
    @given(
        tokens=strategies.integers(1, 300),
        fraction=strategies.floats(0, 1),
        dtype=strategies.sampled_from(LOW_PRECISION),
        sharpness=strategies.sampled_from((1.0, 1e2, 1e4)),
    )
    def test_no_future_token_changes_a_bit(
        self, tokens: int, fraction: float, dtype: torch.dtype, sharpness: float
    ) -> None:
        super().test_no_future_token_changes_a_bit(tokens, fraction, dtype, sharpness)
