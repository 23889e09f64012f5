"""Configuration of `subquad eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from subquad.config import Config, check_at_least


@dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """The text to measure on."""

    path: str | None = None
    """All of the text at this path, in the forms of `subquad train --data.path`; by default the held-out part of the
    text that the run was trained on."""
    skip_bad_files: bool = False
    """Whether to leave out, with a warning each, files that are not UTF-8 text."""
    cache: str | None = None
    """Folder for prepared text; null means $SUBQUAD_CACHE, or ~/.cache/subquad where that is not set."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Config):
    """Settings of a measurement."""

    data: TextConfig = field(default_factory=TextConfig)
    """The text to measure on."""
    length: int | None = None
    """Tokens that the model reads in a window; by default as many as in training."""
    stride: int | None = None
    """Tokens from the start of a window to that of the next; by default the length, so windows don't overlap. A smaller
    one gives each prediction more context, and takes longer."""
    documents: bool | None = None
    """Whether each document is read from its start, as if it were alone, and not after the one before; by default as in
    training (data.pack)."""
    windows: int | None = None
    """Stop after so many windows; by default the whole text."""
    batch_size: int = 8
    """Windows that are read at once."""
    json: str | None = None
    """File to write the numbers to."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU where PyTorch finds one; cpu: never."""

    def __post_init__(self) -> None:
        check_at_least(1, length=self.length, stride=self.stride, windows=self.windows, batch_size=self.batch_size)
        if self.length is not None and self.stride is not None and self.stride > self.length:
            raise ValueError(
                f"stride must be at most length ({self.length}), so that no token is left out, got {self.stride}"
            )
