"""Which labelled sequences to read or to make, apart from the code that does, so that reading it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from subquad.config import Config

DatasetName = Literal["toy", "listops", "text", "retrieval", "image", "pathfinder32", "pathfinder64", "pathfinder128"]
MADE = ("toy", "listops", "pathfinder32", "pathfinder64", "pathfinder128")
"""Data sets that need no `path`: they are made by rules."""
ON_THE_HUB = ("text", "image")
"""Data sets that hf:NAME can be read as."""
SPLIT_HERE = ("text", "image")
"""Data sets that are published without a part to measure on while training."""


@dataclass(frozen=True, kw_only=True)
class ListOpsConfig(Config):
    """Which expressions `listops` makes; the defaults are those of Long Range Arena."""

    max_depth: int = 10
    """Operators and digits lie no deeper; the root has depth 1."""
    max_args: int = 10
    """An operator has from two to so many arguments, each number equally likely."""
    min_length: int = 501
    """Fewest tokens of an expression that is kept; operators, digits and closing brackets count, nothing else."""
    max_length: int = 1999
    """Most tokens of an expression that is kept."""
    leaf: float = 0.75
    """Probability that a node above the greatest depth is a digit and not an operator."""

    def __post_init__(self) -> None:
        _at_least("listops", self, max_depth=2, max_args=2, min_length=1, max_length=1)
        if not 0 < self.leaf < 1:
            raise ValueError(f"listops.leaf must lie between 0 and 1, both excluded, got {self.leaf}")
        if self.max_length < self.min_length:
            raise ValueError(f"listops.max_length must be at least min_length={self.min_length}, got {self.max_length}")
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_args * longest
            if longest >= self.min_length:
                break
        if longest < self.min_length:
            raise ValueError(
                f"listops.min_length={self.min_length} is above the {longest} tokens of the longest expression with "
                f"max_depth={self.max_depth}, max_args={self.max_args}"
            )


@dataclass(frozen=True, kw_only=True)
class PathfinderConfig(Config):
    """Which images `pathfinder32`, `pathfinder64` and `pathfinder128` (Path-X) make."""

    difficulty: Literal["hard", "intermediate", "easy"] = "hard"
    """Segments of the two long snakes: 14 (hard, that of Long Range Arena), 9 or 6."""


@dataclass(frozen=True, kw_only=True)
class LabelledConfig(Config):
    """A classification task."""

    dataset: DatasetName = "toy"
    """toy: zeros and ones, some of them after a mark; the label is what most of the marked ones are. The others are
    Long Range Arena's: listops and pathfinder32, 64, 128 (Path-X) are made by its rules, or read from its release in
    path; text (reviews as bytes), retrieval (pairs of papers as bytes) and image (grey pixels) are read from path."""
    path: str | None = None
    """A folder or file that holds the data set, or hf:NAME for a Hugging Face dataset: docs/lra.md."""
    cache: str | None = None
    """Where data that was made or read is kept (None: SUBQUAD_CACHE, else ~/.cache/subquad)."""
    examples: int | None = None
    """Sequences to learn from; after them come the same again, in another order. None: all that the data set has."""
    held_out: int | None = None
    """Other sequences to measure on while training, and as many again for the end (None: all of both)."""
    seed: int = 0
    """Another number makes other sequences, and chooses others where examples or held_out is below what there is."""
    too_long: Literal["cut", "refuse"] = "cut"
    """What to do with sequences longer than batch.length: cut them to it, as Long Range Arena does, or stop."""
    validation: Literal["apart", "test"] = "apart"
    """What to measure while training where the data set has no such part. apart: a tenth of its training part, chosen
    by a hash; test: its test part, as Long Range Arena does for text."""
    listops: ListOpsConfig = field(default_factory=ListOpsConfig)
    """Which expressions to make (dataset=listops without a path)."""
    pathfinder: PathfinderConfig = field(default_factory=PathfinderConfig)
    """Which images to make (dataset=pathfinder32, 64, 128)."""

    def check_source(self) -> None:
        """Raise `ValueError` for a data set that is read, without a path to read it from."""
        if self.path is None and self.dataset not in MADE:
            raise ValueError(
                f"dataset={self.dataset} is read, not made: give its path, a folder, a file or hf:NAME "
                f"(docs/lra.md has their layouts); {', '.join(MADE)} need none"
            )

    def __post_init__(self) -> None:
        _at_least("classify", self, examples=1, held_out=1, seed=0)
        if self.path is not None and (self.dataset == "toy" or not self.path):
            rule = "must name a folder, a file or hf:NAME" if not self.path else "has no effect with dataset=toy"
            raise ValueError(f"classify.path={self.path!r} {rule}")
        if self.path is not None and self.path.startswith("hf:"):
            if self.dataset not in ON_THE_HUB:
                raise ValueError(
                    f"classify.path={self.path!r}: {self.dataset} is read from a folder; {' and '.join(ON_THE_HUB)} "
                    "can be read from the Hugging Face hub"
                )
            if not self.path.removeprefix("hf:").partition(":")[0]:
                raise ValueError(f"classify.path={self.path!r} names no dataset; it must be hf:NAME or hf:NAME:CONFIG")
        if self.validation != "apart" and self.dataset not in SPLIT_HERE:
            raise ValueError(
                f"classify.validation={self.validation} has no effect with dataset={self.dataset}, which has a part "
                f"for it; {' and '.join(SPLIT_HERE)} have none"
            )
        for name, used in (
            ("listops", self.dataset == "listops" and self.path is None),
            ("pathfinder", self.dataset.startswith("pathfinder")),
        ):
            group = getattr(self, name)
            if group != type(group)() and not used:
                where = f"dataset={self.dataset}" + (f" and path={self.path!r}" if self.path else "")
                raise ValueError(f"classify.{name} has no effect with {where}; leave it out")


def _at_least(group: str, config: Any, **least: int) -> None:
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ValueError(f"{group}.{name} must be at least {bound}, got {value}")
