"""Kimi Delta Attention: the delta rule with a decay for each channel (Kimi team 2025, arXiv:2510.26692, section 3).

    S_t = (I - b_t k_t k_t^T) diag(f_t) S_{t-1} + b_t k_t (x) v_t,    log f_t = -exp(a) softplus(W_2 W_1 x_t + c)
    y_t = W_o (rmsnorm(o_t) * sigmoid(W_4 W_3 x_t))

Queries, keys, values and b are those of DeltaNet; W_1 and W_3 have the rank of a head's size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from subquad.attention.base import takes_options
from subquad.attention.recurrent import DecayRate, DeltaAttention


class Kda(DeltaAttention):
    """Every earlier token, by a memory that fades by channel and in which a key overwrites what it held."""

    name = "kda"
    summary = "a memory fading by channel, in which a key overwrites"
    paper = "Kimi team 2025, arXiv:2510.26692"

    @dataclass(frozen=True, kw_only=True)
    class Config(DeltaAttention.Config):
        """Options of Kimi Delta Attention."""

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.decay_down = nn.Linear(config.dim, config.values, bias=False)
        self.decay_up = nn.Linear(config.values, config.keys * config.num_heads, bias=False)
        self.rate = DecayRate(config.num_heads, config.keys)
        self.gate_down = nn.Linear(config.dim, config.values, bias=False)
        self.gate_up = nn.Linear(config.values, config.values * config.num_heads, bias=False)

    def log_decays(self, x_BTD: Tensor) -> Tensor:
        """Return one logarithm for each key channel."""
        return self.rate(self.decay_up(self.decay_down(x_BTD)))[0]

    def gate(self, x_BTD: Tensor) -> Tensor:
        """Return `sigmoid(W_4 W_3 x)`."""
        return self.gate_up(self.gate_down(x_BTD)).sigmoid()
