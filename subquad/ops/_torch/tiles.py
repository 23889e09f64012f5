"""Cut a pattern into tiles of queries with one range of keys each, and fold equal neighbours into a group.

The additive mask of a tile holds 0 if a query sees a key, else -inf.

Shape letters: B batch, T queries, S keys, N tiles of C queries and W keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from subquad.ops.patterns import Pattern
from subquad.ops.patterns.sparse import Ranks
from subquad.ops.slots import Slots, allowed_between, real_keys, seen_slots

MASKED_ROWS = 256
"""Most rows of a tile with unbounded keys: it needs a mask of rows x keys, which must stay linear."""


@dataclass(frozen=True)
class Group:
    """`count` tiles of `rows` queries: tile n has slots from `q + n * rows`, keys from `k + n * rows` or `places`."""

    q: int
    rows: int
    count: int
    k: int
    keys: int
    kind: str
    """`full` (all allowed), `causal` (the diagonal block), `masked` or `empty` (no key)."""
    places: tuple[int, ...] = ()

    def query_slots(self) -> Tensor:
        """Return the query slots of each tile, `[N, C]`."""
        return self.q + torch.arange(self.rows * self.count, device="cpu").unflatten(0, (self.count, self.rows))

    def key_slots(self) -> Tensor:
        """Return the key slots of each tile, `[N, W]`."""
        starts_N = (
            torch.tensor(self.places, device="cpu")
            if self.places
            else self.k + self.rows * torch.arange(self.count, device="cpu")
        )
        return starts_N[:, None] + torch.arange(self.keys, device="cpu")


def tile_groups(pattern: Pattern, starts: tuple[int, int] | None, queries: int, keys: int) -> tuple[Group, ...]:
    """Return tiles by position from `starts` on, or by slot if it is None, since rows differ."""
    if starts is None:
        return ragged_groups(pattern, queries, keys)
    return static_groups(pattern, starts[0], queries, starts[1], keys)


@lru_cache(maxsize=512)
def static_groups(pattern: Pattern, q_start: int, queries: int, k_start: int, keys: int) -> tuple[Group, ...]:
    """Return tiles by position: query slot i is at `q_start + i`, key slot j at `k_start + j`."""
    if queries == 0:
        return ()
    tiles = []
    starts = [start for start in pattern.tile_starts(q_start, q_start + queries) if start < q_start + queries]
    for start, stop in zip(starts, [*starts[1:], q_start + queries], strict=True):
        kind = _kind(pattern, start, stop, *_range(pattern, start, stop, k_start, keys))
        step = MASKED_ROWS if kind == "masked" and pattern.reach is None else stop - start
        for a in range(start, stop, step):
            b = min(a + step, stop)
            lo, hi = _range(pattern, a, b, k_start, keys)
            some = hi > lo
            tiles.append(
                Group(a - q_start, b - a, 1, lo - k_start if some else 0, max(0, hi - lo), kind if some else "empty")
            )
    return _fold(tiles, pattern.period, pattern.scattered)


def _range(pattern: Pattern, start: int, stop: int, k_start: int, keys: int) -> tuple[int, int]:
    """Return the range of existing keys of a tile."""
    lo, hi = pattern.key_range(start, stop)
    hi = k_start + keys if hi is None else min(hi, k_start + keys)
    return max(lo, k_start), min(hi, stop) if pattern.causal else hi


@lru_cache(maxsize=512)
def unmasked_entries(
    pattern: Pattern, queries: int, keys: int | None = None, q_start: int = 0, k_start: int = 0
) -> int:
    """Count the pairs of query and key that the pattern allows; `keys` defaults to `queries`."""
    keys = queries if keys is None else keys
    q_stop, k_stop = q_start + queries, k_start + keys
    if queries == 0 or keys == 0:
        return 0
    if pattern.sees_all(q_start, q_stop, k_start, k_stop):
        return queries * keys
    if q_stop == k_stop and k_start <= q_start and pattern.is_triangle(q_start, q_stop):
        earlier = q_start - k_start
        if not earlier or pattern.sees_all(q_start, q_stop, k_start, q_start):
            return queries * earlier + queries * (queries + 1) // 2
    if pattern.folded and q_start == k_start == 0 and queries == keys:
        residues, inner = pattern.folded
        return sum(unmasked_entries(inner, -(-(queries - r) // residues)) for r in range(min(residues, queries)))
    total = 0
    for start in range(q_start, q_stop, MASKED_ROWS):
        stop = min(start + MASKED_ROWS, q_stop)
        lo, hi = _range(pattern, start, stop, k_start, keys)
        if hi > lo:
            q_T1 = torch.arange(start, stop, device="cpu")[:, None]
            total += int(pattern.allowed(q_T1, torch.arange(lo, hi, device="cpu")).sum())
    return total


def score_entries(pattern: Pattern, queries: int, keys: int | None = None, q_start: int = 0, k_start: int = 0) -> int:
    """Count the entries of all tiles of these queries and keys; arguments as in `unmasked_entries`."""
    keys = queries if keys is None else keys
    if queries == 0 or keys == 0:
        return 0
    whole = q_start == k_start == 0 and queries == keys
    if whole and pattern.folded:
        residues, inner = pattern.folded
        return residues * score_entries(inner, -(-queries // residues))
    if whole and pattern.columns:
        pattern = Ranks(*pattern.columns)
        last = pattern.key_range(0, queries)[1]
        assert last is not None
        keys = last
    return sum(g.rows * g.keys * g.count for g in static_groups(pattern, q_start, queries, k_start, keys))


def _kind(pattern: Pattern, start: int, stop: int, lo: int, hi: int) -> str:
    if hi <= lo:
        return "empty"
    if pattern.sees_all(start, stop, lo, hi):
        return "full"
    return "causal" if (lo, hi) == (start, stop) and pattern.is_triangle(start, stop) else "masked"


def short_groups(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Cut single tiles to at most `MASKED_ROWS` rows, for callers that hold all scores of a tile."""
    short: list[Group] = []
    for g in groups:
        if g.count > 1 or g.kind == "empty":
            short.append(g)
            continue
        for start in range(0, g.rows, MASKED_ROWS):
            rows = min(MASKED_ROWS, g.rows - start)
            keys = start + rows if g.kind == "causal" else g.keys
            short.append(Group(g.q + start, rows, 1, g.k, keys, "masked" if g.kind == "causal" else g.kind))
    return tuple(short)


