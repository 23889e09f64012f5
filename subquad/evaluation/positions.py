"""Loss of a transformers model by position, with every range of positions measured on the same text.

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

from subquad.evaluation.text import Tokens
from subquad.inference import device_of, inference
from subquad.ops.precision import at_least_float32

MOST_NUMBERS = 1 << 26
"""Upper limit on the logits of one batch, which sets its number of windows (at least one)."""


@dataclass(frozen=True)
class PositionPlan:
    """The windows to read, and which of their predictions are scored.

    In each stretch of text a window begins every `step` tokens, and each range of positions is a multiple of `step`
    wide. Every scored token is therefore predicted exactly `width / step` times from each range, so all ranges average
    over the same tokens with the same weights and their losses differ by position alone.
    """

    edges: tuple[int, ...]
    """Last position of each range: 1 to `edges[0]`, `edges[0] + 1` to `edges[1]`, ..."""
    step: int
    """Tokens between the starts of two windows."""
    stretch: int
    """Scored tokens per stretch."""
    starts: tuple[int, ...]
    """Start of each stretch in the text, including the context of its first scored token."""

    @property
    def tokens(self) -> int:
        """Return the number of scored tokens."""
        return self.stretch * len(self.starts)

    @property
    def windows(self) -> int:
        """Return the number of windows."""
        return len(self.starts) * (self.edges[-1] + self.stretch) // self.step


@dataclass(frozen=True)
class RangeLoss:
    """Loss of predictions with `first` to `last` tokens of context, including the current token."""

    first: int
    last: int
    predictions: int
    loss: float
    """Mean nats per token."""
    stretches: tuple[float, ...]
    """Mean nats per token of each stretch."""

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def plan_positions(size: int, *, own: int, length: int, tokens: int, stretches: int) -> PositionPlan:
    """Plan windows of `length` tokens in a text of `size` tokens, for a model made for `own` tokens.

    Ranges end at own / 2, own, 2 own, ... and at the last multiple of the step (at most own / 2) up to `length`. Raises
    `ValueError` unless 2 <= own < length, and for a text that is too short.
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
            f"the loss by position needs {stretches} stretches of {need} tokens ({edges[-1]} of context), but the "
            f"held-out text has {size}: hold out more of it, or lower eval.tokens or eval.stretches"
        )
    room = size - need
    starts = [room * i // max(1, stretches - 1) for i in range(stretches)]
    return PositionPlan(tuple(edges), step, stretch, tuple(starts))


def loss_by_position(
    model: Any, tokens: Tokens, /, plan: PositionPlan, *, progress: Callable[[int, int], None] | None = None
) -> tuple[RangeLoss, ...]:
    """Return the mean loss of each range of positions, in nats per token; sums are float64, the mode is restored."""
    device = device_of(model)
    shape = (len(plan.starts), plan.edges[-1])
    sums, counts = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    done = 0
    with inference(model):
        for batch in _batches(plan, max(1, MOST_NUMBERS // (plan.edges[-1] * model.config.vocab_size))):
            size = batch[0][1] - batch[0][0]
            rows = np.stack([np.asarray(tokens[start : stop + 1]) for start, stop, *_ in batch]).astype(np.int64)
            ids = torch.from_numpy(rows).to(device)
            logits_BTV = model(input_ids=ids[:, :-1], use_cache=False).logits
            logits_BTV = at_least_float32(logits_BTV)
            nats = cross_entropy(logits_BTV.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            for (_, _, skip, place), row in zip(batch, nats.double().view(len(batch), size).cpu().numpy(), strict=True):
                sums[place, skip:size] += row[skip:]
                counts[place, skip:size] += 1
            done += len(batch)
            if progress:
                progress(done, plan.windows)
    return tuple(_ranges(plan.edges, sums, counts))


def _batches(plan: PositionPlan, most: int) -> list[list[tuple[int, int, int, int]]]:
    """Return batches of at most `most` windows `(start, stop, skip, stretch)`, equally long within a batch.

    A window reads tokens start to stop - 1. Its first `skip` predictions precede the scored tokens of its stretch.
    """
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    longest = plan.edges[-1]
    for place, begin in enumerate(plan.starts):
        first, end = begin + longest, begin + longest + plan.stretch
        for start in range(begin, end, plan.step):
            stop = min(start + longest, end - 1)  # token `end - 1` is the last one predicted
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
