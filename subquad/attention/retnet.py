"""Retention (Sun et al. 2023, RetNet, arXiv:2307.08621, section 2.1 to 2.2).

    o_t = sum_{s <= t} g^{t-s} (q_t . k_s) / sqrt(K) v_s,    g = 1 - 2^(-5-h) in head h = 0, 1, ...
    y_t = W_o (groupnorm(o_t) * silu(W_g x_t)),    q = R_t W_q x_t,    k = R_t W_k x_t

R rotates by the position. The group norm, a layer norm of each head without weights, makes the paper's other scalings
of the scores superfluous. Values have twice as many channels as queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import takes_options
from subquad.attention.recurrence import Recurrence
from subquad.attention.recurrent import RecurrentAttention
from subquad.config import later
from subquad.layers.positions import ROTARY_BASE, rotate
from subquad.state import State


class Retnet(RecurrentAttention):
    """Every earlier token, by a product that fades at a fixed rate for each head."""

    name = "retnet"
    summary = "every earlier token, fading by head"
    paper = "Sun et al. 2023, arXiv:2307.08621"

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentAttention.Config):
        """Options of retention."""

        rope_base: float = later(ROTARY_BASE)
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
        self.gating = self.projection(config.values * config.num_heads)
        for project, gain in ((self.query, 2**-2.5), (self.key, 2**-2.5), (self.value, 2**-2.5), (self.out, 2**-1)):
            nn.init.xavier_uniform_(project.weight, gain)

    def new_norm_weight(self) -> None:
        """Return None: the norm has no weights."""

    def normed(self, y_BHTV: Tensor) -> Tensor:
        """Return the layer norm of a head's outputs."""
        return F.layer_norm(y_BHTV, y_BHTV.shape[-1:], eps=self.config.norm_eps)

    def recurrence(
        self, x_BTD: Tensor, state: State | None = None, lengths_B: Tensor | None = None
    ) -> tuple[Recurrence, Tensor | None]:
        """Return the gated scan of rotated queries and keys."""
        q, k, v, _ = self.projected(x_BTD, state, lengths_B)
        start, base = self.start(state, x_BTD.shape[1]), self.config.rope_base
        q = rotate(q, start, base) * self.config.keys**-0.5
        return Recurrence(q, rotate(k, start, base), v, self.log_decays(v)), None

    def log_decays(self, v_BHTV: Tensor) -> Tensor:
        """Return `log(1 - 2^(-5-h))`, one number a head, as `[B, H, T, 1]`."""
        rates = [math.log1p(-(2.0 ** (-5 - head))) for head in range(self.config.num_heads)]
        wide = torch.promote_types(v_BHTV.dtype, torch.float32)
        return torch.tensor(rates, dtype=wide, device=v_BHTV.device)[:, None, None].expand(*v_BHTV.shape[:3], 1)

    def gate(self, x_BTD: Tensor) -> Tensor:
        """Return `silu(W_g x)`."""
        return F.silu(self.gating(x_BTD))
