"""Loss of a text: nats a token, perplexity, bits per byte, also by position in the context.

A text is cut into windows; with `documents` windows of several documents are packed into rows, each document read from
its start. Shape letters: B batch, T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, groupby, islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from subquad.config import check_at_least
from subquad.data.token_set import TokenSet
from subquad.data.windows import IGNORED, PADDING
from subquad.models import Decoder

Tokens: TypeAlias = Sequence[int] | np.ndarray | Tensor | TokenSet


class Window(NamedTuple):
    """The model reads tokens `start` to `stop - 1`; the predictions of `scored` to `stop` count."""

    start: int
    stop: int
    scored: int


def plan(tokens: int, length: int, stride: int, latents: int | None = None) -> list[Window]:
    """Return the windows that predict each of `tokens` tokens but the first exactly once.

    Each reads at most `length` tokens and begins `stride` after the one before. The first counts all of its
    predictions, the others the last `stride`, each made with at least `length - stride + 1` tokens of context. With
    `stride == length` windows do not overlap.

    Where only the last `latents` tokens of a window predict, windows of growing length come first, all from the first
    token on: as many tokens as predict, then `stride` more each, until they have `length`.
    """
    windows = []
    scored, stop = 1, 0
    end = length if latents is None else min(latents, length)
    while stop < tokens - 1:
        stop = min(end, tokens - 1)
        windows.append(Window(max(0, end - length), stop, scored))
        scored, end = stop + 1, end + stride
    return windows


def batches(windows: Sequence[Window], batch_size: int) -> Iterator[list[Window]]:
    """Yield batches of windows of equal size: only the last window can be shorter, so nothing is padded."""
    for _, equal in groupby(windows, key=lambda window: window.stop - window.start):
        group = list(equal)
        for i in range(0, len(group), batch_size):
            yield group[i : i + batch_size]


@torch.no_grad()
def losses(model: Decoder, tokens: Tokens, batch: list[Window]) -> np.ndarray:
    """Return nats `[B, T]` of each next token (or of the last ones, where only they are predicted), float64."""
    rows_BT = np.stack([np.asarray(tokens[window.start : window.stop + 1], dtype=np.int64) for window in batch])
    check_vocabulary(model, rows_BT)
    tokens_BT = torch.from_numpy(rows_BT).to(next(model.parameters()).device)
    with evaluating(model):
        loss = model.loss(tokens_BT[:, :-1], tokens_BT[:, 1:], reduction="none")
    return loss.double().cpu().numpy().reshape(len(batch), -1)


def check_vocabulary(model: Decoder, tokens: np.ndarray) -> None:
    """Raise `ValueError` for a token that the model does not have."""
    if tokens.min() < 0 or tokens.max() >= model.config.vocab_size:
        raise ValueError(
            f"tokens must be between 0 and {model.config.vocab_size - 1}, the model's vocabulary, "
            f"got {tokens.min()} to {tokens.max()}; are they another tokenizer's?"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode within the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


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


def rows_of(windows: Sequence[Window], length: int) -> Iterator[list[Window]]:
    """Yield windows packed into rows of at most `length` tokens, first fit."""
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


@torch.no_grad()
def _losses(model: Decoder, tokens: Tokens, rows: Sequence[Sequence[Window]], length: int) -> list[np.ndarray]:
    """Return nats of each next token of the windows, row after row, float64."""
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


@dataclass(frozen=True)
class PositionLoss:
    """Predictions made with `start` to `stop - 1` tokens of context, the current one included."""

    start: int
    stop: int
    tokens: int
    loss: float
    """Mean nats a token."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`."""

    tokens: int
    """Tokens predicted."""
    loss: float
    """Mean nats a predicted token."""
    perplexity: float
    """exp(loss)."""
    word_perplexity: float | None
    """exp(total nats / whitespace words); None where the words are not known."""
    bits_per_byte: float | None
    """Total bits / bytes of the text; None where the bytes are not known."""
    by_position: tuple[PositionLoss, ...]
    """The loss by tokens of context, in ranges that double."""
    length: int
    stride: int
    vocab_size: int
    text_bytes: int | None
    words: int | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = asdict(self)
        values["by_position"] = list(values["by_position"])
        return values


