"""Pure functions of tensors: the three engines, the patterns, the loss. No modules, no configuration."""

from typing import TYPE_CHECKING

from subquad.lazy import facade
from subquad.ops import patterns
from subquad.ops.attend import block_attention, block_attention_with_lse, merge_attention
from subquad.ops.delta import delta_scan
from subquad.ops.scan import ScanOutput, gated_scan
from subquad.ops.softmax import SoftmaxOutput, SoftmaxState, running_softmax

if TYPE_CHECKING:
    from subquad.ops.loss import linear_cross_entropy

__all__ = [
    "ScanOutput",
    "SoftmaxOutput",
    "SoftmaxState",
    "block_attention",
    "block_attention_with_lse",
    "delta_scan",
    "gated_scan",
    "linear_cross_entropy",
    "merge_attention",
    "patterns",
    "running_softmax",
]

# No mechanism needs the loss, whose operator would be made at each import.
__getattr__ = facade(__name__, {"linear_cross_entropy": "loss"})
__dir__ = __all__.copy
