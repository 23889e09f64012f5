"""The contract, the three tolerances and input makers: public, for people who add a mechanism.

class TestX(AttentionContract):
    name = "x"
    options = {"option": 3}
"""

from subquad.testing.contract import AttentionContract
from subquad.testing.tools import (
    LOW_PRECISION,
    assert_exact,
    assert_in_budget,
    assert_same_maths,
    block_sizes,
    in_pieces,
    largest_allocation,
    mask_with,
    sharpened,
    with_gradients,
)

__all__ = [
    "LOW_PRECISION",
    "AttentionContract",
    "assert_exact",
    "assert_in_budget",
    "assert_same_maths",
    "block_sizes",
    "in_pieces",
    "largest_allocation",
    "mask_with",
    "sharpened",
    "with_gradients",
]
