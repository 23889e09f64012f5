"""Mamba-2, the state space dual (Dao & Gu 2024, SSD, arXiv:2405.21060, section 7 and figure 6).

    x, B, C = silu(conv(W_x u)), silu(conv(W_B u)), silu(conv(W_C u)),    d_t = softplus(W_d u_t + c)
    S_t = exp(-exp(a) d_t) S_{t-1} + d_t B_t (x) x_t,    o_t = C_t S_t + D x_t
    y_t = W_o rmsnorm(o_t * silu(W_z u_t))

a, c and D are one number per head. B and C, and the norm, are shared by each of `groups` groups of heads. C are the
queries, B the keys and x the values. The rows of a checkpoint's `in_proj`, z, x, B, C and d, are those of `gating`,
`value`, `key`, `query` and `stepping` here; its convolution's channels are x, B, C, and C, B, x here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, join, takes_options
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.past import Past
from subquad.attention.recurrent import DecayRate, RecurrentConfig, add_projections, convolution_of, convolved_heads
from subquad.ops.precision import at_least_float32


class Mamba2(Attention):
    """Linear attention to every earlier token, with a data-dependent decay of each head."""

    name = "mamba2"
    summary = "every earlier token, with a gate for each head"
    paper = "Dao & Gu 2024, arXiv:2405.21060"
    sees_order = True
    is_distribution = False

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentConfig):
        """Options of Mamba-2."""

        key_channels: ClassVar[None] = None  # type: ignore[misc]
        """Not an option here: `state_channels` takes its place."""
        value_channels: ClassVar[None] = None  # type: ignore[misc]
        """Not an option here: `expand` takes its place."""
        state_channels: int = 64
        """Channels K of the state, of B and of C."""
        expand: int = 2
        """Inner width over model width: a head has `expand * dim / num_heads` channels V."""
        groups: int = 1
        """Groups of neighbouring heads that share B and C, and are normed together."""
        convolution: int = 4
        """Tokens that the short convolution of x, B and C reads."""
        step_limits: tuple[float, ...] | None = None
        """Least and largest step d (None: no limits)."""
        norm_eps: float = 1e-5
        """Added to the mean square by which a group's output is divided."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(state_channels=1, expand=1, groups=1, convolution=1)
            if self.num_heads % self.groups:
                raise ValueError(f"groups must divide num_heads, got groups={self.groups}, num_heads={self.num_heads}")
            limits = self.step_limits
            if limits is not None and not (len(limits) == 2 and 0 <= limits[0] <= limits[1]):
                raise ValueError(f"step_limits must be two numbers, 0 <= least <= largest, got {limits}")

        @property
        def keys(self) -> int:
            """Channels K of the state."""
            return self.state_channels

        @property
        def values(self) -> int:
            """Channels V of a head."""
            return self.expand * (self.dim // self.num_heads)

        @property
        def key_heads(self) -> int:
            """Groups G of B and C."""
            return self.groups

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_projections(self, config)
        self.norm_weight = nn.Parameter(torch.ones(config.values * config.num_heads))
        self.convolution = convolution_of(config, config.convolution, bias=True)
        self.gating = nn.Linear(config.dim, config.values * config.num_heads, bias=config.bias)
        self.stepping = nn.Linear(config.dim, config.num_heads, bias=config.bias)
        self.rate = DecayRate(config.num_heads)
        self.skip = nn.Parameter(torch.ones(config.num_heads))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the gated scan with one decay and one step a head, and add the skip."""
        q_BGTK, k_BGTK, v_BHTV = convolved_heads(self, x_BTD, past)
        log_f_BHT1, step_BHT1 = self.rate(self.stepping(x_BTD), self.config.step_limits)
        v_BHTV = past.values(v_BHTV)
        (sums,) = past.keep(sums=Recurrence(k_BGTK, step_BHT1 * at_least_float32(v_BHTV), log_f_BHT1))
        return sums.read(q_BGTK) + self.skip[:, None, None] * at_least_float32(v_BHTV)

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o rmsnorm(y * silu(W_z x))`."""
        y_BTC = join(y_BHTV) * F.silu(self.gating(x_BTD).to(y_BHTV.dtype))
        y_BTGC = y_BTC.unflatten(-1, (self.config.groups, -1))
        y_BTC = F.rms_norm(y_BTGC, y_BTGC.shape[-1:], eps=self.config.norm_eps).flatten(2) * self.norm_weight
        return self.out(F.dropout(y_BTC.to(x_BTD.dtype), self.config.dropout, self.training))
