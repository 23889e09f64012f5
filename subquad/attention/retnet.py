"""Retention (Sun et al. 2023, RetNet, arXiv:2307.08621, section 2.1 to 2.2).

    o_t = sum_{s <= t} g^{t-s} (q_t . k_s) / sqrt(K) v_s,    g = 1 - 2^(-5-h) in head h = 0, 1, ...
    y_t = W_o (groupnorm(o_t) * silu(W_g x_t)),    q = R_t W_q x_t,    k = R_t W_k x_t

R rotates by the position. With the group norm, a layer norm of each head without weights, the paper's other
scalings of the scores have no effect. Values have twice as many channels as queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, join, takes_options
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.past import Past
from subquad.attention.recurrent import RecurrentConfig, add_projections, heads_of
from subquad.layers.positions import ROTARY_BASE, rotate
from subquad.ops.precision import wide_dtype


class Retnet(Attention):
    """Linear attention to every earlier token, with a fixed decay of each head."""

    name = "retnet"
    summary = "every earlier token, with a fixed decay of each head"
    paper = "Sun et al. 2023, arXiv:2307.08621"
    sees_order = True
    is_distribution = False

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentConfig):
        """Options of retention."""

        rope_base: float = ROTARY_BASE
        """Base of the rotary frequencies."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.keys % 2:
                raise ValueError(f"retnet rotates queries and keys: key_channels must be even, got {self.keys}")
            if not self.rope_base > 0:
                raise ValueError(f"rope_base must be positive, got {self.rope_base}")

        @property
        def values(self) -> int:
            """Channels V of a head's values: by default twice the head size."""
            return self.value_channels or 2 * (self.dim // self.num_heads)

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_projections(self, config)
        self.gating = nn.Linear(config.dim, config.values * config.num_heads, bias=config.bias)
        for project, gain in ((self.query, 2**-2.5), (self.key, 2**-2.5), (self.value, 2**-2.5), (self.out, 2**-1)):
            nn.init.xavier_uniform_(project.weight, gain)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the gated scan of rotated keys with rotated queries."""
        q_BHTK, k_BHTK, v_BHTV = heads_of(self, x_BTD)
        q_BHTK = rotate(q_BHTK, past.start, self.config.rope_base) * self.config.keys**-0.5
        k_BHTK = rotate(k_BHTK, past.start, self.config.rope_base)
        (sums,) = past.keep(sums=Recurrence(k_BHTK, past.values(v_BHTV), self.log_decays(v_BHTV)))
        return sums.read(q_BHTK)

    def log_decays(self, v_BHTV: Tensor) -> Tensor:
        """Return `log(1 - 2^(-5-h))`, one number a head, as `[B, H, T, 1]`."""
        rates = [math.log1p(-(2.0 ** (-5 - head))) for head in range(self.config.num_heads)]
        wide = wide_dtype(v_BHTV)
        return torch.tensor(rates, dtype=wide, device=v_BHTV.device)[:, None, None].expand(*v_BHTV.shape[:3], 1)

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o (groupnorm(y) * silu(W_g x))`."""
        y_BTC = join(F.layer_norm(y_BHTV, y_BHTV.shape[-1:], eps=self.config.norm_eps).to(x_BTD.dtype))
        y_BTC = y_BTC * F.silu(self.gating(x_BTD))
        return self.out(F.dropout(y_BTC, self.config.dropout, self.training))
