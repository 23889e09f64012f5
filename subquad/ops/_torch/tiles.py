"""How a pattern is cut into tiles of queries with one range of keys each, and equal neighbours folded into a group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from subquad.ops.patterns import Pattern

MASKED_ROWS = 256
"""A tile without bound on its keys needs a mask of rows x keys: this many rows at a time keep it linear."""


@dataclass(frozen=True)
class Group:
    """`count` tiles of `rows` queries; tile n holds query slots from `q + n * rows`, key slots from `k + n * rows`."""

    q: int
    rows: int
    count: int
    k: int
    keys: int
    kind: str
    """`full` (all allowed), `causal` (the diagonal block), `masked` or `empty` (no key)."""


@lru_cache(maxsize=512)
def static_groups(pattern: Pattern, q_start: int, queries: int, k_start: int, keys: int) -> tuple[Group, ...]:
    """Tiles by position: query slot i stands at `q_start + i`, key slot j at `k_start + j`."""
    if queries == 0:
        return ()
    tiles = []
    starts = [start for start in pattern.tile_starts(q_start, q_start + queries) if start < q_start + queries]
    for start, stop in zip(starts, [*starts[1:], q_start + queries], strict=True):
        lo, hi = pattern.key_range(start, stop)
        lo, hi = max(lo, k_start), k_start + keys if hi is None else min(hi, k_start + keys)
        kind = _kind(pattern, start, stop, lo, hi)
        step = MASKED_ROWS if kind == "masked" and pattern.reach is None else stop - start
        for a in range(start, stop, step):
            b = min(a + step, stop)
            end = min(hi, b) if pattern.causal else hi
            tiles.append(Group(a - q_start, b - a, 1, lo - k_start, max(0, end - lo), kind))
    return _fold(tiles, pattern.period)


def _kind(pattern: Pattern, start: int, stop: int, lo: int, hi: int) -> str:
    if hi <= lo:
        return "empty"
    if pattern.sees_all(start, stop, lo, hi):
        return "full"
    return "causal" if (lo, hi) == (start, stop) and pattern.is_triangle(start, stop) else "masked"


def short_groups(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The same with single tiles of at most `MASKED_ROWS` rows, for those who hold a tile's scores."""
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
    """Tiles by slot, where positions differ by row: the queries are the last of the key slots."""
    offset, tiles = keys - queries, []
    rows = MASKED_ROWS if pattern.reach is None else max(16, min(128, pattern.reach + 1))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        lo = 0 if pattern.reach is None else max(0, start + offset - pattern.reach)
        hi = stop + offset if pattern.causal else keys
        tiles.append(Group(start, stop - start, 1, lo, hi - lo, "masked" if hi > lo else "empty"))
    return _fold(tiles, 1)


def _fold(tiles: list[Group], period: int) -> tuple[Group, ...]:
    groups: list[Group] = []
    for tile in tiles:
        last = groups[-1] if groups else None
        if (
            last is not None
            and (last.rows, last.keys, last.kind, last.q - last.k) == (tile.rows, tile.keys, tile.kind, tile.q - tile.k)
            and tile.q == last.q + last.rows * last.count
            and tile.rows % period == 0
        ):
            groups[-1] = Group(last.q, last.rows, last.count + 1, last.k, last.keys, last.kind)
        else:
            groups.append(tile)
    return tuple(groups)
