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

from torch import Tensor, nn

from subquad.attention.base import Attention, split, takes_options
from subquad.attention.divided import check_even
from subquad.attention.memories.running_softmax import RunningSoftmax
from subquad.attention.parts import check_latents
from subquad.attention.past import Past


class Latte(Attention):
    """Every earlier token, through latents that each keep one running softmax."""

    name = "latte"
    summary = "every earlier token, through latents"
    forms = ("causal", "bidirectional")
    paper = "Dolga et al. 2024, arXiv:2402.17512"

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
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
        self.latents = (config.num_latents or config.dim) // config.num_heads
        self.channels = config.dim // config.num_heads
        self.value = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.query = nn.Linear(config.dim, config.num_heads * self.latents, bias=config.bias)
        self.key = nn.Linear(config.dim, config.num_heads * self.latents, bias=config.bias)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read each latent's mean with the query's share of it."""
        q_BHTL, logits_BHTL = split(self.latents, self.query(x_BTD), self.key(x_BTD))
        (v_BHTV,) = split(self.channels, self.value(x_BTD))
        check_even(self, q_BHTL, v_BHTV)
        if self.config.scale:
            q_BHTL, logits_BHTL = (x / math.sqrt(self.channels) for x in (q_BHTL, logits_BHTL))
        (means,) = past.keep(means=RunningSoftmax(logits_BHTL, past.values(v_BHTV), self.dropout_p))
        return means.read(q_BHTL.softmax(-1))

    @property
    def divisible(self) -> tuple[int, ...]:
        """All heads, since each has its own latents."""
        return (self.config.num_heads,)
