"""Pure functions of tensors: the two engines, the patterns, the loss. No modules, no configuration."""

from subquad.ops import patterns
from subquad.ops.attend import block_attention, merge_attention
from subquad.ops.loss import linear_cross_entropy
from subquad.ops.scan import ScanOutput, SoftmaxOutput, SoftmaxState, gated_scan, running_logsumexp, running_softmax

__all__ = [
    "ScanOutput",
    "SoftmaxOutput",
    "SoftmaxState",
    "block_attention",
    "gated_scan",
    "linear_cross_entropy",
    "merge_attention",
    "patterns",
    "running_logsumexp",
    "running_softmax",
]
