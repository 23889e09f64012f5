"""Which labelled sequences to read or to make, apart from the code that does, so that reading it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subquad.config import Config

DatasetName = Literal["toy", "listops", "text", "retrieval", "image", "pathfinder32", "pathfinder64", "pathfinder128"]


@dataclass(frozen=True, kw_only=True)
class LabelledConfig(Config):
    """A classification task."""

    dataset: DatasetName = "toy"
    """toy: zeros and ones, some of them after a mark; the label is what most of the marked ones are. Made up as it is
    read, no download."""
    examples: int = 50_000
    """Sequences to learn from; after them come the same again, in another order."""
    held_out: int = 1000
    """Other sequences, to measure on."""
    seed: int = 0
    """Another number gives other sequences."""

    def __post_init__(self) -> None:
        for name, least in (("examples", 1), ("held_out", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"classify.{name} must be at least {least}, got {getattr(self, name)}")
