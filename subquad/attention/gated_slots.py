"""Gated slot attention: softmax over slots that gates write and forget (Zhang et al. 2024, arXiv:2409.07146).

K_t = Diag(a_t) K_{t-1} + (1 - a_t) k_t^T,    V_t = Diag(a_t) V_{t-1} + (1 - a_t) v_t^T
o_t = V_t^T softmax(K_t q_t),                 a_t = sigmoid(W_a x_t)^(1/8), one gate for each slot
y_t = W_o RMSNorm(silu(o_t))                  over the joined heads, and q, k, v = silu(W x)
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


class GatedSlots(Attention):
    """Softmax over a fixed number of slots, which gates write and forget."""

    name = "gated_slots"
    summary = "softmax over slots that gates write and forget"
    paper = "Zhang et al. 2024, arXiv:2409.07146"
    is_distribution, sees_order = False, True

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentConfig):
        """Options of gated slot attention."""

        slots: int = 64
        """Slots of each head."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(slots=1)

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_projections(self, config)
        self.gate = nn.Linear(config.dim, config.slots * config.num_heads, bias=config.bias)
        self.norm_weight = nn.Parameter(torch.ones(config.values * config.num_heads))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the slots' values by a softmax over the products of their keys and the query."""
        q_BHTK, k_BHTK, v_BHTV = map(F.silu, heads_of(self, x_BTD))
        (log_a_BHTM,) = split(self.config.slots, F.logsigmoid(at_least_float32(self.gate(x_BTD))) / 8)
        write_BHTM, v_BHTV = -log_a_BHTM.expm1(), past.values(v_BHTV)
        memories = Recurrence(k_BHTK, write_BHTM, log_g=log_a_BHTM), Recurrence(write_BHTM, v_BHTV, log_a_BHTM)
        keys, values = past.keep(keys=memories[0], values=memories[1])
        return values.read(keys.read(q_BHTK).softmax(-1))

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o RMSNorm(silu(y))`."""
        y_BTC = rms_normed(F.silu(join(y_BHTV)), self.norm_weight, self.config.norm_eps).to(x_BTD.dtype)
        return self.out(F.dropout(y_BTC, self.dropout_p))
