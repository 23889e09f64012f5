"""Full softmax attention (Vaswani et al. 2017, arXiv:1706.03762): the quadratic baseline.

    o_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s,    over s <= t where it is causal
    y_t = W_o o_t,    or with a gate W_o (sigmoid(W_g x_t) * o_t)

`output_gate` is the gate of the attention's output, one for each channel of each head (Qiu et al. 2025, Gated
Attention, arXiv:2505.06708, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from subquad.attention.base import takes_options
from subquad.attention.blocked import BlockedAttention
from subquad.config import later
from subquad.ops.patterns import Causal
from subquad.ops.patterns import Full as FullPattern


class Full(BlockedAttention):
    """Every token (causal: every earlier one and itself); the state keeps every key and value."""

    name = "full"
    rings = True
    summary = "every token"
    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    forms = ("causal", "bidirectional")
    cost_order = "quadratic"
    state_grows = True

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockedAttention.Config):
        """Options of full attention."""

        output_gate: bool = later(False)
        """Whether a gate, `sigmoid(W_g x)`, multiplies the heads' outputs before the output projection."""

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.patterns = (Causal() if config.causal else FullPattern(),)
        self.gating = self.projection(self.q_dim) if config.output_gate else None

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o (sigmoid(W_g x) * y)`, or `W_o y` without a gate."""
        if self.gating is None:
            return self.merge(y_BHTV)
        return self.out(self.join(y_BHTV) * self.gating(x_BTD).sigmoid())
