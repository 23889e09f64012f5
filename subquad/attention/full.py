"""Full softmax attention (Vaswani et al. 2017, arXiv:1706.03762): the quadratic baseline.

    o_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s,    over s <= t where it is causal
    y_t = W_o o_t,    or with a gate W_o (sigmoid(W_g x_t) * o_t)

`output_gate` is the gate of the attention's output, one for each channel of each head (Qiu et al. 2025, Gated
Attention, arXiv:2505.06708, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from subquad.attention.base import Attention, join, takes_options
from subquad.attention.memories.key_values import Sight
from subquad.attention.parts import SoftmaxConfig, add_softmax_projections, divisible_heads, projection, softmax_over
from subquad.attention.past import Past
from subquad.ops.patterns import Causal
from subquad.ops.patterns import Full as FullPattern


class Full(Attention):
    """Every token (causal: every earlier one and itself); the state keeps every key and value."""

    name = "full"
    rotates = True
    has_static_cache = True
    summary = "every token"
    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    forms = ("causal", "bidirectional")
    cost_order = "quadratic"
    state_grows = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
        """Options of full attention."""

        output_gate: bool = False
        """Whether a gate, `sigmoid(W_g x)`, multiplies the heads' outputs before the output projection."""

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_softmax_projections(self, config)
        self.sight = Sight(((Causal() if config.causal else FullPattern(),),))
        self.gating = projection(config, config.num_heads) if config.output_gate else None

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read all keys."""
        return softmax_over(self, self.sight, x_BTD, past)

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o (sigmoid(W_g x) * y)`, or `W_o y` without a gate."""
        y_BTC = join(y_BHTV)
        return self.out(y_BTC if self.gating is None else y_BTC * self.gating(x_BTD).sigmoid())

    @property
    def divisible(self) -> tuple[int, ...]:
        """Query heads and key heads."""
        return divisible_heads(self.config, self.sight)
