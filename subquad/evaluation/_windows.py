"""The windows that a text is measured in, and the losses of a batch of them.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from subquad.models import Decoder

if TYPE_CHECKING:
    from subquad.data.token_set import SetTokens

Tokens: TypeAlias = "Sequence[int] | np.ndarray | Tensor | SetTokens"


class Window(NamedTuple):
    """The model reads tokens `start` to `stop - 1`; the predictions of `scored` to `stop` count."""

    start: int
    stop: int
    scored: int


def plan(tokens: int, length: int, stride: int, latents: int | None = None) -> list[Window]:
    """The windows that predict each of `tokens` tokens but the first exactly once.

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
    """Batches of windows of equal size: only the last window can be shorter, so nothing is padded."""
    for _, equal in groupby(windows, key=lambda window: window.stop - window.start):
        group = list(equal)
        for i in range(0, len(group), batch_size):
            yield group[i : i + batch_size]


@torch.no_grad()
def losses(model: Decoder, tokens: Tokens, batch: list[Window]) -> np.ndarray:
    """Nats `[B, T]` of each next token (or of the last ones, where only they are predicted), float64."""
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
def evaluating(model: Decoder) -> Iterator[None]:
    """Within the block the model is in eval mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
