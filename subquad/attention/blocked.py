"""The base of all softmax mechanisms: project, attend over a pattern, keep the keys still in reach.

Shape letters: B batch, T tokens, S keys, D model width, H heads, G key heads, K channels of a head.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.projected import ProjectedAttention
from subquad.ops import block_attention_with_lse
from subquad.ops.attend import softmax_weights
from subquad.ops.caches import advance, appended, first_slots, last_slots
from subquad.ops.patterns import Pattern
from subquad.parallel import Sent, active_group
from subquad.parallel.exchange import earlier, first_before, last_before, sent_for_earlier
from subquad.parallel.ring import ring_attention, sent_for_ring
from subquad.state import State

RING = ("ring_keys", "ring_values")
"""Entries of a state whose keys stand in a ring."""
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
    rings: ClassVar[bool] = False
    """Whether decoding may keep the keys in a ring: for layers without keys or weights besides those of `patterns`."""

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Attend to the cached keys and the new ones."""
        if state is not None and RING[0] in state:
            return self.mix_in_ring(x_BTD, state)
        seen = self.start(state, x_BTD.shape[1])
        q_BHTK, k_BGTK, v_BGTK = self.projected(x_BTD, seen)
        state = self.near(state, k_BGTK, v_BGTK, self.patterns)
        y_BHTK, k_BGSK, v_BGSK = self.attend(q_BHTK, k_BGTK, v_BGTK, self.patterns, state, "", lengths_B)
        seen = advance(seen, x_BTD.shape[1], lengths_B)
        kept: dict[str, Tensor | int | State] = {"keys": k_BGSK, "values": v_BGSK} if self.causal else {}
        return self.finish(y_BHTK, x_BTD), State({"seen": seen, **kept}, self.config_hash)

    def mix_in_ring(self, x_B1D: Tensor, state: State) -> tuple[Tensor, State]:
        """Attend from one token of each row to a ring, into which its own key and value are written in place."""
        seen_B = state.seen
        assert isinstance(seen_B, Tensor)
        k_BGNK, v_BGNK = (state.tensor(name) for name in RING)
        q_BH1K, *new = self.projected(x_B1D, seen_B)
        slots = [slot_B[:, None, None, None] for slot_B in self.ring_slots(seen_B, k_BGNK.shape[2])]
        for kept_BGNK, new_BG1K in zip((k_BGNK, v_BGNK), new, strict=True):
            for slot_B111 in slots:
                kept_BGNK.scatter_(2, slot_B111.expand(new_BG1K.shape), new_BG1K.to(kept_BGNK.dtype))
        bias_BHN = self.ring_bias(seen_B, k_BGNK.shape[2], q_BH1K)
        y_BH1K = F.scaled_dot_product_attention(
            q_BH1K, k_BGNK, v_BGNK, bias_BHN[:, :, None], enable_gqa=k_BGNK.shape[1] != q_BH1K.shape[1]
        )
        kept: dict[str, Tensor | int | State] = dict(zip(RING, (k_BGNK, v_BGNK), strict=True))
        return self.finish(y_BH1K, x_B1D), State({"seen": seen_B + 1, **kept}, self.config_hash)

    def ring_slots(self, seen_B: Tensor, slots: int) -> list[Tensor]:
        """Return the slots, each `[B]`, into which the token at position `seen` is written."""
        return [seen_B % slots]

    def ring_bias(self, seen_B: Tensor, slots: int, q_BH1K: Tensor) -> Tensor:
        """Return what is added to the scores `[B, H, slots]` of the queries `q` at position `seen`."""
        # Slot n holds the last position that is n modulo the slots; before the first round there is none.
        p_BN = seen_B[:, None] - (seen_B[:, None] - torch.arange(slots, device=seen_B.device)) % slots
        return self.bias_of(self.patterns, seen_B, p_BN, q_BH1K)

    def bias_of(self, patterns: tuple[Pattern, ...], seen_B: Tensor, p_BN: Tensor, q_BH1K: Tensor) -> Tensor:
        """Return `[B, H, N]`: 0 where the query at position `seen` sees the key at `p`, else -inf."""
        zero_B1N = torch.zeros_like(p_BN, dtype=q_BH1K.dtype)[:, None]
        biases = [
            zero_B1N.masked_fill(~(pattern.allowed(seen_B[:, None], p_BN) & (p_BN >= 0))[:, None], -torch.inf)
            for pattern in patterns
        ]
        # Not of the configuration: tensor parallelism divides the heads.
        heads = self.heads_of(patterns) if len(patterns) > 1 else [q_BH1K.shape[1]]
        return torch.cat([x.expand(-1, n, -1) for x, n in zip(biases, heads, strict=True)], 1)

    def to_ring(self, state: State, capacity: int) -> State:
        """Return the state of one row with its keys in a ring of constant size: position p in slot p mod N.

        N is the reach and the token itself, or `capacity` if nothing bounds the reach.
        """
        if not self.rings:
            return state
        reach, seen = self.reach(self.patterns), int(state.seen)
        slots = capacity if reach is None else reach + 1
        keys = (state.tensor(name)[:, :, -slots:] for name in ("keys", "values"))
        ring = (F.pad(x, (0, 0, slots - x.shape[2], 0)).roll(seen % slots, 2) for x in keys)
        return State({"seen": state.seen, **dict(zip(RING, ring, strict=True))}, state.config_hash)

    def from_ring(self, state: State) -> State:
        """Return the state that `to_ring` takes, aligned to the end, for one row."""
        if RING[0] not in state:
            return state
        seen = int(state.seen)
        keys, values = (state.tensor(name).roll(-(seen % state.tensor(name).shape[2]), 2) for name in RING)
        return State({"seen": state.seen, "keys": keys, "values": values}, state.config_hash)

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
        self.check_causal()
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
