"""Configuration of `subquad eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from subquad.config import Config, check_at_least


@dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """The text to measure on."""

    path: str | None = None
    """Text to measure on: anything that `subquad train --data.path` accepts. None: the held-out part of the run's own
    training text."""
    skip_bad_files: bool = False
    """Skip files that aren't UTF-8 text, with a warning for each, instead of stopping."""
    cache: str | None = None
    """Folder that keeps tokenized text for reuse. None: $SUBQUAD_CACHE, or ~/.cache/subquad."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Config):
    """Settings of an evaluation."""

    data: TextConfig = field(default_factory=TextConfig)
    """The text to measure on."""
    length: int | None = None
    """Tokens per window. None: the training length."""
    stride: int | None = None
    """Tokens from the start of one window to the start of the next. None: the length, so windows don't overlap. A
    smaller stride gives each prediction more context and takes longer."""
    documents: bool | None = None
    """Read each document by itself, without the documents before it. None: as in training (data.pack)."""
    windows: int | None = None
    """Stop after this many windows (of a classifier: sequences; of an image model: images). None: measure all."""
    batch_size: int = 8
    """Windows, sequences or images in a batch."""
    json: str | None = None
    """Also write the numbers to this JSON file."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU if PyTorch finds one; cpu: always the CPU."""

    def __post_init__(self) -> None:
        check_at_least(1, length=self.length, stride=self.stride, windows=self.windows, batch_size=self.batch_size)
        if self.length is not None and self.stride is not None and self.stride > self.length:
            raise ValueError(
                f"stride must be at most length ({self.length}), so that every token is scored, got {self.stride}"
            )
