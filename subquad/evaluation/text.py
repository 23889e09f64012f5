"""Loss of a text: nats per token, perplexity, bits per byte, overall and by tokens of context.

A text is cut into windows. With `documents`, each document is read by itself, and windows of several documents are
packed into rows. Shape letters: B batch, T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby, islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from subquad.config import check_at_least
from subquad.data.packing import first_fit
from subquad.data.token_set import TokenSet
from subquad.data.windows import IGNORED, PADDING
from subquad.inference import device_of, inference
from subquad.models import Decoder

Tokens: TypeAlias = Sequence[int] | np.ndarray | Tensor | TokenSet


class ScoredSpan(NamedTuple):
    """The model reads tokens `start` to `stop - 1`; its predictions of tokens `scored` to `stop` count."""

    start: int
    stop: int
    scored: int


def plan(tokens: int, length: int, stride: int, latents: int | None = None) -> list[ScoredSpan]:
    """Return windows that predict each of `tokens` tokens except the first exactly once.

    Each window reads at most `length` tokens and begins `stride` after the previous one. The first counts all of its
    predictions, the others their last `stride`, each with at least `length - stride + 1` tokens of context. With
    `stride == length` windows don't overlap.

    If only the last `latents` tokens of a window predict, the first windows all begin at token 0: they read `latents`
    tokens, then `stride` more each, until they reach `length`.
    """
    windows = []
    scored, stop = 1, 0
    end = length if latents is None else min(latents, length)
    while stop < tokens - 1:
        stop = min(end, tokens - 1)
        windows.append(ScoredSpan(max(0, end - length), stop, scored))
        scored, end = stop + 1, end + stride
    return windows


def batches(windows: Sequence[ScoredSpan], batch_size: int) -> Iterator[list[ScoredSpan]]:
    """Yield batches of consecutive windows of equal size, so nothing is padded."""
    for _, equal in groupby(windows, key=lambda window: window.stop - window.start):
        group = list(equal)
        for i in range(0, len(group), batch_size):
            yield group[i : i + batch_size]


def losses(model: Decoder, tokens: Tokens, batch: list[ScoredSpan]) -> np.ndarray:
    """Return nats `[B, T]` of each next token as float64; of the last tokens alone if only they are predicted."""
    rows_BT = np.stack([np.asarray(tokens[window.start : window.stop + 1], dtype=np.int64) for window in batch])
    check_vocabulary(model, rows_BT)
    tokens_BT = torch.from_numpy(rows_BT).to(device_of(model))
    with inference(model):
        loss = model.loss(tokens_BT[:, :-1], tokens_BT[:, 1:], reduction="none")
    return loss.double().cpu().numpy().reshape(len(batch), -1)


def check_vocabulary(model: Decoder, tokens: np.ndarray) -> None:
    """Raise `ValueError` for a token outside the model's vocabulary."""
    if tokens.min() < 0 or tokens.max() >= model.config.vocab_size:
        raise ValueError(
            f"tokens must be between 0 and {model.config.vocab_size - 1}, the model's vocabulary, "
            f"got {tokens.min()} to {tokens.max()}; were they made by another tokenizer?"
        )


OPEN_ROWS = 16
"""Partly filled rows kept open for further windows."""


def check_documents(model: Decoder, documents: np.ndarray, tokens: int, skip: int) -> None:
    """Raise `ValueError` for invalid document offsets, a model that can't read packed documents, or a `skip`."""
    model.check_packed()
    if skip:
        raise ValueError(f"skip counts tokens of one text and can't be combined with documents, got {skip}")
    ends = np.asarray(documents)
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or (np.diff(ends) < 0).any():
        raise ValueError(
            f"documents must be rising offsets from 0 to the number of tokens, {tokens}, got {ends.tolist()[:8]}"
        )


def rows_of(windows: Sequence[ScoredSpan], length: int) -> Iterator[list[ScoredSpan]]:
    """Return windows packed into rows of at most `length` tokens, first fit."""
    rows: dict[int, list[ScoredSpan]] = {}
    sizes = (window.stop - window.start for window in windows)
    for window, row in zip(windows, first_fit(sizes, length, OPEN_ROWS), strict=True):
        rows.setdefault(row, []).append(window)
    return iter(rows.values())


