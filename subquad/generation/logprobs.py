"""Log-probabilities of tokens, beside those of the likeliest tokens in their places.

They are of the model's own distribution, before temperature, penalties, biases and filters.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.generation.sampling import check_finite


class TokenLogprob(NamedTuple):
    """A token, its log-probability in nats, and the likeliest tokens of its place with theirs, the likeliest first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs_of(logits_TV: Tensor, tokens: Sequence[int], top: int, /) -> list[TokenLogprob]:
    """Return `log softmax(logits)` of a token of each place and of the `top` likeliest ones there, in float64.

    Raises `ValueError` if a logit is not finite.
    """
    logits_TV = logits_TV.detach().double()
    check_finite(logits_TV)
    logp_TV = logits_TV.log_softmax(-1)
    tokens_T = torch.tensor(tokens, dtype=torch.long, device=logp_TV.device)
    own = logp_TV.gather(-1, tokens_T[:, None])[:, 0].tolist()
    values, ids = (found.tolist() for found in logp_TV.topk(top, dim=-1))
    return [
        TokenLogprob(token, logprob, list(zip(*likeliest, strict=True)))
        for token, logprob, *likeliest in zip(tokens, own, ids, values, strict=True)
    ]


def check_top(top: int | None, vocab_size: int, name: str) -> None:
    """Raise `ValueError` unless `top` is None or a number of tokens that the vocabulary has."""
    if top is not None and not 0 <= top <= vocab_size:
        raise ValueError(f"{name} must be between 0 and {vocab_size}, the size of the vocabulary, got {top}")
