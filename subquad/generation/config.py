"""How to sample, apart from the sampling so that the command line reads it without loading torch."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.config import Config


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """How the next token is chosen and when to stop."""

    max_tokens: int = 256
    """Tokens to generate at most."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Keep the k likeliest tokens (None: all)."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities sum to at least p (None: all)."""
    min_p: float | None = None
    """Keep the tokens that are at least this part as likely as the likeliest one (None: all)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that are in the text already, multiplies their negative ones (1: off)."""
    seed: int | None = None
    """The same seed gives the same tokens (None: a new one each time)."""
    prefill_chunk: int = 4096
    """Tokens of the prompt that are read at a time."""

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be at least -2**63 and below 2**64, got {self.seed}")
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {self.prefill_chunk}")
