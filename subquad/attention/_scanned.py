"""What the mechanisms of the scan share: value and output projections, padding as a mask.

Shape letters: B batch, T tokens, D model width, H heads, V value channels.
"""

from __future__ import annotations

from torch import Tensor, nn

from subquad.attention.base import Attention
from subquad.ops.padding import real_slots


class ScannedAttention(Attention):
    """A recurrence with a state of fixed size."""

    def __init__(self, config: Attention.Config) -> None:
        super().__init__(config)
        self.channels = config.dim // config.num_heads
        self.value = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)

    def values(self, x_BTD: Tensor) -> Tensor:
        """Values `[B, H, T, V]`."""
        return self.split(self.value(x_BTD))

    def merge(self, y_BHTV: Tensor) -> Tensor:
        """The output projection."""
        return self.out(self.join(y_BHTV))

    def score_entries(self, tokens: int) -> int:
        """None: the state takes the place of scores (those inside chunks of fixed size are counted as FLOPs)."""
        return 0


def real_mask(lengths_B: Tensor | None, tokens: int) -> Tensor | None:
    """Bool `[B, T]` of compacted rows, None where all tokens are real."""
    return None if lengths_B is None else real_slots(lengths_B, tokens)