@lru_cache(maxsize=512)
def ragged_groups(pattern: Pattern, queries: int, keys: int) -> tuple[Group, ...]:
    """Return tiles by slot for positions that differ by row; queries are the last key slots (or it is anchored)."""
    tiles = []
    rows = MASKED_ROWS if pattern.reach is None else max(16, min(128, pattern.reach + 1))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        lo, hi = seen_slots(pattern, None, start, stop, queries, keys)
        tiles.append(Group(start, stop - start, 1, lo, hi - lo, "masked" if hi > lo else "empty"))
    return _fold(tiles, 1)


def _fold(tiles: list[Group], period: int, scattered: bool = False) -> tuple[Group, ...]:
    """Join neighbours of one shape whose keys follow one another or, if `scattered`, are all allowed."""
    groups: list[Group] = []
    for tile in tiles:
        last = groups[-1] if groups else None
        if last is None or (last.rows, last.keys, last.kind) != (tile.rows, tile.keys, tile.kind):
            groups.append(tile)
        elif scattered and tile.kind == "full":
            places = (*(last.places or (last.k,)), tile.k)
            groups[-1] = replace(last, count=last.count + 1, k=0, places=places)
        elif not scattered and _follows(last, tile) and tile.rows % period == 0:
            groups[-1] = replace(last, count=last.count + 1)
        else:
            groups.append(tile)
    return tuple(groups)


def _follows(group: Group, tile: Group) -> bool:
    return tile.q == group.q + group.rows * group.count and tile.q - tile.k == group.q - group.k


def static_bias(
    pattern: Pattern, group: Group, q_start: int, k_start: int, like: Tensor, triangles: bool = False
) -> Tensor | None:
    """Return the mask `[C, W]`, or None if a tile is full, or causal without `triangles` (the kernel masks it)."""
    if group.kind == "full" or (group.kind == "causal" and not triangles):
        return None
    q_pos = torch.arange(group.rows) + q_start + group.q
    k_pos = torch.arange(group.keys) + k_start + group.k
    return _bias(pattern.allowed(q_pos[:, None], k_pos), like)


def row_bias(pattern: Pattern, group: Group, slots: Slots, like: Tensor) -> Tensor:
    """Return the mask if rows differ: `[B, 1, C, W]` for one tile per row, `[1, N, C, W]` for folded tiles of a row."""
    if group.kind == "full" and slots.lengths_B is not None:
        return _bias(real_keys(slots.lengths_B, group.key_slots()), like)  # one row for all queries
    return _bias(allowed_between(pattern, slots, group.query_slots(), group.key_slots()), like)


def _bias(allowed: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, dtype=like.dtype).masked_fill_(~allowed, -torch.inf)
