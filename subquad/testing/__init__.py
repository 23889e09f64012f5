"""The contract, the three tolerances and input makers: public, for people who add a mechanism.

class TestX(AttentionContract):
    name = "x"
    options = {"option": 3}
"""

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name == "AttentionContract":  # the only name that needs hypothesis
        return importlib.import_module("subquad.testing.contract").AttentionContract
    raise AttributeError(f"module 'subquad.testing' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
