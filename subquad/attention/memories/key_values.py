"""Keys and values as a memory: softmax over the keys that patterns allow; the state holds those still in reach.

Shape letters: B batch, H heads, G key heads, T tokens, S keys, K channels of a head, V value channels, N slots of a
ring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops import block_attention_with_lse, merge_attention
from subquad.ops.attend import softmax_weights
from subquad.ops.caches import appended, first_slots, last_slots
from subquad.ops.patterns import Pattern
from subquad.parallel.exchange import earlier, first_before, last_before
from subquad.parallel.ring import ring_attention

Tensors = tuple[Tensor, ...]
Entries = dict[str, Tensor]
Attended = tuple[Tensor, Tensor]
"""Outputs `[B, H, T, V]` and logsumexp `[B, H, T]`."""


@dataclass(frozen=True)
class Sight:
    """The keys that a query sees: those that a pattern of `near` allows, and first tokens that one of `far` allows.

    A single entry of `near` is for all heads; with two entries, the second is for the last H // 2 heads. An entry is
    one pattern or a union of disjoint ones. `far` has one pattern for each entry, disjoint from it, and the state keeps
    the `first` tokens for ever. Made once, with the layer.
    """

    near: tuple[tuple[Pattern, ...], ...]
    far: tuple[Pattern, ...] = ()
    first: int = 0

    # Attributes, since a decoding step would compute properties several times, and torch.compile traces no cached ones.
    reach: int | None = field(init=False)
    """How many tokens back `near` looks at most; None: to the first token."""
    slots: tuple[str, ...] = field(init=False)
    """Names of the state's entries."""

    def __post_init__(self) -> None:
        reaches = [pattern.reach for union in self.near for pattern in union]
        object.__setattr__(self, "reach", None if None in reaches else max(r for r in reaches if r is not None))
        names = "_keys", "_values", "_first_keys", "_first_values"
        object.__setattr__(self, "slots", names if self.first else names[:2])

    def patterns_per_head_group(self, heads: int) -> list[tuple[int, tuple[Pattern, ...]]]:
        """Return groups of neighbouring query heads: their number, and the disjoint patterns whose union they see."""
        all_of = [(*near, self.far[i]) for i, near in enumerate(self.near)] if self.far else list(self.near)
        return list(zip(heads_of(self.near, heads), all_of, strict=True))


