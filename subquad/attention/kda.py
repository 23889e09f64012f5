"""Kimi Delta Attention: the delta rule with a decay for each channel (Kimi team 2025, arXiv:2510.26692, section 3).

    S_t = (I - b_t k_t k_t^T) diag(f_t) S_{t-1} + b_t k_t (x) v_t,    log f_t = -exp(a) softplus(W_2 W_1 x_t + c)
    y_t = W_o (rmsnorm(o_t) * sigmoid(W_4 W_3 x_t))

Queries, keys, values and b are those of DeltaNet; W_1 and W_3 have the rank of a head's size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, join, takes_options
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.past import Past
from subquad.attention.recurrent import DecayRate, DeltaConfig, add_delta_rule, delta_heads, rms_normed


class Kda(Attention):
    """The delta rule with a decay for each channel: a key overwrites the value that the state holds for it."""

    name = "kda"
    summary = "the delta rule, with a decay of each channel"
    paper = "Kimi team 2025, arXiv:2510.26692"
    sees_order = True
    is_distribution = False

    @dataclass(frozen=True, kw_only=True)
    class Config(DeltaConfig):
        """Options of Kimi Delta Attention."""

    config: Config
    norm_weight: nn.Parameter

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_delta_rule(self, config)
        self.decay_down = nn.Linear(config.dim, config.values, bias=False)
        self.decay_up = nn.Linear(config.values, config.keys * config.num_heads, bias=False)
        self.rate = DecayRate(config.num_heads, config.keys)
        self.gate_down = nn.Linear(config.dim, config.values, bias=False)
        self.gate_up = nn.Linear(config.values, config.values * config.num_heads, bias=False)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the delta rule's state."""
        q_BGTK, k_BGTK, v_BHTV, beta_BHT1 = delta_heads(self, x_BTD, past)
        log_f_BHTK, _ = self.rate(self.decay_up(self.decay_down(x_BTD)))
        (sums,) = past.keep(sums=Recurrence(k_BGTK, past.values(v_BHTV), log_f_BHTK, beta_BHT1))
        return sums.read(q_BGTK)

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o (rmsnorm(y) * sigmoid(W_4 W_3 x))`."""
        y_BTC = join(rms_normed(y_BHTV, self.norm_weight, self.config.norm_eps).to(x_BTD.dtype))
        y_BTC = y_BTC * self.gate_up(self.gate_down(x_BTD)).sigmoid()
        return self.out(F.dropout(y_BTC, self.config.dropout, self.training))
