"""Measuring with boundaries: each document is read from its start, as if it were alone.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np
import torch

from subquad.data.packing import IGNORED, PADDING
from subquad.evaluation._windows import Tokens, Window, check_vocabulary, evaluating, plan
from subquad.models import Decoder

OPEN_ROWS = 16
"""Rows that are not full and that a window may still go to."""


def check_documents(model: Decoder, documents: np.ndarray, tokens: int, skip: int) -> None:
    """Raise `ValueError` for offsets that are not those of documents, and for what they do not go with."""
    model.check_packed()
    if skip:
        raise ValueError(f"skip counts tokens of one text and does not go with documents, got {skip}")
    ends = np.asarray(documents)
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or (np.diff(ends) < 0).any():
        raise ValueError(
            f"documents must be offsets that rise from 0 to the number of tokens, {tokens}, got {ends.tolist()[:8]}"
        )


def plan_documents(documents: np.ndarray, length: int, stride: int) -> list[Window]:
    """`plan` inside each document."""
    return [
        Window(*(start + place for place in window))
        for start, stop in pairwise(np.asarray(documents).tolist())
        for window in plan(stop - start, length, stride)
    ]


def rows_of(windows: Sequence[Window], length: int) -> Iterator[list[Window]]:
    """Windows packed into rows of at most `length` tokens, first fit."""
    rows: list[list[Window]] = []
    room: list[int] = []
    for window in windows:
        size = window.stop - window.start
        place = next((place for place, free in enumerate(room) if free >= size), None)
        if place is None:
            if len(rows) == OPEN_ROWS:
                fullest = room.index(min(room))
                del room[fullest]
                yield rows.pop(fullest)
            rows.append([])
            room.append(length)
            place = len(rows) - 1
        rows[place].append(window)
        room[place] -= size
    yield from rows


def packed_batches(
    model: Decoder, tokens: Tokens, chosen: Sequence[Window], batch_size: int, length: int
) -> Iterator[list[tuple[Window, np.ndarray]]]:
    """Batches of `batch_size` packed rows: their windows with the nats of what each predicts."""
    packed = rows_of(chosen, length)
    while rows := list(islice(packed, batch_size)):
        windows = [window for row in rows for window in row]
        yield list(zip(windows, _losses(model, tokens, rows, length), strict=True))


@torch.no_grad()
def _losses(model: Decoder, tokens: Tokens, rows: Sequence[Sequence[Window]], length: int) -> list[np.ndarray]:
    """Nats of each next token of the windows, row after row, float64."""
    shape = (len(rows), length)
    tokens_BT, labels_BT = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
    doc_ids_BT = np.full(shape, PADDING, dtype=np.int64)
    places: list[tuple[int, int, int]] = []
    for b, row in enumerate(rows):
        begin = 0
        for number, window in enumerate(row):
            part = np.asarray(tokens[window.start : window.stop + 1], dtype=np.int64)
            end = begin + len(part) - 1
            tokens_BT[b, begin:end], labels_BT[b, begin:end], doc_ids_BT[b, begin:end] = part[:-1], part[1:], number
            places.append((b, begin, end))
            begin = end
    check_vocabulary(model, tokens_BT)
    check_vocabulary(model, labels_BT[labels_BT != IGNORED])
    device = next(model.parameters()).device
    inputs_BT, targets_BT, ids_BT = (torch.from_numpy(x).to(device) for x in (tokens_BT, labels_BT, doc_ids_BT))
    with evaluating(model):
        h_BTD = model.passes(inputs_BT, doc_ids=ids_BT)[-1]
        losses_BT = model.loss_of_hidden(h_BTD, targets_BT, reduction="none").double().cpu().numpy()
    return [losses_BT[b, begin:end] for b, begin, end in places]
