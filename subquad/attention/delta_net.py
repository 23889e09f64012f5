"""DeltaNet: linear attention that overwrites what a key held (Yang et al. 2024, arXiv:2406.06484, section 2.2 and 3.4).

    S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t (x) v_t,    o_t = q_t S_t / sqrt(K),    b_t = r sigmoid(W_b x_t)
    q = l2(silu(conv(W_q x))),    k = l2(silu(conv(W_k x))),    v = silu(conv(W_v x)),    y_t = W_o rmsnorm(o_t)

`beta_range` is r: with 2 the transitions can have negative eigenvalues, which state tracking needs (Grazzi et al. 2024,
arXiv:2411.12537).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, join, takes_options
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.past import Past
from subquad.attention.recurrent import DeltaConfig, add_delta_rule, delta_heads, rms_normed


class DeltaNet(Attention):
    """The delta rule: a key overwrites the value that the state holds for it."""

    name = "delta_net"
    summary = "the delta rule: a key overwrites its value"
    paper = "Yang et al. 2024, arXiv:2406.06484"
    sees_order = True
    is_distribution = False

    @dataclass(frozen=True, kw_only=True)
    class Config(DeltaConfig):
        """Options of DeltaNet."""

    config: Config
    norm_weight: nn.Parameter

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_delta_rule(self, config)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the delta rule's state."""
        q_BGTK, k_BGTK, v_BHTV, beta_BHT1 = delta_heads(self, x_BTD, past)
        (sums,) = past.keep(sums=Recurrence(k_BGTK, past.values(v_BHTV), None, beta_BHT1))
        return sums.read(q_BGTK)

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o rmsnorm(y)`."""
        y_BTC = join(rms_normed(y_BHTV, self.norm_weight, self.config.norm_eps).to(x_BTD.dtype))
        return self.out(F.dropout(y_BTC, self.config.dropout, self.training))
