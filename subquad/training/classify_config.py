"""What a classifier learns, and what it learns before: read by the command line without loading torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from subquad.config import Config
from subquad.data.config import LabelledConfig
from subquad.models.encoder import Pooling
from subquad.models.pretraining import check_hiding

AUGMENTED = ("image", "listops", "pathfinder32", "pathfinder64", "pathfinder128", "retrieval")
"""Data sets whose sequences can be changed without changing their labels (`subquad.data.augment`)."""


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(LabelledConfig):
    """What task=classify learns: labelled sequences of up to batch.length tokens."""

    pooling: Pooling = "mean"
    """What a sequence is judged by: the mean of its vectors, its last vector, or that of a class token before it."""
    causal: bool = False
    """Whether a token sees itself and earlier ones only: the causal form of the mechanisms instead of the other."""
    augment: bool = False
    """Whether training changes each sequence at random in a way that keeps its label: image: mirrored left to right,
    shifted; pathfinder: mirrored both ways, turned by right angles; listops: the arguments of each operator in another
    order; retrieval: the two papers swapped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment and self.dataset not in AUGMENTED:
            raise ValueError(
                f"classify.augment=true: no change is known to keep the labels of dataset {self.dataset!r}; leave it "
                f"out, or choose one of {', '.join(AUGMENTED)}"
            )

    @property
    def towers(self) -> int:
        """Sequences of an example."""
        return 2 if self.dataset == "retrieval" else 1


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Config):
    """What the encoder of a classifier learns first, from the training sequences alone, without their labels."""

    kind: Literal["none", "denoise", "causal"] = "none"
    """none: nothing; denoise: the tokens that were hidden, from all others; causal: the next token, by the causal form,
    whose weights the form that classifies then takes over."""
    steps: int = 1000
    """Optimizer steps of this first phase; its warm-up is schedule.warmup, but at most a tenth of them."""
    lr: float | None = None
    """Its peak learning rate (None: optimizer.lr)."""
    mask_fraction: float = 0.15
    """Share of the tokens that denoising hides (Amos et al. 2023 hide half of the pixels of images)."""
    random_fraction: float = 0.0
    """Share of the hidden tokens that become random ones instead of the mask token."""
    joint_weight: float = 0.0
    """Weight of a denoising loss that is added to the labels' own in the second phase, which then reads sequences with
    hidden tokens (Miralles-Gonzalez et al. 2025: 1, mask_fraction 0.3, random_fraction 1/3); 0: none. Works with any
    kind, none too."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"pretrain.steps must be at least 1, got {self.steps}")
        if self.lr is not None and not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"pretrain.lr must be a positive number, got {self.lr}")
        check_hiding(self.mask_fraction, self.random_fraction, "pretrain.")
        if not (self.joint_weight >= 0 and math.isfinite(self.joint_weight)):
            raise ValueError(f"pretrain.joint_weight must be at least 0, got {self.joint_weight}")

    @property
    def effective(self) -> dict[str, Any]:
        """The settings that have an effect, by name."""
        values = {} if self.kind == "none" else {"kind": self.kind, "steps": self.steps, "lr": self.lr}
        if self.hides:
            values |= {"mask_fraction": self.mask_fraction, "random_fraction": self.random_fraction}
        return values | ({"joint_weight": self.joint_weight} if self.joint_weight > 0 else {})

    @property
    def hides(self) -> bool:
        """Whether tokens are hidden, so that the vocabulary needs a mask token."""
        return self.kind == "denoise" or self.joint_weight > 0
