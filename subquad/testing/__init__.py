"""The contract, its laws, the three tolerances and input makers, for people who add a mechanism.

The tests of a mechanism are a class with its name and its oracle::

    class TestX(AttentionContract):
        name = "x"
        options = {"option": 3}

        def oracle(self, layer, x_TD):
            ...  # the outputs [T, D] of one sequence by the paper's equations, token by token
"""

from typing import TYPE_CHECKING

from subquad.lazy import facade
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

if TYPE_CHECKING:
    from subquad.testing.contract import AttentionContract
    from subquad.testing.laws import check_law

__all__ = [
    "LOW_PRECISION",
    "AttentionContract",
    "assert_exact",
    "assert_in_budget",
    "assert_same_maths",
    "block_sizes",
    "check_law",
    "in_pieces",
    "largest_allocation",
    "mask_with",
    "sharpened",
    "with_gradients",
]

# The contract needs hypothesis. `check_law` judges a mechanism by one law without it.
__getattr__ = facade(__name__, {"AttentionContract": "contract", "check_law": "laws"})
__dir__ = __all__.copy
