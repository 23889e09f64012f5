"""What forward and backward of the sequential attention do alike: which tiles there are, in order, and their scores.

Shape letters: B batch, T queries, S keys, K key channels; a tile has h heads, C queries and W keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.ops.patterns import Pattern


def key_chunks(
    pattern: Pattern, queries: int, keys: int, starts: tuple[int, int] | None, query_chunk: int, key_chunk: int
) -> Iterator[tuple[slice, list[slice]]]:
    """Chunks of query slots, each with the chunks of key slots that cover what it may see.

    `starts` None: rows differ in their positions, and the queries are the last of the key slots.
    """
    for start in range(0, queries, query_chunk):
        stop = min(start + query_chunk, queries)
        if starts is None and pattern.anchored:
            lo, hi = 0, keys
        elif starts is None:
            first, last = start + keys - queries, stop + keys - queries
            lo = 0 if pattern.reach is None else max(0, first - pattern.reach)
            hi = keys if pattern.ahead is None else min(keys, last + pattern.ahead)
        else:
            q_start, k_start = starts
            low, high = pattern.key_range(q_start + start, q_start + stop)
            lo = max(0, max(0, low) - k_start)
            hi = keys if high is None else min(keys, high - k_start)
        yield slice(start, stop), [slice(at, min(at + key_chunk, hi)) for at in range(lo, hi, key_chunk)]


class Block(NamedTuple):
    """Queries that are worked on together: `[h, C]`, of some heads of one row of the batch."""

    row: int
    heads: slice
    queries: slice
    chunks: list[slice]
    """The keys that they may see, a chunk after another."""


@dataclass
class Work:
    """What forward and backward do alike: the order of the tiles, their scores and their dropout."""

    q_BHTK: Tensor
    k_BHSK: Tensor
    pattern: Pattern
    q_start: int
    k_start: int
    scale: float
    rows: tuple[Tensor | None, ...]
    """Tokens among the keys `[B]`; positions of queries and keys, documents of queries and keys, `[B, .]`."""
    seed: Tensor | None
    dropout_p: float
    query_chunk: int
    key_chunk: int

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.q_BHTK.device)
        if self.seed is not None:
            self.generator.manual_seed(int(self.seed))

    def blocks(self) -> Iterator[Block]:
        """Heads go together where their tiles are small."""
        (B, H, T, _), S = self.q_BHTK.shape, self.k_BHSK.shape[2]
        starts = (self.q_start, self.k_start) if self.rows[1] is None else None
        spans = list(key_chunks(self.pattern, T, S, starts, self.query_chunk, self.key_chunk))
        together = max(
            1, self.query_chunk * self.key_chunk // max(1, min(T, self.query_chunk) * min(S, self.key_chunk))
        )
        for row in range(B):
            for head in range(0, H, together):
                for queries, chunks in spans:
                    yield Block(row, slice(head, head + together), queries, chunks)

    def scores(self, block: Block, keys: slice) -> Tensor:
        """`[h, C, W]`, -inf where the query may not see the key."""
        q_hCK = self.q_BHTK[block.row, block.heads, block.queries]
        scores_hCW = (q_hCK @ self.k_BHSK[block.row, block.heads, keys].mT).mul_(self.scale)
        allowed_CW = self.allowed(block, keys)
        return scores_hCW if allowed_CW is None else scores_hCW.masked_fill_(~allowed_CW, -torch.inf)

    def allowed(self, block: Block, keys: slice) -> Tensor | None:
        """Bool `[C, W]`, None where every query sees every key."""
        length, q_pos_T, k_pos_S, q_doc_T, k_doc_S = (None if x is None else x[block.row] for x in self.rows)
        device = self.q_BHTK.device
        if q_pos_T is None or k_pos_S is None:
            q_from, q_to = (slot + self.q_start for slot in (block.queries.start, block.queries.stop))
            k_from, k_to = (slot + self.k_start for slot in (keys.start, keys.stop))
            if length is None and self.pattern.sees_all(q_from, q_to, k_from, k_to):
                return None
            q_C1, k_W = torch.arange(q_from, q_to, device=device)[:, None], torch.arange(k_from, k_to, device=device)
            allowed_CW = self.pattern.allowed(q_C1, k_W)
            return allowed_CW if length is None else allowed_CW & (k_W < length + self.k_start)
        q_C1, k_W = q_pos_T[block.queries, None], k_pos_S[keys]
        allowed_CW = self.pattern.allowed(q_C1, k_W) & (q_C1 >= 0) & (k_W >= 0)
        if q_doc_T is not None and k_doc_S is not None:
            allowed_CW = allowed_CW & (q_doc_T[block.queries, None] == k_doc_S[keys])
        return allowed_CW

    def dropped(self, w_hCW: Tensor) -> Tensor:
        """`w` with dropout; tiles must come in the order of `blocks`, for the mask to be the same again."""
        if self.seed is None:
            return w_hCW
        kept = torch.empty_like(w_hCW).bernoulli_(1 - self.dropout_p, generator=self.generator)
        return w_hCW * kept.div_(1 - self.dropout_p)
