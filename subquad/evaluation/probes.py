"""Recall of a model: accuracy by length, depth and distance, and loss by tokens of context.

Shape letters: B batch (rows), T tokens, M tokens that predict (all, or the latents of a perceiver_ar), D model width,
N asked positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from subquad.config import Record, check_at_least
from subquad.data.probes import ProbeRows
from subquad.evaluation.text import ScoredSpan, losses
from subquad.inference import device_of, inference
from subquad.models import Decoder

Progress = Callable[[int, int], None]
"""Called as (sequences done, total sequences)."""


@dataclass(frozen=True)
class Score(Record):
    """A mean over answers in the range `start` to `stop`, excluding `stop` unless they are equal.

    The range is of depth, distance, share of the string or context: see the function that returns the score.
    """

    length: int
    start: float
    stop: float
    sequences: int
    asked: int
    """Number of answers: whole keys for passkey, tokens otherwise."""
    value: float
    """Accuracy, or loss in nats."""
    error: float
    """Standard error of `value` over sequences, since answers within a sequence are not independent."""


def mean_and_error(sum_B: np.ndarray, count_B: np.ndarray, /) -> tuple[float, float]:
    """Return `m = sum / count` and its standard error over rows b, `sqrt(sum_b (sum_b - m count_b)^2) / count`.

    With one answer in each of n rows and accuracy p, the error is `sqrt(p (1 - p) / n)`.
    """
    count = count_B.sum()
    mean = sum_B.sum() / count
    return float(mean), float(np.sqrt(((sum_B - mean * count_B) ** 2).sum()) / count)


def right_answers(
    model: Decoder, rows: ProbeRows, /, *, batch_size: int = 8, progress: Progress | None = None
) -> np.ndarray:
    """Return bool `[B, T]`, True where a token is asked for and the model's likeliest next token is the right one.

    Takes one forward pass per batch, with the true answer as input. An answer of several tokens is fully right exactly
    when greedy decoding would produce it, since both first go wrong at the same token. Runs on the model's device in
    eval mode and restores the mode. Raises `ValueError` as `check_rows` does, and for a batch size below 1.
    """
    check_at_least(1, batch_size=batch_size)
    check_rows(model, rows)
    right_BT = np.zeros(rows.tokens.shape, dtype=bool)
    device = device_of(model)
    with inference(model):
        for start in range(0, len(right_BT), batch_size):
            part = slice(start, start + batch_size)
            tokens_BT = torch.from_numpy(rows.tokens[part, :-1]).to(device)
            h_BMD = model.vectors(tokens_BT)
            row_N, place_N = np.nonzero(rows.asked[part])
            before_N = place_N - 1 - (tokens_BT.shape[1] - h_BMD.shape[1])
            logits_NV = model.logits(h_BMD[torch.from_numpy(row_N), torch.from_numpy(before_N)])
            answers_N = logits_NV.argmax(-1).cpu().numpy()
            right_BT[part][row_N, place_N] = answers_N == rows.labels[part][row_N, place_N]
            if progress:
                progress(min(start + batch_size, len(right_BT)), len(right_BT))
    return right_BT


def check_rows(model: Decoder, rows: ProbeRows, /) -> None:
    """Raise `ValueError` for tokens outside the vocabulary and for answers at positions that the model can't predict.

    A `PerceiverAR` predicts only as many of the last tokens as it has latents.
    """
    if rows.tokens.min() < 0 or max(rows.tokens.max(), rows.labels.max()) >= model.config.vocab_size:
        raise ValueError(
            f"the probe's tokens range from {rows.tokens.min()} to {rows.tokens.max()}, but the model's vocabulary has "
            f"{model.config.vocab_size}; was it trained on another probe?"
        )
    check_reach(model, rows.tokens.shape[1], int(rows.asked.any(0).argmax()))


def check_reach(model: Decoder, length: int, first: int, /) -> None:
    """Raise `ValueError` if the model can't read `length` tokens or can't predict position `first`."""
    config = model.config
    if model.most_tokens is not None and length > model.most_tokens:
        raise ValueError(
            f"the model has learned {model.most_tokens} positions (model.max_positions), got length={length}"
        )
    if model.predicts_last is not None and length - first > model.predicts_last:
        raise ValueError(
            f"{config.attention} predicts only the last {model.predicts_last} of {length} tokens, but position {first} "
            f"is asked for, which takes {length - first} latents"
        )


def by_depth(rows: ProbeRows, right_BT: np.ndarray, depth: float, /) -> Score:
    """Return the share of rows, all made for one depth, whose answers are all right."""
    row_B = (right_BT == rows.asked).all(1)
    return _score(rows, depth, depth, row_B.astype(float), np.ones(len(row_B)))


def by_distance(rows: ProbeRows, right_BT: np.ndarray, /) -> list[Score]:
    """Return the share of right answers by tokens from source to answer, in ranges 1, 2 to 3, 4 to 7, ...

    Ranges without an answer are left out.
    """
    length = rows.tokens.shape[1]
    distance_BT = np.where(rows.asked, np.arange(length) - rows.source, 0)
    edges = [2**i for i in range(length.bit_length() + 1)]
    return list(_ranges(rows, right_BT, distance_BT, edges))


def by_place(rows: ProbeRows, right_BT: np.ndarray, parts: int, /) -> list[Score]:
    """Return the share of right answers in `parts` equal parts of each row's answers, as ranges of 0 to 1."""
    check_at_least(1, parts=parts)
    order_BT = rows.asked.cumsum(1) - 1
    share_BT = np.where(rows.asked, order_BT / rows.asked.sum(1, keepdims=True), -1.0)
    return list(_ranges(rows, right_BT, share_BT, [part / parts for part in range(parts + 1)]))


