"""Choose the next token from its logits.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.config import Config, check_at_least


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """Choice of the next token, and length of the text."""

    max_tokens: int = 256
    """Most tokens to generate."""
    temperature: float = 1.0
    """Divide the logits by this; 0 takes the likeliest token."""
    top_k: int | None = None
    """Keep the k likeliest tokens (None: all)."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities sum to at least p (None: all)."""
    min_p: float | None = None
    """Keep the tokens whose probability is at least this times that of the likeliest one (None: all)."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens that are already in the text by this, multiply negative ones (1: off)."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens that were generated already; between -2 and 2, as in OpenAI's API."""
    frequency_penalty: float = 0.0
    """Subtract this from a token's logit for each time that it was generated; between -2 and 2, as in OpenAI's API."""
    logit_bias: dict[int, float] | None = None
    """Add to the logits of tokens, by id; between -100 (never) and 100 (always), as in OpenAI's API."""
    min_tokens: int = 0
    """Fewest tokens to generate before a stop token may end the text."""
    seed: int | None = None
    """Seed of the random numbers; the same seed repeats a text (None: a new one each time)."""
    prefill_chunk: int = 4096
    """Tokens of the prompt to read at a time."""

    def __post_init__(self) -> None:
        check_at_least(0, max_tokens=self.max_tokens, min_tokens=self.min_tokens)
        check_at_least(1, top_k=self.top_k, prefill_chunk=self.prefill_chunk)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be between -2 and 2, got {getattr(self, name)}")
        for token, bias in (self.logit_bias or {}).items():
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias must be between -100 and 100, got {bias} for token {token}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be at least -2**63 and below 2**64, got {self.seed}")


class Sampler:
    """Choose the tokens of one sequence, with its own random numbers and its own record of tokens already used.

    `tokens` are those before the sequence, `stop_tokens` those that end it. Raises `ValueError` for a `logit_bias`
    outside the vocabulary and for `min_tokens` if every token ends the text.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        vocab_size: int,
        tokens: Iterable[int] = (),
        /,
        *,
        stop_tokens: Collection[int] = (),
    ) -> None:
        self.sampling = sampling
        self._made = 0
        self._generated: set[int] = set()
        self._added_V = _bias(sampling, vocab_size)
        ends = sorted({token for token in stop_tokens if 0 <= token < vocab_size})
        self._ends = torch.tensor(ends, dtype=torch.long)
        if sampling.min_tokens and len(self._ends) == vocab_size:
            raise ValueError(f"min_tokens={sampling.min_tokens} needs a token that does not end the text; all do")
        self._random: torch.Generator | None = None
        self._used_V: Tensor | None = None
        if sampling.temperature > 0:
            self._random = torch.Generator()
            if sampling.seed is None:
                self._random.seed()
            else:
                self._random.manual_seed(sampling.seed)
        if sampling.repetition_penalty != 1:
            self._used_V = torch.zeros(vocab_size, dtype=torch.bool)
            self._used_V[torch.tensor(list(tokens), dtype=torch.long)] = True

    @property
    def takes_the_likeliest(self) -> bool:
        """Return whether the choice is always the token with the highest logit."""
        early = self._made < self.sampling.min_tokens
        return self._random is None and self._used_V is None and self._added_V is None and not early

    def __call__(self, logits_V: Tensor, /) -> int:
        """Return the next token. Raises `ValueError` if a logit is not finite."""
        logits_V = logits_V.detach().double().cpu()
        check_finite(logits_V)
        if self._used_V is not None:
            logits_V = penalised(logits_V, self._used_V, self.sampling.repetition_penalty)
        if self._added_V is not None:
            logits_V = logits_V + self._added_V
        if self._made < self.sampling.min_tokens and len(self._ends):
            logits_V = logits_V.index_fill(0, self._ends, -torch.inf)
        token = int(logits_V.argmax()) if self._random is None else sample(logits_V, self.sampling, self._random)
        self._record(token)
        return token

    def _record(self, token: int) -> None:
        self._made += 1
        if self._used_V is not None:
            self._used_V[token] = True
        if self._added_V is not None:
            self._added_V[token] -= self.sampling.frequency_penalty
            self._added_V[token] -= 0 if token in self._generated else self.sampling.presence_penalty
            self._generated.add(token)


def _bias(sampling: SamplingConfig, vocab_size: int) -> Tensor | None:
    """Return what is added to the first token's logits, `[V]`; None without a bias, presence or frequency penalty."""
    biases = sampling.logit_bias or {}
    for token in biases:
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias has token {token}; valid: 0 to {vocab_size - 1}")
    if not (biases or sampling.presence_penalty or sampling.frequency_penalty):
        return None
    bias_V = torch.zeros(vocab_size, dtype=torch.float64)
    bias_V[list(biases)] = torch.tensor(list(biases.values()), dtype=torch.float64)
    return bias_V


def check_finite(logits: Tensor, /) -> None:
    """Raise `ValueError` if a logit is NaN or infinite."""
    if not bool(logits.isfinite().all()):
        raise ValueError(
            "the model's logits must be finite, got NaN or infinity; its weights may be damaged, "
            "or too large for float16"
        )


def penalised(logits_V: Tensor, used_V: Tensor, penalty: float, /) -> Tensor:
    """Return `z / penalty` for z > 0 and `z * penalty` for z < 0, for the tokens already in the text.

    Source: CTRL (Keskar et al. 2019, arXiv:1909.05858, section 4.1), which always divides; that raises negative logits.
    """
    return torch.where(used_V, torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty), logits_V)


def sample(logits_V: Tensor, sampling: SamplingConfig, random: torch.Generator, /) -> int:
    """Draw a token from softmax(logits / temperature), cut to `top_k`, then `top_p`, then `min_p`; in float64."""
    logits_V, order_V = logits_V.sort(descending=True, stable=True)
    p_V = ((logits_V - logits_V[0]) / sampling.temperature)[: sampling.top_k].softmax(-1)
    if sampling.top_p is not None:
        p_V = p_V[p_V.cumsum(-1) - p_V < sampling.top_p]
    if sampling.min_p is not None:
        p_V = p_V[p_V >= sampling.min_p * p_V[0]]
    return int(order_V[torch.multinomial(p_V, 1, generator=random)])
