"""Set how many tokens the engines compute at once, which changes only the order of summation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from subquad.ops._sequential import attend as sequential
from subquad.ops._torch import attend, delta, scan, softmax, tiles


@contextmanager
def block_sizes(size: int) -> Iterator[None]:
    """Cut sequences into chunks and tiles of `size` tokens in `torch` and `sequential`, within the block."""
    sizes: tuple[tuple[ModuleType, str, int], ...] = (
        (scan, "CHUNK", size),
        (delta, "CHUNK", size),
        (softmax, "CHUNK", size),
        (softmax, "MEAN_CHUNK", size),
        (tiles, "MASKED_ROWS", size),
        (attend, "ENTRIES", 64 * size),
        (sequential, "QUERY_CHUNK", size),
        (sequential, "KEY_CHUNK", 2 * size),
    )
    before = [getattr(module, name) for module, name, _ in sizes]
    for module, name, value in sizes:
        setattr(module, name, value)
    tiles.static_groups.cache_clear()  # they hold tiles of the sizes before
    tiles.ragged_groups.cache_clear()
    try:
        yield
    finally:
        for (module, name, _), value in zip(sizes, before, strict=True):
            setattr(module, name, value)
        tiles.static_groups.cache_clear()
        tiles.ragged_groups.cache_clear()
