"""A folder of the cache that is filled once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from subquad.data.files import aside, cache_folder, usable
from subquad.data.lra.store import Store


def kept(cache: str | None, name: str, fill: Callable[[Path], None]) -> Store:
    """The store at `cache/name`, filled by `fill(folder)` where it is not there yet or is damaged."""
    folder = cache_folder(cache) / name
    if not is_kept(folder):
        with aside(folder) as temporary:
            temporary.mkdir()
            fill(temporary)
    return Store(folder)


def is_kept(folder: Path) -> bool:
    """Whether a whole store is there; a damaged one is removed, with a warning."""
    return usable(folder, lambda: Store(folder))