def overall(rows: ProbeRows, right_BT: np.ndarray, /) -> Score:
    """Return the share of right answers over all positions."""
    return _score(rows, 0, 1, right_BT.sum(1).astype(float), rows.asked.sum(1).astype(float))


def _ranges(rows: ProbeRows, right_BT: np.ndarray, what_BT: np.ndarray, edges: Sequence[float]) -> Iterator[Score]:
    for start, stop in pairwise(edges):
        inside_BT = rows.asked & (what_BT >= start) & (what_BT < stop)
        if inside_BT.any():
            yield _score(rows, start, stop, (right_BT & inside_BT).sum(1).astype(float), inside_BT.sum(1).astype(float))


def _score(rows: ProbeRows, start: float, stop: float, right_B: np.ndarray, asked_B: np.ndarray) -> Score:
    value, error = mean_and_error(right_B, asked_B)
    return Score(rows.tokens.shape[1], start, stop, int((asked_B > 0).sum()), int(asked_B.sum()), value, error)


@dataclass(frozen=True)
class ContextLoss:
    """The result of `context_loss` at one length."""

    same: Score
    """Loss of the tokens scored at every length, with `start` to `length` tokens of context."""
    by_context: tuple[Score, ...]
    """Loss by tokens of context: 1, 2, 3 to 4, 5 to 8, ..."""


def context_loss(
    model: Decoder,
    tokens: np.ndarray,
    /,
    *,
    lengths: Sequence[int],
    windows: int = 64,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> list[ContextLoss]:
    """Measure nats per token by tokens of context, in windows of each of `lengths` that end at the same tokens.

    There are `windows` windows of the greatest length, or as many as fit into the text without overlap. The last half
    of the shortest window is the same text at every length, which shows whether longer context helps. Only the latents
    of a `PerceiverAR` predict, so only they count. Raises `ValueError` for lengths below 2, for a text that is shorter
    than one window, and for lengths that the model can't read.
    """
    if windows < 1 or batch_size < 1:
        raise ValueError(f"windows and batch_size must be at least 1, got {windows} and {batch_size}")
    check_windows(model, len(tokens), lengths)
    longest = max(lengths)
    count = min(windows, (len(tokens) - 1) // longest)
    ends = [longest + i * (len(tokens) - 1 - longest) // max(1, count - 1) for i in range(count)]
    same = min(lengths) // 2
    if model.predicts_last is not None:
        same = min(same, model.predicts_last)
    results = []
    for n, length in enumerate(lengths):
        parts = []
        for start in range(0, count, batch_size):
            batch = [ScoredSpan(end - length, end, end - length + 1) for end in ends[start : start + batch_size]]
            parts.append(losses(model, tokens, batch))
            if progress:
                progress(n * count + start + len(batch), count * len(lengths))
        loss_BM = np.concatenate(parts)
        edges = [1, *(2**i + 1 for i in range((length - 1).bit_length())), length + 1]
        silent = length - loss_BM.shape[1]
        found = [_nats(loss_BM, length, max(a, silent + 1), b) for a, b in pairwise(edges) if b > silent + 1]
        results.append(ContextLoss(_nats(loss_BM, length, length - same + 1, length + 1), tuple(found)))
    return results


def check_windows(model: Decoder, tokens: int, lengths: Sequence[int], /) -> None:
    """Raise `ValueError` if `context_loss` can't measure windows of `lengths` in a text of `tokens` tokens."""
    if not lengths or min(lengths) < 2:
        raise ValueError(f"lengths must be at least 2, so that half of a window can be scored, got {list(lengths)}")
    longest = max(lengths)
    check_reach(model, longest, longest)
    if tokens <= longest:
        raise ValueError(
            f"the text has {tokens} tokens, too few for a window of {longest} and its next token; give more text "
            "or shorter lengths"
        )


def _nats(loss_BM: np.ndarray, length: int, start: int, stop: int) -> Score:
    """Return the loss with `start` to `stop - 1` tokens of context in windows of which the last M tokens predict."""
    silent = length - loss_BM.shape[1]
    part_BN = loss_BM[:, start - 1 - silent : stop - 1 - silent]
    value, error = mean_and_error(part_BN.sum(1), np.full(len(part_BN), part_BN.shape[1], dtype=float))
    return Score(length, start, stop, len(part_BN), part_BN.size, value, error)
