"""The base of all softmax mechanisms: project, attend over a pattern, keep the keys still in reach.

Shape letters: B batch, T tokens, S keys, D model width, H heads, G key heads, K channels of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.projected import ProjectedAttention
from subquad.ops import block_attention_with_lse
from subquad.ops.attend import softmax_weights
from subquad.ops.caches import appended, first_slots, last_slots
from subquad.ops.patterns import Pattern
from subquad.parallel import Sent, active_group
from subquad.parallel.exchange import earlier, first_before, last_before, sent_for_earlier
from subquad.parallel.ring import ring_attention, sent_for_ring
from subquad.state import State

FIRST = ("sink_keys", "sink_values")
"""Entries of a state that hold the first tokens' keys and values."""


class Places(NamedTuple):
    """Positions of queries and key slots, as arguments of `block_attention`."""

    q_start: int | Tensor = 0
    k_start: int | Tensor = 0
    lengths: Tensor | None = None


class BlockedAttention(ProjectedAttention):
    """Softmax attention over the keys that `patterns` allow; the state holds the keys and values still in reach.

    One pattern is for all heads; of two patterns the second is for the last `H // 2` heads.
    """

    parallel = True
    patterns: tuple[Pattern, ...]

    def attend(
        self,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        patterns: tuple[Pattern, ...],
        state: State | None,
        prefix: str,
        lengths_B: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, and the last keys and values of each row to keep, aligned to the end.

        In an active group, `state` comes from `near`; without a bound on the reach the keys travel round a ring.
        """
        group = active_group()
        if group is not None and state is None:

            def one_block(q: Tensor, k: Tensor, v: Tensor, q_start: int, k_start: int) -> tuple[Tensor, Tensor]:
                return self.attend_with_lse(q, k, v, patterns, Places(q_start, k_start))

            return ring_attention(one_block, q_BHTK, k_BGTK, v_BGTK, group), k_BGTK, v_BGTK
        seen = 0 if state is None else state.seen
        k_BGSK, v_BGSK, old, lengths_B = self.with_cache(k_BGTK, v_BGTK, state, prefix, lengths_B)
        y_BHTK = self.attend_slots(q_BHTK, k_BGSK, v_BGSK, patterns, Places(seen, seen - old, lengths_B))
        return y_BHTK, *self.kept(k_BGSK, v_BGSK, patterns, lengths_B)

    def near(
        self,
        state: State | None,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        patterns: tuple[Pattern, ...],
        prefix: str = "",
        tokens: int | None = None,
    ) -> State | None:
        """Return a state with the keys in reach that earlier ranks hold, in an active group with a bounded reach.

        `tokens` is this rank's number of tokens if `k` and `v` cover only the first of them: then no later rank needs
        any.
        """
        group, reach, T = active_group(), self.reach(patterns), k_BGTK.shape[2]
        if state is not None or group is None or reach is None:
            return state
        spans = last_before(reach if tokens in (None, T) else 0, T, group.size)
        keys, values = earlier(spans, group, k_BGTK, v_BGTK)
        return State({"seen": group.offset(tokens or T), f"{prefix}keys": keys, f"{prefix}values": values})

    def with_first(self, near: State | None, k_BGTK: Tensor, v_BGTK: Tensor, count: int) -> State | None:
        """Return the state of `near` with the first `count` tokens that earlier ranks hold, in an active group."""
        group = active_group()
        if near is None or group is None or count == 0:
            return near
        held = earlier(first_before(count, k_BGTK.shape[2], group.size), group, k_BGTK, v_BGTK)
        # Padded, not made anew, on the first rank too: it must take part in the backward pass.
        padded = (F.pad(x, (0, 0, 0, count - x.shape[2])) for x in held)
        return State({**near.entries, **dict(zip(FIRST, padded, strict=True))})

    def attend_first(
        self,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        patterns: tuple[Pattern, ...],
        state: State | None,
        seen: int | Tensor,
        count: int,
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        """Return outputs and logsumexp over the first `count` tokens, and these tokens as entries of a state.

        `patterns` allow keys before the query alone, so that empty slots are not seen; `state` comes from `with_first`.
        """
        kept = {
            name: first_slots(x[:, :, :count], None if state is None else state.tensor(name), seen, count)
            for name, x in zip(FIRST, (k_BGTK, v_BGTK), strict=True)
        }
        return self.attend_with_lse(q_BHTK, kept[FIRST[0]], kept[FIRST[1]], patterns, Places(seen)), kept

    def with_cache(
        self, k_BGTK: Tensor, v_BGTK: Tensor, state: State | None, prefix: str, lengths_B: Tensor | None
    ) -> tuple[Tensor, Tensor, int, Tensor | None]:
        """Return cached and new keys and values, the number of cached ones, and the real slots of each row."""
        if state is None:
            return k_BGTK, v_BGTK, 0, lengths_B
        k_BGSK = appended(state.tensor(f"{prefix}keys"), k_BGTK)
        v_BGSK = appended(state.tensor(f"{prefix}values"), v_BGTK)
        old = k_BGSK.shape[2] - k_BGTK.shape[2]
        return k_BGSK, v_BGSK, old, None if lengths_B is None else lengths_B + old

    def kept(
        self, k_BGSK: Tensor, v_BGSK: Tensor, patterns: tuple[Pattern, ...], lengths_B: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values in reach of the next token: the last ones of each row, aligned to the end."""
        reach = self.reach(patterns)
        kept = k_BGSK.shape[2] if reach is None else min(k_BGSK.shape[2], reach)
        return last_slots(k_BGSK, kept, lengths_B), last_slots(v_BGSK, kept, lengths_B)

    def attend_slots(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, patterns: tuple[Pattern, ...], places: Places
    ) -> Tensor:
        """Return the outputs `[B, H, T, K]` of all heads; the queries are the last T of the S slots."""
        return self.attend_with_lse(q_BHTK, k_BGSK, v_BGSK, patterns, places)[0]

    def attend_with_lse(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, patterns: tuple[Pattern, ...], places: Places
    ) -> tuple[Tensor, Tensor]:
        """Return outputs `[B, H, T, K]` and logsumexp `[B, H, T]` for queries and key slots at any positions."""
        if len(patterns) == 1:
            return self.attend_to(q_BHTK, k_BGSK, v_BGSK, patterns[0], **places._asdict())
        heads = self.heads_of(patterns)
        groups = (x.split(heads, 1) for x in (q_BHTK, self.shared(k_BGSK), self.shared(v_BGSK)))
        parts = [self.attend_to(q, k, v, p, **places._asdict()) for q, k, v, p in zip(*groups, patterns, strict=True)]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 1)

    def attend_to(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, pattern: Pattern, **where: Any
    ) -> tuple[Tensor, Tensor]:
        """Call `block_attention_with_lse` with the layer's dropout."""
        return block_attention_with_lse(q_BHTK, k_BGSK, v_BGSK, pattern, dropout_p=self.dropout_p, **where)

    def heads_of(self, patterns: tuple[Pattern, ...]) -> list[int]:
        """Return the number of heads of each pattern."""
        H = self.config.num_heads
        return [H] if len(patterns) == 1 else [H - H // 2, H // 2]

    @property
    def divisible(self) -> tuple[int, ...]:
        """Query heads and key heads if all heads have one pattern."""
        return (self.config.num_heads, self.kv_heads) if len(self.patterns) == 1 else ()

    def unions(self, tokens: int) -> list[tuple[int, tuple[Pattern, ...]]]:
        """Return groups of neighbouring query heads: their number, and the disjoint patterns whose union they see."""
        return [(n, (pattern,)) for n, pattern in zip(self.heads_of(self.patterns), self.patterns, strict=True)]

    def reach(self, patterns: tuple[Pattern, ...]) -> int | None:
        """Return how many tokens back a query looks at most; None: to the first token."""
        reaches = [pattern.reach for pattern in patterns]
        return max(r for r in reaches if r is not None) if None not in reaches else None

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return `softmax(q k^T / sqrt(K))` over the allowed keys."""
        return self.pattern_weights(self.queries(x_BTD), self.keys(x_BTD))

    def pattern_weights(self, q_BHTK: Tensor, k_BGSK: Tensor) -> Tensor:
        """Return the weights `[B, H, T, S]` of all heads, each over the keys it sees."""
        heads, unions = zip(*self.unions(k_BGSK.shape[2]), strict=True)
        parts = zip(q_BHTK.split(heads, 1), self.shared(k_BGSK).split(heads, 1), unions, strict=True)
        return torch.cat([softmax_weights(q, k, *union) for q, k, union in parts], 1)

    def whole_state(self, state: State, device: Any) -> State:
        """Return the last rank's state, or the keys of all ranks if nothing bounds the reach."""
        group = active_group()
        if group is None or self.reach(self.patterns) is not None:
            return super().whole_state(state, device)
        keys, values = (group.gather(state.tensor(name), 2) for name in ("keys", "values"))
        return State({"seen": keys.shape[2], "keys": keys, "values": values}, self.config_hash)

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes of keys and values sent: those in reach of the next rank, or all of them round a ring."""
        return self.sent_for(self.patterns, tokens, ranks)

    def sent_for(self, patterns: tuple[Pattern, ...], tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes sent for keys and values that these patterns see."""
        reach, token_bytes = self.reach(patterns), 2 * 4 * self.kv_dim
        if reach is None:
            return sent_for_ring(tokens * token_bytes, ranks)
        return sent_for_earlier(last_before(reach, tokens, ranks), tokens, token_bytes)