def evaluate(
    model: Decoder,
    tokens: Tokens,
    /,
    *,
    length: int,
    stride: int | None = None,
    windows: int | None = None,
    skip: int = 0,
    documents: np.ndarray | None = None,
    batch_size: int = 8,
    text_bytes: int | None = None,
    words: int | None = None,
    decode: Callable[[list[int]], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score every token but the first exactly once, in windows of `length` tokens.

    `stride` (default `length`: windows that do not overlap, which is fastest) lets windows overlap, so that each
    prediction but those of the first window has at least `length - stride + 1` tokens of context. `windows` stops after
    that many. With `skip` the windows that predict the first so many tokens do not count, those with less context than
    the others; no code length of the text is known then. A `PerceiverAR` predicts a window's last `latents` tokens
    alone: its windows overlap, with a `stride` of at most (and by default) so many, and shorter ones come first (see
    `plan`).

    With `documents`, the offsets in `tokens` at which documents begin and then their number, as `TokenShard` has them,
    each is read from its start, as if it were alone, and every token but its first is predicted once.

    `bits_per_byte` and `word_perplexity` are a code length of the whole text: the first token, which nothing predicts
    (with `documents` that of each), is charged log2(vocabulary) bits there (and only there). They divide by
    `text_bytes` and `words`, what all `tokens` stand for. Where `windows` cuts the text, both are counted in `decode`
    of the tokens that are left (to within one character at the cut), and are None without `decode`.

    Runs in eval mode without gradients and restores the mode; sums in float64. `progress(done, windows)` is called
    after each batch. Raises `ValueError` for fewer than two tokens, for a token outside of the vocabulary and for a
    number out of range.
    """
    latents = model.predicts_last
    if stride is None:
        stride = length if latents is None else min(length, latents)
    _check(len(tokens), length, stride, windows, batch_size, latents)
    if documents is not None:
        check_documents(model, documents, len(tokens), skip)
        planned = [
            Window(*(start + place for place in window))
            for start, stop in pairwise(np.asarray(documents).tolist())
            for window in plan(stop - start, length, stride)
        ]
    else:
        planned = plan(len(tokens), length, stride, latents)
    chosen = [window for window in planned if window.scored > skip][:windows]
    if skip < 0 or not chosen:
        raise ValueError(f"skip must be at least 0 and leave tokens to predict of {len(tokens)}, got {skip}")
    if skip:
        text_bytes = words = decode = None
    used = len(tokens)
    if len(chosen) < len(planned):
        used = chosen[-1].stop + 1
        if used < len(tokens):
            text = None if decode is None else decode(np.asarray(tokens[:used]).tolist())
            text_bytes, words = (None, None) if text is None else (len(text.encode()), len(text.split()))
    firsts = 1 if documents is None else len(np.unique(documents[documents < used]))

    begin = time.perf_counter()
    scores = _scores(model, tokens, chosen, batch_size, length, packed=documents is not None)
    nats_T, count_T = _summed(scores, length, len(chosen), progress)
    predicted = int(count_T.sum())
    nats = float(nats_T.sum())
    vocab_size = model.config.vocab_size
    text_nats = nats + firsts * math.log(vocab_size)
    return Evaluation(
        tokens=predicted,
        loss=nats / predicted,
        perplexity=_exp(nats / predicted),
        word_perplexity=_exp(text_nats / words) if words else None,
        bits_per_byte=text_nats / math.log(2) / text_bytes if text_bytes else None,
        by_position=tuple(_ranges(nats_T, count_T)),
        length=length,
        stride=stride,
        vocab_size=vocab_size,
        text_bytes=text_bytes,
        words=words,
        seconds=time.perf_counter() - begin,
    )


def _check(tokens: int, length: int, stride: int, windows: int | None, batch_size: int, latents: int | None) -> None:
    if tokens < 2:
        raise ValueError(f"evaluation needs at least 2 tokens (the first is context only), got {tokens}")
    check_at_least(1, length=length, windows=windows, batch_size=batch_size)
    if not 1 <= stride <= length:
        raise ValueError(f"stride must be between 1 and length ({length}), so that no token is left out, got {stride}")
    if latents is not None and stride > latents:
        raise ValueError(
            f"stride must be at most the model's latents ({latents}), since only they predict, got {stride}: "
            "tokens between them would be left out"
        )


def _scores(
    model: Decoder, tokens: Tokens, chosen: Sequence[Window], batch_size: int, length: int, packed: bool
) -> Iterator[list[tuple[Window, np.ndarray]]]:
    """Yield batches of `batch_size` windows, or packed rows of them, with the nats of what each window predicts."""
    if not packed:
        for batch in batches(chosen, batch_size):
            yield list(zip(batch, losses(model, tokens, batch), strict=True))
        return
    rows = rows_of(chosen, length)
    while some := list(islice(rows, batch_size)):
        yield list(zip(chain.from_iterable(some), _losses(model, tokens, some, length), strict=True))


def _summed(
    scored: Iterator[list[tuple[Window, np.ndarray]]],
    length: int,
    windows: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return nats `[length]` of the predictions that count, and how many they are, by place in the window."""
    nats_T = np.zeros(length)
    count_T = np.zeros(length, dtype=np.int64)
    done = 0
    for batch in scored:
        for window, nats in batch:
            size, counted = window.stop - window.start, window.stop + 1 - window.scored
            nats_T[size - counted : size] += nats[len(nats) - counted :]
            count_T[size - counted : size] += 1
        done += len(batch)
        if progress:
            progress(done, windows)
    return nats_T, count_T


def _ranges(nats_T: np.ndarray, count_T: np.ndarray) -> Iterator[PositionLoss]:
    """Yield contexts of 1, 2 to 3, 4 to 7, ... tokens; ranges without a prediction are left out."""
    length = len(nats_T)
    start = 1
    while start <= length:
        stop = min(2 * start, length + 1)
        tokens = int(count_T[start - 1 : stop - 1].sum())
        if tokens:
            yield PositionLoss(start, stop, tokens, float(nats_T[start - 1 : stop - 1].sum()) / tokens)
        start = stop


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
