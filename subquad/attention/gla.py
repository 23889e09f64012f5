"""Gated linear attention (Yang et al. 2023, GLA, arXiv:2312.06635, section 4.4).

    S_t = diag(a_t) S_{t-1} + k_t (x) v_t,    o_t = q_t S_t / sqrt(K),    a_t = sigmoid(W_2 W_1 x_t + b)^(1/16)
    y_t = W_o (norm(o_t) * silu(W_r x_t + b_r))

Queries and keys have half as many channels as values; W_1 has rank 16. The norm is a root mean square over a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, join, split, takes_options
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.past import Past
from subquad.attention.recurrent import RecurrentConfig, add_projections, heads_of, rms_normed
from subquad.ops.precision import at_least_float32

TEMPERATURE = 16
"""Divides the gates' logarithms: the higher, the slower a channel forgets."""


class Gla(Attention):
    """Linear attention to every earlier token, with a data-dependent decay of each channel."""

    name = "gla"
    summary = "every earlier token, with a gate for each channel"
    paper = "Yang et al. 2023, arXiv:2312.06635"
    sees_order = True
    is_distribution = False

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentConfig):
        """Options of gated linear attention."""

        gate_rank: int = 16
        """Width between the two maps that give the decays."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(gate_rank=1)

        @property
        def keys(self) -> int:
            """Channels K of a head's queries and keys: by default half the head size."""
            return self.key_channels or max(1, self.dim // self.num_heads // 2)

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_projections(self, config)
        self.norm_weight = nn.Parameter(torch.ones(config.values))
        self.decay_down = nn.Linear(config.dim, config.gate_rank, bias=False)
        self.decay_up = nn.Linear(config.gate_rank, config.keys * config.num_heads)
        self.gating = nn.Linear(config.dim, config.values * config.num_heads)
        for project in (self.query, self.key, self.value, self.out, self.decay_down, self.decay_up, self.gating):
            nn.init.xavier_uniform_(project.weight, 2**-2.5)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the gated scan, whose channels fade."""
        q_BHTK, k_BHTK, v_BHTV = heads_of(self, x_BTD)
        decay_BTC = at_least_float32(self.decay_up(self.decay_down(x_BTD)))
        (log_f_BHTK,) = split(self.config.keys, F.logsigmoid(decay_BTC) / TEMPERATURE)
        (sums,) = past.keep(sums=Recurrence(k_BHTK, past.values(v_BHTV), log_f_BHTK))
        return sums.read(q_BHTK * self.config.keys**-0.5)

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o (norm(y) * silu(W_r x + b_r))`."""
        y_BTC = join(rms_normed(y_BHTV, self.norm_weight, self.config.norm_eps).to(x_BTD.dtype))
        y_BTC = y_BTC * F.silu(self.gating(x_BTD))
        return self.out(F.dropout(y_BTC, self.config.dropout, self.training))
