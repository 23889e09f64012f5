"""Settings of `python -m experiments.lora_mnist`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from subquad.config import Config

WIDTHS = (784, 64, 64, 10)
"""Layer widths of the report's network: the only ones with three layers that fit all of its counts."""
PER_RANK = sum(a + b for a, b in pairwise(WIDTHS))
"""Trained parameters per rank: 848 + 128 + 74 = 1050."""
NET_PARAMETERS = sum(a * b + b for a, b in pairwise(WIDTHS))
SIDE, CLASSES = 28, 10
VARIANTS = ("quantised", "rotated", "inverted")
"""Image sets that a base is adapted to."""
SETS = ("plain", *VARIANTS)
ARMS = ("base", "full", "lora", "scratch", "product")
"""base: train all weights from scratch; full: all weights of a base; lora: factors added to a base; scratch: factors
added to frozen random weights; product: only factors, W = B A."""


def default_rates() -> dict[str, float]:
    """Return the peak learning rates chosen by --tune, except for the base, whose second best is used.

    Their accuracies on held-out images are 97.7 and 97.9 %.
    """
    return {"base": 1e-1, "full": 3e-2, "lora": 1e-2, "scratch": 3e-2, "product": 3e-2}


@dataclass(frozen=True, kw_only=True)
class MnistConfig(Config):
    """The report's LoRA experiment on MNIST: a net of 784-64-64-10, three variants of the images, ranks 1 to 64."""

    path: str | None = None
    """Folder with MNIST's four idx files, plain or compressed, or another layout that `load_images` reads."""
    seeds: int = 5
    """Number of repetitions, each with its own initial weights and order of the images."""
    ranks: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    """Ranks of the factors; the scale s = alpha / rank is 1."""
    epochs: int = 5
    """Epochs of every arm except the base."""
    base_epochs: int = 10
    """Epochs of the fully trained base."""
    batch: int = 256
    """Images per step."""
    warmup: int = 200
    """Steps in which the learning rate rises."""
    levels: int = 2
    """Grey levels of the quantised images, evenly from black to white; the report does not say how many."""
    turn: Literal["left", "right"] = "left"
    """Direction in which the rotated images are turned by 90 degrees; the report does not say."""
    band: list[float] = field(default_factory=lambda: [92.9, 93.5])
    """Test accuracy in percent, from and to, at which the stopped base is taken."""
    look_every: int = 5
    """Steps between measurements of the test accuracy, until the stopped base is found."""
    rates: dict[str, float] = field(default_factory=default_rates)
    """Peak learning rate of each arm, the same for all ranks; it rises in `warmup` steps and falls linearly to zero."""
    tune_held_out: int = 10000
    """Number of last training images on which --tune measures instead of the test images."""
    processes: int = 2
    """Processes, with one thread each."""

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "base_epochs", "batch", "look_every", "processes", "tune_held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0, got {self.warmup}")
        if not self.ranks or min(self.ranks) < 1 or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"ranks must be distinct and at least 1, got {self.ranks}")
        if not 2 <= self.levels <= 256:
            raise ValueError(f"levels must be between 2 and 256, got {self.levels}")
        if len(self.band) != 2 or not 0 <= self.band[0] <= self.band[1] <= 100:
            raise ValueError(f"band must be two percentages, the lower one first, got {self.band}")
        for arm in ARMS:
            if not self.rates.get(arm, 0) > 0:
                raise ValueError(f"rates.{arm} must be above 0, got {self.rates.get(arm)}")
        if unknown := self.rates.keys() - set(ARMS):
            raise ValueError(f"rates has no arm {sorted(unknown)[0]!r}; valid: {', '.join(ARMS)}")

    def science(self) -> dict[str, object]:
        """Return the settings that the results depend on; runs with equal ones share their results."""
        free = ("path", "seeds", "processes", "tune_held_out")
        return {name: value for name, value in self.to_dict().items() if name not in free}
