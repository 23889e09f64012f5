"""Gated linear attention (Yang et al. 2023, GLA, arXiv:2312.06635, section 4.4).

    S_t = diag(a_t) S_{t-1} + k_t (x) v_t,    o_t = q_t S_t / sqrt(K),    a_t = sigmoid(W_2 W_1 x_t + b)^(1/16)
    y_t = W_o (norm(o_t) * silu(W_r x_t + b_r))

Queries and keys have half as many channels as values; W_1 has rank 16. The norm is a root mean square over a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import takes_options
from subquad.attention.recurrence import Recurrence, at_least_float32
from subquad.attention.recurrent import RecurrentAttention
from subquad.state import State

TEMPERATURE = 16
"""Divides the gates' logarithms: the higher, the slower a channel forgets."""


class Gla(RecurrentAttention):
    """Every earlier token, by a product whose channels fade at rates that depend on the tokens."""

    name = "gla"
    summary = "every earlier token, fading by channel as tokens say"
    paper = "Yang et al. 2023, arXiv:2312.06635"

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentAttention.Config):
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
        self.decay_down = nn.Linear(config.dim, config.gate_rank, bias=False)
        self.decay_up = nn.Linear(config.gate_rank, config.keys * config.num_heads)
        self.gating = nn.Linear(config.dim, config.values * config.num_heads)
        for project in (self.query, self.key, self.value, self.out, self.decay_down, self.decay_up, self.gating):
            nn.init.xavier_uniform_(project.weight, 2**-2.5)

    @property
    def decays(self) -> int:
        """Decays of a head: one for each key channel."""
        return self.config.keys

    def recurrence(
        self, x_BTD: Tensor, state: State | None = None, lengths_B: Tensor | None = None
    ) -> tuple[Recurrence, Tensor | None]:
        """Return the gated scan with decays by channel."""
        q, k, v, _ = self.projected(x_BTD, state, lengths_B)
        decay_BTC = self.decay_up(self.decay_down(x_BTD))
        log_f_BHTK = self.split(F.logsigmoid(at_least_float32(decay_BTC)) / TEMPERATURE)
        return Recurrence(q * self.config.keys**-0.5, k, v, log_f_BHTK), None

    def gate(self, x_BTD: Tensor) -> Tensor:
        """Return `silu(W_r x + b_r)`."""
        return F.silu(self.gating(x_BTD))
