"""Latte, latent attention (Dolga, Cobzarenco and Barber 2024, arXiv:2402.17512, equations 5 to 21).

    y_t = sum_l p(l | t) sum_{s <= t} p(s | l, t) v_s,  p(l | t) = softmax_l(q_t),  p(s | l, t) = softmax_{s <= t}(k_sl)

(equations 10 to 21); the bidirectional form takes p(s | l) = softmax_s(k_sl) over all tokens instead (equations 5 to
9). Queries and keys are linear maps of x to the latents, which the heads share out among them; each head mixes its own
value channels. Rows of the weights sum to one. The paper calls the causal form a rank-L matrix; it is a sum of L masked
and renormalised rank-one terms, whose rank is not bounded by L (that of the bidirectional form is). Dropout acts on
p(l | t) after the softmax and the logits are not scaled, as in the authors' stable code; `scale` is the 1 / sqrt(D / H)
of their unstable one. Padding is left out before the maximum of the softmax; the authors' bidirectional code takes the
maximum first, so that padding there can push real tokens below the smallest number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import takes_options
from subquad.attention.scanned import ScannedAttention, check_latents, is_future
from subquad.state import State


class Latte(ScannedAttention):
    """Every earlier token, through latents that each keep one running softmax."""

    name = "latte"
    summary = "every earlier token, through latents"
    forms = ("causal", "bidirectional")
    parallel = True
    paper = "Dolga et al. 2024, arXiv:2402.17512"

    @dataclass(frozen=True, kw_only=True)
    class Config(ScannedAttention.Config):
        """Options of Latte."""

        dropout: float = 0.0
        """Dropout on p(l | t), in training."""
        num_latents: int | None = None
        """Latents of all heads together, the paper's L (None: as many as dim)."""
        scale: bool = False
        """Whether queries and keys are divided by sqrt(dim / num_heads)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_latents(self.num_latents, self.num_heads)

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        latents = config.num_latents or config.dim
        self.latents = latents // config.num_heads
        self.query = nn.Linear(config.dim, latents, bias=config.bias)
        self.key = nn.Linear(config.dim, latents, bias=config.bias)

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Mix by the running softmax of every latent; bidirectional, by its softmax over all tokens."""
        p_BHTL = F.dropout(self.logits(self.query, x_BTD).softmax(-1), self.config.dropout, self.training)
        return self.softmaxes(p_BHTL, self.logits(self.key, x_BTD), self.values(x_BTD), state, lengths_B)

    def logits(self, project: nn.Linear, x_BTD: Tensor) -> Tensor:
        """Return logits over the latents `[B, H, T, L / H]`."""
        logits_BHTL = self.split(project(x_BTD), width=self.latents)
        return logits_BHTL / math.sqrt(self.channels) if self.config.scale else logits_BHTL

    @property
    def divisible(self) -> tuple[int, ...]:
        """All heads: each has its own latents."""
        return (self.config.num_heads,)

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return `sum_l p(l | t) p(s | l, t)`; bidirectional, `sum_l p(l | t) p(s | l)`."""
        p_BHTL, k_BHSL = self.logits(self.query, x_BTD).softmax(-1), self.logits(self.key, x_BTD)
        if not self.causal:
            return p_BHTL @ k_BHSL.softmax(-2).mT
        T = x_BTD.shape[1]
        k_BHTSL = k_BHSL[:, :, None].expand(-1, -1, T, -1, -1)
        k_BHTSL = k_BHTSL.masked_fill(is_future(T, x_BTD.device)[..., None], -torch.inf)
        return torch.einsum("bhtl,bhtsl->bhts", p_BHTL, k_BHTSL.softmax(-2))