@dataclass(frozen=True, eq=False)
class KeyValues:
    """What tokens write: keys `[B, G, T, K]` and values; `read(q)` is softmax attention over the keys in `sight`.

    `sink_H` is a logit of each head that takes part in the softmax and has no value.
    """

    k: Tensor
    v: Tensor
    sight: Sight
    dropout_p: float = 0.0
    sink_H: Tensor | None = None

    static_slots: ClassVar[tuple[str, ...]] = ("_ring_keys", "_ring_values")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state's entries."""
        return self.sight.slots

    def read(self, q_BHTK: Tensor, before: Tensors | None, at: Any) -> tuple[Tensor, Tensors]:
        """Return the outputs, and the last keys and values of each row that the next token may see."""
        sight, group = self.sight, at.group
        if before is None and group is not None:  # keys of unbounded reach go round the ranks
            return ring_attention(self._attend_near, q_BHTK, self.k, self.v, group), (self.k, self.v)
        k, v, lengths, after = self._written(before, at)
        old = k.shape[2] - at.tokens
        found = self._attend(q_BHTK, k, v, k.shape[2], q_start=at.start, k_start=at.start - old, lengths=lengths)
        if sight.first:
            # `far` allows only keys before the query, so empty slots are not seen.
            far = attend(sight.far, q_BHTK, after[2], after[3], self.dropout_p, q_start=at.start)
            found = merge_attention(*zip(found, far, strict=True))
        return found[0] if self.sink_H is None else self._beside_sink(*found), after

    def write(self, before: Tensors | None, at: Any) -> Tensors:
        """Return the entries after these tokens, without outputs."""
        return self._written(before, at)[3]

    def _written(self, before: Tensors | None, at: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensors]:
        """Return the keys and values at hand, their number in each row (None: all), and the entries after them."""
        sight, k, v, lengths = self.sight, self.k, self.v, at.lengths
        if before is not None:
            k, v = appended(before[0], k), appended(before[1], v)
            lengths = None if lengths is None else lengths + k.shape[2] - at.tokens
        kept = k.shape[2] if sight.reach is None else min(k.shape[2], sight.reach)
        after: Tensors = (last_slots(k, kept, lengths), last_slots(v, kept, lengths))
        if sight.first:
            held, n = (None, None) if before is None else before[2:], sight.first
            first = [first_slots(x[:, :, :n], y, at.start, n) for x, y in zip((self.k, self.v), held, strict=True)]
            after = (*after, *first)
        return k, v, lengths, after

    def read_all(self, q_BHTK: Tensor, at: Any) -> Tensor:
        """Return the outputs of the bidirectional form, whose pattern looks ahead."""
        found = self._attend(q_BHTK, self.k, self.v, at.tokens, lengths=at.lengths)
        return found[0] if self.sink_H is None else self._beside_sink(*found)

    def literal(self, q_BHTK: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights and the values."""
        share = q_BHTK.shape[1] // self.k.shape[1]
        k, v = (x.repeat_interleave(share, 1) for x in (self.k, self.v))
        return self.weights(q_BHTK, k).to(v.dtype) @ v

    def weights(self, q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor:
        """Return the weights `[B, H, T, S]` of all heads, each over the keys that it sees."""
        heads, unions = zip(*self.sight.patterns_per_head_group(q_BHTK.shape[1]), strict=True)
        sinks = [None] * len(heads) if self.sink_H is None else self.sink_H.split(heads)
        parts = zip(q_BHTK.split(heads, 1), k_BHSK.split(heads, 1), sinks, unions, strict=True)
        return torch.cat([softmax_weights(q, k, *union, sink_H=sink) for q, k, sink, union in parts], 1)

    def _attend(self, q_BHTK: Tensor, k: Tensor, v: Tensor, span: int, **where: Any) -> Attended:
        """Return the outputs over the keys in `near`, merging unions of patterns.

        `span` is one more than the largest distance from a query back to a key: patterns that begin there see none.
        """
        patterns = list(zip(*self.sight.near, strict=True))
        near = [each for each in patterns if min([p.nearest for p in each]) < span] or patterns[:1]
        parts = [attend(each, q_BHTK, k, v, self.dropout_p, **where) for each in near]
        return parts[0] if len(parts) == 1 else merge_attention(*zip(*parts, strict=True))

    def _attend_near(self, q: Tensor, k: Tensor, v: Tensor, q_start: int, k_start: int) -> Attended:
        return self._attend(q, k, v, q_start + q.shape[2] - k_start, q_start=q_start, k_start=k_start)

    def _beside_sink(self, y_BHTV: Tensor, lse_BHT: Tensor) -> Tensor:
        assert self.sink_H is not None
        # In float64: the logit's gradient is a sum over all tokens, in which much cancels; the shares are few numbers.
        share_BHT = torch.sigmoid(lse_BHT.double() - self.sink_H.double()[:, None]).to(lse_BHT.dtype)
        return (y_BHTV * share_BHT[..., None]).to(y_BHTV.dtype)

    # Ranks exchange rows and not summaries: those in reach, and the first ones.

    def fetched(self, at: Any) -> Tensors | None:
        """Return the entries before these tokens; None if the keys go from rank to rank in a ring instead."""
        if self.sight.reach is None:
            return None
        size, n = at.group.size, self.sight.first
        found = earlier(last_before(self.sight.reach, at.tokens, size), at.group, self.k, self.v)
        if n:
            held = earlier(first_before(n, at.tokens, size), at.group, self.k, self.v)
            # Padded and not created, on the first rank too, which must take part in the backward pass.
            found += tuple([F.pad(x, (0, 0, 0, n - x.shape[2])) for x in held])
        return found

    def gathered(self, entries: Entries, group: Any) -> Entries:
        """Return the keys and values of all ranks from those of each."""
        return {slot: group.gather(x, 2) for slot, x in entries.items()}

    # The static cache: near keys are in a ring buffer, position p in slot p mod N; after it are the first keys, and one
    # of zeros for the learned sink, so that a step is one call of scaled_dot_product_attention.

    def to_static_cache(self, entries: Entries, seen: int, capacity: int) -> Entries:
        """Return ring buffers of one row's keys and values: N is the reach and one, or `capacity` without a bound."""
        N = capacity if self.sight.reach is None else self.sight.reach + 1
        rings = {}
        for kind in ("_keys", "_values"):
            near = entries[kind][:, :, -N:]
            ring = F.pad(near, (0, 0, N - near.shape[2], 0)).roll(seen % N, 2)
            if self.sight.first:
                ring = torch.cat([ring, entries[f"_first{kind}"]], 2)
            rings[f"_ring{kind}"] = F.pad(ring, (0, 0, 0, int(self.sink_H is not None)))
        return rings

    def from_static_cache(self, rings: Entries, seen: int) -> Entries:
        """Return the entries that `to_static_cache` takes: of the last tokens, as many as there are within reach."""
        entries, n = {}, self.sight.first
        reach = seen if self.sight.reach is None else min(seen, self.sight.reach)
        for kind in ("_keys", "_values"):
            ring = rings[f"_ring{kind}"]
            N = self._ring_slots(ring)
            entries[kind] = ring[:, :, :N].roll(-(seen % N), 2)[:, :, N - reach :]
            if n:
                entries[f"_first{kind}"] = ring[:, :, N : N + n]
        return entries

    def read_in_place(self, q_BH1K: Tensor, rings: Tensors, at: Any) -> Tensor:
        """Write one token's key and value into the rings, and read them."""
        k_BGNK, v_BGNV = rings
        seen_B, N = at.start, self._ring_slots(k_BGNK)
        slots = [seen_B % N]
        if self.sight.first:  # a token after the first ones is written into the same slot again
            slots.append(torch.where(seen_B < self.sight.first, N + seen_B, slots[0]))
        slots = [slot_B[:, None, None, None] for slot_B in slots]
        for held, new in ((k_BGNK, self.k), (v_BGNV, self.v)):
            for slot_B111 in slots:
                held.scatter_(2, slot_B111.expand(new.shape), new.to(held.dtype))
        bias_BHN = self._bias(seen_B, N, q_BH1K)
        return F.scaled_dot_product_attention(
            q_BH1K, k_BGNK, v_BGNV, bias_BHN[:, :, None], enable_gqa=k_BGNK.shape[1] != q_BH1K.shape[1]
        )

    def _ring_slots(self, ring_BGNK: Tensor) -> int:
        return ring_BGNK.shape[2] - self.sight.first - (self.sink_H is not None)

    def _bias(self, seen_B: Tensor, N: int, q_BH1K: Tensor) -> Tensor:
        """Return `[B, H, slots]`: 0 for keys that the token at position `seen` sees, the sink's logit, else -inf."""
        sight = self.sight
        # Slot n holds the last position that is n modulo the slots; before the first round there is none.
        p_BN = seen_B[:, None] - (seen_B[:, None] - torch.arange(N, device=seen_B.device)) % N
        bias_BHN = bias_of(sight.near, seen_B, p_BN, q_BH1K)
        if sight.first:
            p_BN = torch.arange(sight.first, device=seen_B.device).expand(len(seen_B), -1)
            bias_BHN = torch.cat([bias_BHN, bias_of([(far,) for far in sight.far], seen_B, p_BN, q_BH1K)], 2)
        if self.sink_H is not None:
            sink_BH1 = self.sink_H.to(q_BH1K.dtype)[:, None].expand(len(seen_B), -1, -1)
            bias_BHN = torch.cat([bias_BHN, sink_BH1], 2)
        return bias_BHN


def attend(patterns: Any, q_BHTK: Tensor, k: Tensor, v: Tensor, dropout_p: float, **where: Any) -> Attended:
    """Return outputs and logsumexp; of two patterns the second is for the last H // 2 heads."""
    if len(patterns) == 1:
        return block_attention_with_lse(q_BHTK, k, v, patterns[0], dropout_p=dropout_p, **where)
    heads, share = heads_of(patterns, q_BHTK.shape[1]), q_BHTK.shape[1] // k.shape[1]
    groups = (x.split(heads, 1) for x in (q_BHTK, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)))
    parts = [
        block_attention_with_lse(q, k, v, pattern, dropout_p=dropout_p, **where)
        for q, k, v, pattern in zip(*groups, patterns, strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def bias_of(unions: Any, seen_B: Tensor, p_BN: Tensor, q_BH1K: Tensor) -> Tensor:
    """Return `[B, H, N]`: 0 where the query at position `seen` sees the key at `p`, else -inf."""
    zero_B1N = torch.zeros_like(p_BN, dtype=q_BH1K.dtype)[:, None]
    biases = []
    for union in unions:
        seen_BN = (p_BN >= 0) & reduce(or_, [pattern.allowed(seen_B[:, None], p_BN) for pattern in union])
        biases.append(zero_B1N.masked_fill(~seen_BN[:, None], -torch.inf))
    # Not of the configuration: tensor parallelism divides the heads.
    heads = heads_of(unions, q_BH1K.shape[1])
    return torch.cat([x.expand(-1, n, -1) for x, n in zip(biases, heads, strict=True)], 1)


def heads_of(groups: Any, heads: int) -> list[int]:
    """Return the number of query heads of each group: all, or of two groups the first ones and the last H // 2."""
    return [heads] if len(groups) == 1 else [heads - heads // 2, heads // 2]
