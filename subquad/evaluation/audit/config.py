"""How to audit, apart from the auditing so that the command line reads it without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from subquad.config import Config


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Config):
    """What an audit tries."""

    tokens: int = 64
    """Tokens of the sequences on which outputs are compared; shorter ones are tried too, and longer ones around the
    windows, segments and chunks that the model's configuration names."""
    batch: int = 3
    """Sequences in the batch that is compared with each of them alone."""
    long: int = 2048
    """Tokens of the input in bfloat16, or as many as the model has positions for; 0 leaves the check out."""
    contexts: list[int] = field(default_factory=lambda: [64, 256, 1024])
    """Tokens read before the state, the time and the memory of a token are measured; none leaves these out."""
    repeats: int = 5
    """Times that a token is timed at each context; the median counts."""
    seed: int = 0
    """Seed of the random tokens."""
    vocab_size: int | None = None
    """Tokens are drawn below it; by default the model's vocabulary: its configuration's, or the width of its logits."""
    dtype: Literal["auto", "float64", "float32", "own"] = "auto"
    """Of the weights while outputs are compared. auto: float64 where the model runs in it, or float32, or its own."""

    def __post_init__(self) -> None:
        for name, least in (("tokens", 4), ("batch", 2), ("long", 0), ("repeats", 1), ("vocab_size", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for context in self.contexts:
            if context < 1:
                raise ValueError(f"contexts must be at least 1, got {context}")
