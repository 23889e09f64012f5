"""Beam search: find likely whole continuations by a bounded search.

Shape letters: B beams, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.config import check_at_least
from subquad.generation.batch_state import as_tensor
from subquad.generation.generate import Generation
from subquad.generation.requests import Continuation
from subquad.generation.sampling import SamplingConfig, check_finite
from subquad.inference import inference
from subquad.models import Decoder
from subquad.state import State


@dataclass(eq=False)
class Beam(Continuation):
    """A continuation; `score` is the sum of its log-probabilities divided by `length ** length_penalty`."""

    score: float


def beam_search(
    model: Decoder,
    prompt: Sequence[int],
    /,
    *,
    beams: int = 4,
    max_new_tokens: int = 256,
    stop_tokens: Collection[int] = (),
    length_penalty: float = 1.0,
    state: State | None = None,
    prefill_chunk: int = 4096,
) -> list[Beam]:
    """Return `beams` continuations of `prompt`, the best first, by `sum_t log p(token_t) / length ** length_penalty`.

    Each step continues the `beams` likeliest candidates that don't end with one of `stop_tokens`; ended ones (the stop
    token counts in their length) compete by score. The search ends after `max_new_tokens`, or as soon as no open beam,
    at its current length, scores above the worst of `beams` ended ones. States are carried and reordered, so the prompt
    is read once. Returns fewer than `beams` if the model has fewer continuations.

    Raises `ValueError` for numbers out of range, as `generate`, and for logits that are not finite.
    """
    check_at_least(1, beams=beams)
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty must be finite, got {length_penalty}")
    sampling = SamplingConfig(max_tokens=max_new_tokens, temperature=0, prefill_chunk=prefill_chunk)
    generation = Generation(model, prompt, sampling, state=state)
    if max_new_tokens == 0:
        return [Beam([], "length", 0.0)]
    generation.prefill()
    stops, ended = frozenset(stop_tokens), list[Beam]()
    with inference(model):
        logits_BTV, state = model(as_tensor(model, [int(prompt[-1])]), generation.state)
        rows: list[list[int]] = [[]]
        sums_B = torch.zeros(1, dtype=torch.float64)
        for length in range(1, max_new_tokens + 1):
            logits_BV = logits_BTV[:, -1].double().cpu()
            check_finite(logits_BV)
            scores_BV = sums_B[:, None] + logits_BV.log_softmax(-1)
            open_beams = _next_beams(scores_BV, rows, beams, stops, length**length_penalty, ended)
            if not open_beams or length == max_new_tokens or _decided(open_beams, ended, beams, length**length_penalty):
                break
            rows = [[*rows[row], token] for row, token, _ in open_beams]
            sums_B = torch.tensor([total for _, _, total in open_beams], dtype=torch.float64)
            origin_B = torch.tensor([row for row, _, _ in open_beams], device=logits_BTV.device)
            state = state.select(origin_B)
            last_B1 = torch.tensor([[row[-1]] for row in rows], device=logits_BTV.device)
            logits_BTV, state = model(last_B1, state)
    if not (open_beams and _decided(open_beams, ended, beams, length**length_penalty)):
        norm = length**length_penalty
        ended += [Beam([*rows[row], token], "length", total / norm) for row, token, total in open_beams]
    return sorted(ended, key=lambda beam: -beam.score)[:beams]


OpenBeams = list[tuple[int, int, float]]
"""Row, token and sum of log-probabilities of each open beam."""


def _next_beams(
    scores_BV: Tensor, rows: list[list[int]], beams: int, stops: frozenset[int], norm: float, ended: list[Beam]
) -> OpenBeams:
    """Return the likeliest candidates that continue; add those that end to `ended`."""
    vocab_size = scores_BV.shape[1]
    # Each row can end in `len(stops)` ways, so this many candidates include `beams` that continue.
    totals, places = scores_BV.flatten().topk(min((1 + len(stops)) * beams, scores_BV.numel()))
    open_beams: OpenBeams = []
    for rank, (total, place) in enumerate(zip(totals.tolist(), places.tolist(), strict=True)):
        row, token = divmod(place, vocab_size)
        if token not in stops:
            open_beams.append((row, token, total))
        elif rank < beams:
            ended.append(Beam([*rows[row], token], "stop", total / norm))
    ended.sort(key=lambda beam: -beam.score)
    del ended[beams:]
    return open_beams[:beams]


def _decided(open_beams: OpenBeams, ended: list[Beam], beams: int, norm: float) -> bool:
    """Return whether enough beams have ended, and the best open one scores no better than the worst of them."""
    return len(ended) == beams and open_beams[0][2] / norm <= ended[-1].score
