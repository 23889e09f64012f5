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
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import Branched, takes_options
from subquad.attention.blocked import BlockedAttention
from subquad.attention.scanned import check_latents, is_future, real_mask, softmax_state
from subquad.attention.sharing import added
from subquad.ops import running_softmax
from subquad.ops.caches import advance
from subquad.ops.patterns import Window
from subquad.parallel import Sent, active_group
from subquad.parallel.exchange import sent_for_prefix
from subquad.parallel.summaries import softmax_before
from subquad.state import State


class LatteMacchiato(Branched, BlockedAttention):
    """The last `width` tokens by softmax and every earlier one through latents, normalised together."""

    name = "latte_macchiato"
    summary = "the last `width` tokens, and every earlier one through latents"
    paper = "Dolga et al. 2025, arXiv:2402.17512 (later versions)"
    branches = ("window", "latents")
    softmax_reach = "width"
    parallel = True

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockedAttention.Config):
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
        self.patterns = (Window(width=config.width),)
        self.latents = (config.num_latents or config.dim) // config.num_heads
        self.latent_query = self.projection(config.num_heads * (self.latents + 1))
        self.latent_key = self.projection(config.num_heads * self.latents)

    @property
    def dropout_p(self) -> float:
        """Zero: dropout acts on p(l | t), not inside the window."""
        return 0.0

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Mix by the window and the latents, weighted by one p(l | t)."""
        seen = self.start(state, x_BTD.shape[1])
        q_BHTK, k_BGTK, v_BGTK = self.projected(x_BTD, seen)
        near = self.near(state, k_BGTK, v_BGTK, self.patterns)
        near_BHTK, k_BGSK, v_BGSK = self.attend(q_BHTK, k_BGTK, v_BGTK, self.patterns, near, "", lengths_B)
        logits_BHTL, v_BHTK, group = (
            self.split(self.latent_key(x_BTD), width=self.latents),
            self.shared(v_BGTK),
            active_group(),
        )
        before = softmax_state(state) if group is None else softmax_before(logits_BHTL, v_BHTK, group)
        p_BHTL = F.dropout(self.shares(x_BTD), self.config.dropout, self.training)
        far_BHTK, (lse_BHL, mean_BHLK), _ = running_softmax(
            p_BHTL[..., 1:],
            logits_BHTL,
            v_BHTK,
            state=before,
            mask=real_mask(lengths_B, x_BTD.shape[1]),
        )
        kept = {"keys": k_BGSK, "values": v_BGSK, "lse": lse_BHL, "mean": mean_BHLK}
        state = State({"seen": advance(seen, x_BTD.shape[1], lengths_B), **kept}, self.config_hash)
        return self.merge(p_BHTL[..., :1] * near_BHTK + far_BHTK), state

    def shares(self, x_BTD: Tensor) -> Tensor:
        """Return p(l | t) `[B, H, T, 1 + L]`, the window first: one softmax over the open branches."""
        logits_BHTL = self.split(self.latent_query(x_BTD), width=self.latents + 1)
        if self.closed:
            closed_L = torch.full((self.latents + 1,), "latents" in self.closed, device=x_BTD.device)
            closed_L[0] = "window" in self.closed
            logits_BHTL = logits_BHTL.masked_fill(closed_L, -torch.inf)
        return logits_BHTL.softmax(-1)

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return `p(0 | t) a(s | t) + sum_l p(l | t) p(s | l, t)`."""
        T = x_BTD.shape[1]
        p_BHTL, k_BHSL = self.shares(x_BTD), self.split(self.latent_key(x_BTD), width=self.latents)
        future_TS1 = is_future(T, x_BTD.device)[..., None]
        k_BHTSL = k_BHSL[:, :, None].expand(-1, -1, T, -1, -1).masked_fill(future_TS1, -torch.inf)
        far_BHTS = torch.einsum("bhtl,bhtsl->bhts", p_BHTL[..., 1:], k_BHTSL.softmax(-2))
        return p_BHTL[..., :1] * super().dense_weights(x_BTD) + far_BHTS

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes of the window's keys and values, and of one latent state in each of log2(P) steps."""
        state_bytes = self.config.num_heads * self.latents * (4 * self.config.channels + 8)
        return added(super().sent(tokens, ranks), sent_for_prefix(state_bytes, ranks))
