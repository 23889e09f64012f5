"""The loss of a model of transformers by position, over the same text at every range of positions.

Shape letters: T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from subquad.evaluation.text import Tokens, evaluating

MOST_NUMBERS = 1 << 26
"""Of the logits that are computed at a time: as many windows are read at once, at least one."""


@dataclass(frozen=True)
class PositionPlan:
    """The windows that are read, and the predictions of theirs that count.

    A window begins every `step` tokens of a stretch of the text; ranges of positions are multiples of `step` wide. So
    each counted token of the text is predicted exactly `width / step` times from each range: the ranges' losses are
    means over the same tokens with the same weights, and differ by position alone.
    """

    edges: tuple[int, ...]
    """Where ranges of positions end: the first is 1 to `edges[0]`, the next `edges[0] + 1` to `edges[1]`, ..."""
    step: int
    """Tokens between the beginnings of two windows."""
    stretch: int
    """Tokens of each stretch that count."""
    starts: tuple[int, ...]
    """Where in the text stretches begin, the context of the first counted token before it included."""

    @property
    def tokens(self) -> int:
        """Return how many tokens of the text count."""
        return self.stretch * len(self.starts)

    @property
    def windows(self) -> int:
        """Return the number of windows."""
        return len(self.starts) * (self.edges[-1] + self.stretch) // self.step


@dataclass(frozen=True)
class RangeLoss:
    """Predictions from `first` to `last` tokens of context, the current one included."""

    first: int
    last: int
    predictions: int
    loss: float
    """Mean nats a token."""
    stretches: tuple[float, ...]
    """The same of each stretch of the text alone."""

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def plan_positions(size: int, *, own: int, length: int, tokens: int, stretches: int) -> PositionPlan:
    """Plan the windows of a text of `size` tokens for a model made for `own` tokens that is to read `length`.

    Ranges end at own / 2, own, 2 own, ... and at the last multiple of the step (own / 2 or less) up to `length`. Raises
    `ValueError` for lengths that are none and for a text that is too short.
    """
    if not 2 <= own < length:
        raise ValueError(f"own must be at least 2 and below length={length}, got {own}")
    if tokens < 1 or stretches < 1:
        raise ValueError(f"tokens and stretches must be at least 1, got {tokens} and {stretches}")
    step = own // 2
    while own % step or length // step * step <= own:
        step -= 1
    edges = [own // 2 // step * step or step]
    while edges[-1] < length // step * step:
        edges.append(min(own if edges[-1] < own else 2 * edges[-1], length // step * step))
    stretch = max(1, round(tokens / stretches / step)) * step
    need = edges[-1] + stretch
    if need * stretches > size:
        raise ValueError(
            f"the loss by position needs {stretches} stretches of {need} tokens ({edges[-1]} of context), and the "
            f"held-out text has {size}: hold out more of it, or lower eval.tokens or eval.stretches"
        )
    room = size - need
    starts = [room * i // max(1, stretches - 1) for i in range(stretches)]
    return PositionPlan(tuple(edges), step, stretch, tuple(starts))


@torch.no_grad()
def loss_by_position(
    model: Any,
    tokens: Tokens,
    /,
    plan: PositionPlan,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[RangeLoss, ...]:
    """Measure the mean loss of each range of positions, in nats a token; sums in float64, restores the model's mode."""
    device = next(model.parameters()).device
    shape = (len(plan.starts), plan.edges[-1])
    sums, counts = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    done = 0
    with evaluating(model):
        for batch in _batches(plan, max(1, MOST_NUMBERS // (plan.edges[-1] * model.config.vocab_size))):
            size = batch[0][1] - batch[0][0]
            rows = np.stack([np.asarray(tokens[start : stop + 1]) for start, stop, *_ in batch]).astype(np.int64)
            ids = torch.from_numpy(rows).to(device)
            logits_BTV = model(input_ids=ids[:, :-1], use_cache=False).logits
            logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
            nats = cross_entropy(logits_BTV.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            for (_, _, skip, place), row in zip(batch, nats.double().view(len(batch), size).cpu().numpy(), strict=True):
                sums[place, skip:size] += row[skip:]
                counts[place, skip:size] += 1
            done += len(batch)
            if progress:
                progress(done, plan.windows)
    return tuple(_ranges(plan.edges, sums, counts))


def _batches(plan: PositionPlan, most: int) -> list[list[tuple[int, int, int, int]]]:
    """Return windows `(start, stop, skip, stretch)` of the text, equally long ones together, at most `most`.

    A window reads the tokens from start to stop - 1; its first `skip` predictions lie before the tokens that count,
    which are those of the stretch of that number.
    """
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    longest = plan.edges[-1]
    for place, begin in enumerate(plan.starts):
        first, end = begin + longest, begin + longest + plan.stretch
        for start in range(begin, end, plan.step):
            stop = min(start + longest, end - 1)  # the token `end - 1` is the last that is predicted
            skip = max(0, first - 1 - start)
            if stop - start > skip:
                found.setdefault(stop - start, []).append((start, stop, skip, place))
    return [same[i : i + most] for same in found.values() for i in range(0, len(same), most)]


def _ranges(edges: Sequence[int], sums: np.ndarray, counts: np.ndarray) -> list[RangeLoss]:
    found = []
    for first, last in zip([0, *edges[:-1]], edges, strict=True):
        nats, predictions = sums[:, first:last].sum(1), counts[:, first:last].sum(1)
        total = int(predictions.sum())
        each = tuple(float(x) for x in nats / predictions)
        found.append(RangeLoss(first + 1, last, total, float(nats.sum() / total), each))
    return found
