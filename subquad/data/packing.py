"""Whole documents packed into windows: which pieces of which documents each window holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.data.shards import TokenShard

OPEN_WINDOWS = 32
"""Windows that are not full and that a piece may still go to."""
IGNORED = -100
"""The label that does not count."""
PADDING = -1
"""The document of padding."""


class Packing(NamedTuple):
    """Windows of pieces: window w holds pieces `firsts[w]` to `firsts[w + 1] - 1`, in order of their tokens."""

    firsts: np.ndarray
    """`[W + 1]`."""
    starts: np.ndarray
    """`[P]`, where each piece begins among the tokens."""
    stops: np.ndarray
    """`[P]`, where it ends."""


def pieces(documents: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the pieces of documents begin and end: whole documents, and cuts of those longer than `length`.

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


def check_not_empty(windows: int, where: object) -> None:
    """Raise `ValueError` where documents give no window."""
    if not windows:
        raise ValueError(f"{where} holds no document to pack")


class PackedWindows(Dataset[dict[str, Tensor]]):
    """Windows of whole documents: `{"input_ids", "labels", "doc_ids"}`, each int64 `[length]`.

    Documents of a window are numbered from 0 by `doc_ids`, which is -1 at padding; labels are the tokens, and -100 at
    padding and at the first token of each piece, which nothing predicts. Raises `ValueError` for a length below 2.
    """

    def __init__(self, shard: TokenShard, length: int, packing: Packing | None = None) -> None:
        self.shard, self.length = shard, length
        self.packing = pack(shard.documents, length) if packing is None else packing
        check_not_empty(len(self), shard.path)

    def __len__(self) -> int:
        return len(self.packing.firsts) - 1

    @property
    def padding(self) -> float:
        """Share of all places that hold no token."""
        places = len(self) * self.length
        return (places - int((self.packing.stops - self.packing.starts).sum())) / places

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is out of range: there are {len(self)}")
        first, last = self.packing.firsts[index : index + 2].tolist()
        spans = zip(self.packing.starts[first:last].tolist(), self.packing.stops[first:last].tolist(), strict=True)
        return window([self.shard.tokens[start:stop] for start, stop in spans], self.length)


def window(parts: list[np.ndarray], length: int) -> dict[str, Tensor]:
    """The item that these pieces make."""
    tokens, labels = np.zeros(length, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64)
    doc_ids = np.full(length, PADDING, dtype=np.int64)
    place = 0
    for number, part in enumerate(parts):
        end = place + len(part)
        tokens[place:end] = part
        labels[place + 1 : end] = part[1:]
        doc_ids[place:end] = number
        place = end
    made = {"input_ids": tokens, "labels": labels, "doc_ids": doc_ids}
    return {name: torch.from_numpy(array) for name, array in made.items()}
