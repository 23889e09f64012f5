"""Pack whole documents into windows of a fixed length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

OPEN_WINDOWS = 32
"""Most partly filled windows that can still take a piece."""


class Packing(NamedTuple):
    """Windows of pieces: window w holds pieces `firsts[w]` to `firsts[w + 1] - 1`, in token order."""

    firsts: np.ndarray
    """`[W + 1]`."""
    starts: np.ndarray
    """`[P]`, the first token of each piece."""
    stops: np.ndarray
    """`[P]`, one past its last token."""


def pieces(documents: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops of pieces: whole documents, and documents longer than `length` split.

    `documents` `[D + 1]` are offsets as in `TokenShard`. The parts of a split document overlap by one token, so that
    each of its tokens but the first is predicted once.
    """
    begins, sizes = documents[:-1].astype(np.int64), np.diff(documents).astype(np.int64)
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    counts = np.maximum(1, -(-(sizes - 1) // (length - 1)))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + number * (length - 1)
    return starts, np.minimum(starts + length, np.repeat(begins + sizes, counts))


def pack(documents: np.ndarray, length: int) -> Packing:
    """Pack all documents into windows of `length` tokens, splitting only those that are longer.

    First fit: a piece goes to the first open window with room for it, else to a new one; if that makes more than
    `OPEN_WINDOWS`, the fullest is closed. The result depends on the lengths alone, and neighbouring documents stay near
    each other. Raises `ValueError` for a length below 2.
    """
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, one to read and one to predict, got length={length}")
    starts, stops = pieces(documents, length)
    window_of = np.array(list(first_fit((stops - starts).tolist(), length, OPEN_WINDOWS)), dtype=np.int64)
    order = np.argsort(window_of, kind="stable")
    firsts = np.searchsorted(window_of[order], np.arange(window_of.max(initial=-1) + 2))
    return Packing(firsts, starts[order], stops[order])


def first_fit(sizes: Iterable[int], length: int, most_open: int) -> Iterator[int]:
    """Yield the number of the window of `length` tokens, from 0, in which each piece of `sizes` tokens goes."""
    room: list[int] = []  # number of free tokens in the open windows, oldest first
    names: list[int] = []
    opened = 0
    for size in sizes:
        place = next((place for place, free in enumerate(room) if free >= size), None)
        if place is None:
            if len(room) == most_open:
                fullest = room.index(min(room))
                del room[fullest], names[fullest]
            room.append(length)
            names.append(opened)
            place, opened = len(room) - 1, opened + 1
        yield names[place]
        room[place] -= size
        if room[place] == 0:
            del room[place], names[place]
