"""Longformer: a sliding window and global tokens with projections of their own (Beltagy et al. 2020, arXiv:2004.05150,
section 3.1).

    y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s        over the window of t and the first `num_global` tokens
    y_g = sum_s softmax_s(q'_g . k'_s / sqrt(K)) v'_s     over all tokens, for a global token g; q', k', v' are its own

Global tokens are the first ones. Causal, every query (a global one too) sees nothing after itself, the window is the
last `width` tokens, and the state keeps the window's keys and the global tokens'. Other tokens see a global token
through the ordinary projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.attention.base import takes_options
from subquad.attention.blocked import BlockedAttention
from subquad.attention.memories.key_values import Sight
from subquad.attention.sharing import added
from subquad.layers.positions import positions
from subquad.ops import merge_attention
from subquad.ops.attend import softmax_weights
from subquad.ops.caches import advance
from subquad.ops.counting import first_replaced
from subquad.ops.patterns import Band, Full, Globals, Pattern, Segments, Sinks, Window
from subquad.parallel import Sent
from subquad.parallel.exchange import first_before, sent_for_earlier
from subquad.state import State


class Longformer(BlockedAttention):
    """A window, and the first tokens, which see everything and are seen by all."""

    name = "longformer"
    summary = "the `width` tokens next to it, and global tokens"
    paper = "Beltagy et al. 2020, arXiv:2004.05150"
    forms = ("causal", "bidirectional")
    parallel = True
    copied = {f"global_{name}": name for name in ("query", "key", "value")}  # noqa: RUF012 (read only)

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockedAttention.Config):
        """Options of Longformer."""

        width: int = 256
        """Tokens of the window, the query's own included."""
        num_global: int = 1
        """Number of global tokens: the first ones."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(width=1)
            if self.num_global < 1:
                raise ValueError(f"num_global must be at least 1 (else use window), got {self.num_global}")

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        before, count = config.width // 2, config.num_global
        self.far: Pattern
        if config.causal:
            self.patterns, self.far = (Window(width=config.width),), Sinks(count=count, back=config.width - 1)
        else:
            after = config.width - 1 - before
            self.patterns = (Band(before=before, after=after),)
            self.far = Globals(count=count, back=before, ahead_blocks=after)
        self.sight = Sight(((*self.patterns, self.far),))
        self.global_patterns = (Segments(size=count, back=0) if config.causal else Full(),)
        self.global_query = self.projection(self.q_dim)
        self.global_key = self.projection(self.kv_dim)
        self.global_value = self.projection(self.kv_dim)

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Attend to the window and the global keys and merge; then compute the global tokens' own rows."""
        seen, count, given = self.start(state, x_BTD.shape[1]), self.config.num_global, state
        q, k, v = self.projected(x_BTD, seen)
        state = self.with_first(self.near(state, k, v, self.patterns), k, v, count)
        k_BGSK, v_BGSK, old, real_B = self.with_cache(k, v, state, "", lengths_B)
        after = advance(seen, x_BTD.shape[1], lengths_B)
        entries: dict[str, Tensor | int | State] = {"seen": after}
        with first_replaced(count):
            near = self.attend_to(q, k_BGSK, v_BGSK, self.patterns[0], q_start=seen, k_start=seen - old, lengths=real_B)
            if self.causal:
                far, first = self.attend_first(q, k, v, (self.far,), state, seen, count)
                k_BGSK, v_BGSK = self.kept(k_BGSK, v_BGSK, self.patterns, real_B)
                entries |= {"keys": k_BGSK, "values": v_BGSK, **first}
            else:
                far = self.attend_to(q, k, v, self.far, lengths=lengths_B)
        y_BHTK, _ = merge_attention(*zip(near, far, strict=True))
        if given is None or "global_keys" in given:
            y_BHTK, own = self.with_global_rows(y_BHTK, x_BTD, given, lengths_B)
            if self.causal and not (isinstance(after, int) and after >= count):
                entries |= own
        return self.merge(y_BHTK), State(entries, self.config_hash)

    def unions(self, tokens: int) -> list[tuple[int, tuple[Pattern, ...]]]:
        """Return one group: all heads see the window and the global tokens."""
        return [(self.config.num_heads, (*self.patterns, self.far))]

    def with_global_rows(
        self, y_BHTK: Tensor, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return `y` with the global tokens' rows, and the keys and values that later global tokens need."""
        seen, count = self.start(state, x_BTD.shape[1]), self.config.num_global
        # Only the first tokens of this call can be global, and causal ones see global tokens alone.
        x_BGD, own = x_BTD[:, :count], {}
        q_BHGK = self.rotated(self.query_heads(self.global_query(x_BGD)), seen)
        k_BGSK, v_BGSK = self.global_keys(x_BGD if self.causal else x_BTD, seen)
        if self.causal:
            lengths_B = None if lengths_B is None else lengths_B.clamp(max=count)
            state = self.near(state, k_BGSK, v_BGSK, self.global_patterns, "global_", x_BTD.shape[1])
            rows, keys, values = self.attend(q_BHGK, k_BGSK, v_BGSK, self.global_patterns, state, "global_", lengths_B)
            own = {"global_keys": keys, "global_values": values}
        else:
            rows = self.attend_to(q_BHGK, k_BGSK, v_BGSK, self.global_patterns[0], key_lengths=lengths_B)[0]
        is_global = self.is_global(seen, x_BGD)
        return torch.cat([torch.where(is_global, rows, y_BHTK[:, :, :count]), y_BHTK[:, :, count:]], 2), own

    def global_keys(self, x_BTD: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that global tokens see, `[B, G, T, K]`."""
        k_BGTK = self.rotated(self.key_heads(self.global_key(x_BTD)), start)
        return k_BGTK, self.split(self.global_value(x_BTD), width=self.channels)

    def is_global(self, start: int | Tensor, x_BTD: Tensor) -> Tensor:
        """Return the bool `[B or 1, 1, T, 1]` of global tokens."""
        return (positions(start, x_BTD.shape[1], x_BTD.device) < self.config.num_global)[:, None, :, None]

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return the softmax over window and global tokens; global rows use their own queries and keys."""
        w_BHTS = super().dense_weights(x_BTD)
        q_BHTK = self.rotated(self.query_heads(self.global_query(x_BTD)), 0)
        own_BHTS = softmax_weights(q_BHTK, self.global_keys(x_BTD, 0)[0], *self.global_patterns)
        return torch.where(self.is_global(0, x_BTD), own_BHTS, w_BHTS)

    def definition(self, x_BTD: Tensor) -> Tensor:
        """Return `merge(weights @ values)`, with the global rows' own values."""
        w_BHTS, own_BHTK = self.weights(x_BTD), self.shared(self.global_keys(x_BTD, 0)[1])
        return self.merge(torch.where(self.is_global(0, x_BTD), w_BHTS @ own_BHTK, w_BHTS @ self.values(x_BTD)))

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes of the window's and global tokens' keys and values, and of global rows that ranks share."""
        count, token_bytes = self.config.num_global, 2 * 4 * self.kv_dim
        parts = [super().sent(tokens, ranks), sent_for_earlier(first_before(count, tokens, ranks), tokens, token_bytes)]
        if tokens <= count:
            parts.append(self.sent_for(self.global_patterns, tokens, ranks))
        return added(*parts)
