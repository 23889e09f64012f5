"""Dilated sliding-window attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1).

    y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s,    s = t, t - d, t - 2d, ..., t - (width - 1) d

Bidirectional, `width // 2` of the tokens lie before the query and the others after it. The tokens of one residue modulo
d are computed as a sequence of their own with a plain window; a call that continues from a state masks a window of
`(width - 1) d` keys instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from subquad.attention.base import Attention, takes_options
from subquad.attention.memories.key_values import Sight
from subquad.attention.parts import SoftmaxConfig, add_softmax_projections, divisible_heads, softmax_over
from subquad.attention.past import Past
from subquad.ops.patterns import Dilated as DilatedPattern
from subquad.ops.patterns import DilatedBand


class Dilated(Attention):
    """Every `dilation`-th token back, `width` in all; the state keeps `(width - 1) dilation` keys and values."""

    name = "dilated"
    summary = "every `dilation`-th token next to it, `width` in all"
    paper = "Beltagy et al. 2020, arXiv:2004.05150"
    forms = ("causal", "bidirectional")
    rotates = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
        """Options of dilated attention."""

        width: int = 64
        """Tokens that a query sees, its own included."""
        dilation: int = 4
        """Distance between two of these tokens, the paper's d."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(width=1, dilation=1)

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_softmax_projections(self, config)
        before = config.width // 2
        band = DilatedBand(before=before, after=config.width - 1 - before, dilation=config.dilation)
        causal = DilatedPattern(width=config.width, dilation=config.dilation)
        self.sight = Sight(((causal if config.causal else band,),))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the keys in sight."""
        return softmax_over(self, self.sight, x_BTD, past)

    @property
    def divisible(self) -> tuple[int, ...]:
        """Query heads and key heads."""
        return divisible_heads(self.config, self.sight)
