"""Whole documents packed into windows: which pieces of which documents each window holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

OPEN_WINDOWS = 32
"""Windows that are not full and that a piece may still go to."""


class Packing(NamedTuple):
    """Windows of pieces: window w holds pieces `firsts[w]` to `firsts[w + 1] - 1`, in order of their tokens."""

    firsts: np.ndarray
    """`[W + 1]`."""
    starts: np.ndarray
    """`[P]`, where each piece begins among the tokens."""
    stops: np.ndarray
    """`[P]`, where it ends."""


def pieces(documents: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where pieces of documents begin and end: whole documents, and cuts of those longer than `length`.

    `documents` `[D + 1]` are the offsets as `TokenShard` has them. A cut begins with the last token of the one before,
    so that each token of a document but its first is predicted once.
    """
    begins, sizes = documents[:-1].astype(np.int64), np.diff(documents).astype(np.int64)
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    counts = np.maximum(1, -(-(sizes - 1) // (length - 1)))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + number * (length - 1)
    return starts, np.minimum(starts + length, np.repeat(begins + sizes, counts))


def pack(documents: np.ndarray, length: int) -> Packing:
    """Pack documents into windows of `length` tokens, each in one piece where it fits at all; nothing is left out.

    First fit: a piece goes to the first open window that has room for it, else to a new one; of more than
    `OPEN_WINDOWS` open ones the fullest is closed. It depends on the lengths alone, and neighbours stay near each
    other. Raises `ValueError` for a length below 2.
    """
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, one to read and one to predict, got length={length}")
    starts, stops = pieces(documents, length)
    window_of = np.empty(len(starts), dtype=np.int64)
    room: list[int] = []  # of the open windows, in order of opening
    names: list[int] = []
    opened = 0
    for number, size in enumerate((stops - starts).tolist()):
        place = next((place for place, free in enumerate(room) if free >= size), None)
        if place is None:
            if len(room) == OPEN_WINDOWS:
                fullest = room.index(min(room))
                del room[fullest], names[fullest]
            room.append(length)
            names.append(opened)
            place, opened = len(room) - 1, opened + 1
        window_of[number] = names[place]
        room[place] -= size
        if room[place] == 0:
            del room[place], names[place]
    order = np.argsort(window_of, kind="stable")
    firsts = np.searchsorted(window_of[order], np.arange(opened + 1))
    return Packing(firsts, starts[order], stops[order])