def _losses(model: Decoder, tokens: Tokens, rows: Sequence[Sequence[ScoredSpan]], length: int) -> list[np.ndarray]:
    """Return float64 nats of each next token, one array per window, row by row."""
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
    device = device_of(model)
    inputs_BT, targets_BT, ids_BT = (torch.from_numpy(x).to(device) for x in (tokens_BT, labels_BT, doc_ids_BT))
    with inference(model):
        h_BTD = model.passes(inputs_BT, doc_ids=ids_BT)[-1]
        losses_BT = model.loss_of_hidden(h_BTD, targets_BT, reduction="none").double().cpu().numpy()
    return [losses_BT[b, begin:end] for b, begin, end in places]


@dataclass(frozen=True)
class PositionLoss:
    """Loss of predictions with `start` to `stop - 1` tokens of context, including the current token."""

    start: int
    stop: int
    tokens: int
    loss: float
    """Mean nats per token."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`."""

    tokens: int
    """Tokens predicted."""
    loss: float
    """Mean nats per predicted token."""
    perplexity: float
    """exp(loss)."""
    word_perplexity: float | None
    """exp(total nats / whitespace words); None if the number of words is unknown."""
    bits_per_byte: float | None
    """Total bits / bytes of the text; None if the number of bytes is unknown."""
    by_position: tuple[PositionLoss, ...]
    """Loss by tokens of context, in ranges of doubling size."""
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
    """Score every token except the first exactly once, in windows of `length` tokens.

    `stride` is the distance between windows. The default, `length`, is fastest; a smaller one lets windows overlap, so
    that every prediction after the first window has at least `length - stride + 1` tokens of context. A `PerceiverAR`
    predicts only the last `latents` tokens of a window, so its stride is at most, and by default, `latents`; see
    `plan`. `windows` limits the number of windows. `skip` leaves out windows that predict any of the first `skip`
    tokens, which have less context; `bits_per_byte` and `word_perplexity` are None then.

    `documents` holds the offset of each document in `tokens`, then the number of tokens, as in `TokenShard`. Each
    document is read by itself, and every token except its first is predicted once.

    `bits_per_byte` and `word_perplexity` describe a code for the whole text: a first token, which is not predicted,
    counts log2(vocabulary) bits. They divide by `text_bytes` and `words`, the size of the text behind all `tokens`. If
    `windows` cuts the text, both are counted in `decode` of the remaining tokens (to within a character at the cut),
    and are None without `decode`.

    Runs in eval mode without gradients and restores the mode; sums are float64. `progress(done, windows)` is called
    after each batch. Raises `ValueError` for fewer than two tokens, a token outside the vocabulary or a number out of
    range.
    """
    latents = model.predicts_last
    if stride is None:
        stride = length if latents is None else min(length, latents)
    _check(len(tokens), length, stride, windows, batch_size, latents)
    if documents is not None:
        check_documents(model, documents, len(tokens), skip)
        planned = [
            ScoredSpan(*(start + place for place in window))
            for start, stop in pairwise(np.asarray(documents).tolist())
            for window in plan(stop - start, length, stride)
        ]
    else:
        planned = plan(len(tokens), length, stride, latents)
    chosen = [window for window in planned if window.scored > skip][:windows]
    if skip < 0 or not chosen:
        raise ValueError(f"skip must be at least 0 and leave some of the {len(tokens)} tokens to predict, got {skip}")
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
        raise ValueError(f"stride must be between 1 and length ({length}), so that every token is scored, got {stride}")
    if latents is not None and stride > latents:
        raise ValueError(
            f"stride must be at most the model's latents ({latents}): it predicts only a window's last {latents} "
            f"tokens, and every token is scored; got {stride}"
        )


def _scores(
    model: Decoder, tokens: Tokens, chosen: Sequence[ScoredSpan], batch_size: int, length: int, packed: bool
) -> Iterator[list[tuple[ScoredSpan, np.ndarray]]]:
    """Yield batches of `batch_size` windows, or of packed rows, each window with the nats of its predictions."""
    if not packed:
        for batch in batches(chosen, batch_size):
            yield list(zip(batch, losses(model, tokens, batch), strict=True))
        return
    rows = rows_of(chosen, length)
    while some := list(islice(rows, batch_size)):
        yield list(zip(chain.from_iterable(some), _losses(model, tokens, some, length), strict=True))


def _summed(
    scored: Iterator[list[tuple[ScoredSpan, np.ndarray]]],
    length: int,
    windows: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of nats `[length]` and the number `[length]` of scored predictions, by place in the window."""
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
    """Yield the loss with 1, 2 to 3, 4 to 7, ... tokens of context, skipping ranges without predictions."""
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
