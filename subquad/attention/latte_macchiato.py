"""Latte-Macchiato: latents and one more state that is a softmax window (Dolga et al. 2025, TMLR, "Unifying Linear-Time
Attention via Latent Probabilistic Modelling", and v3 of arXiv:2402.17512).

    y_t = p(0 | t) sum_{t - width < s <= t} a(s | t) v_s + sum_{l >= 1} p(l | t) sum_{s <= t} p(s | l, t) v_s

p(l | t) is one softmax over the window and the L latents, so rows of the weights sum to one; a is softmax attention
over the window, by default with rotary positions, which the latents do not have; p(s | l, t) is causal Latte's running
softmax. Either of the two may be closed (`without`): p(l | t) is then one softmax over the other. The formula is ours
from those abstracts: the authors' code of it is not public.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, split, takes_options
from subquad.attention.branches import Branched
from subquad.attention.memories.key_values import KeyValues, Sight
from subquad.attention.memories.running_softmax import RunningSoftmax
from subquad.attention.parts import (
    SoftmaxConfig,
    add_softmax_projections,
    check_latents,
    divisible_heads,
    softmax_heads,
)
from subquad.attention.past import Past
from subquad.ops.patterns import Window


class LatteMacchiato(Branched, Attention):
    """The last `width` tokens by softmax and every earlier one through latents, normalised together."""

    name = "latte_macchiato"
    summary = "the last `width` tokens, and every earlier one through latents"
    paper = "Dolga et al. 2025, arXiv:2402.17512 (later versions)"
    branches = ("window", "latents")
    softmax_reach = "width"
    rotates = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
        """Options of Latte-Macchiato."""

        dropout: float = 0.0
        """Dropout on p(l | t), including the window's share, in training."""
        rope: bool = True
        """Whether the window's queries and keys carry rotary positions."""
        width: int = 128
        """Tokens of the window, the query's own included."""
        num_latents: int | None = None
        """Latents of all heads together (None: as many as dim)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(width=1)
            check_latents(self.num_latents, self.num_heads)

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_softmax_projections(self, config)
        self.sight = Sight(((Window(width=config.width),),))
        self.latents = (config.num_latents or config.dim) // config.num_heads
        bias = config.bias if config.qkv_bias is None else config.qkv_bias
        self.latent_query = nn.Linear(config.dim, config.num_heads * (self.latents + 1), bias=bias)
        self.latent_key = nn.Linear(config.dim, config.num_heads * self.latents, bias=bias)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the window and the latents with the shares of one p(l | t)."""
        q_BHTK, k_BGTK, v_BGTK = softmax_heads(self, x_BTD, past.start)
        (logits_BHTL,) = split(self.latents, self.latent_key(x_BTD))
        v_BGTK = past.values(v_BGTK)
        v_BHTK = v_BGTK.repeat_interleave(q_BHTK.shape[1] // v_BGTK.shape[1], 1)
        near, far = past.keep(near=KeyValues(k_BGTK, v_BGTK, self.sight), far=RunningSoftmax(logits_BHTL, v_BHTK))
        p_BHTL = F.dropout(self.shares(x_BTD), self.config.dropout, self.training)
        return p_BHTL[..., :1] * near.read(q_BHTK) + far.read(p_BHTL[..., 1:])

    def shares(self, x_BTD: Tensor) -> Tensor:
        """Return p(l | t) `[B, H, T, 1 + L]`, the window first: one softmax over the open branches."""
        (logits_BHTL,) = split(self.latents + 1, self.latent_query(x_BTD))
        if self.closed:
            closed_L = torch.full((self.latents + 1,), "latents" in self.closed, device=x_BTD.device)
            closed_L[0] = "window" in self.closed
            logits_BHTL = logits_BHTL.masked_fill(closed_L, -torch.inf)
        return logits_BHTL.softmax(-1)

    @property
    def divisible(self) -> tuple[int, ...]:
        """Query heads and key heads."""
        return divisible_heads(self.config, self.sight)
