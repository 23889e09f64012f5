"""DeltaNet: linear attention that overwrites what a key held (Yang et al. 2024, arXiv:2406.06484, section 2.2 and 3.4).

    S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t (x) v_t,    o_t = q_t S_t / sqrt(K),    b_t = r sigmoid(W_b x_t)
    q = l2(silu(conv(W_q x))),    k = l2(silu(conv(W_k x))),    v = silu(conv(W_v x)),    y_t = W_o rmsnorm(o_t)

`beta_range` is r: with 2 the transitions have negative eigenvalues, which tracking a state takes (Grazzi et al. 2024,
arXiv:2411.12537).
"""

from __future__ import annotations

from dataclasses import dataclass

from subquad.attention.base import takes_options
from subquad.attention.recurrent import DeltaAttention


class DeltaNet(DeltaAttention):
    """Every earlier token, by a memory in which a key overwrites what it held."""

    name = "delta_net"
    summary = "a memory in which a key overwrites what it held"
    paper = "Yang et al. 2024, arXiv:2406.06484"

    @dataclass(frozen=True, kw_only=True)
    class Config(DeltaAttention.Config):
        """Options of DeltaNet."""

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
