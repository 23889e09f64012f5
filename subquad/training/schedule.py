"""Learning-rate schedules as factors of the peak."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from subquad.config import Config, check_fraction


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """Learning-rate schedule: a linear warm-up, then one of four shapes."""

    kind: Literal["cosine", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """Shape after the warm-up. cosine: half a cosine; wsd: constant, then linear; inverse_sqrt: sqrt(hold / step)."""
    warmup: int = 50
    """Steps of linear warm-up."""
    min_ratio: float = 0.1
    """Lowest learning rate after the warm-up, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Fraction of all steps in which wsd decays."""
    hold: int | None = None
    """Last step that inverse_sqrt holds at the peak (None: the end of the warm-up)."""

    def __post_init__(self) -> None:
        self.check_least("schedule", warmup=0)
        check_fraction("schedule.", min_ratio=self.min_ratio, decay_fraction=self.decay_fraction)
        self.check_least("schedule", hold=max(1, self.warmup))

    def factor(self, step: int, steps: int) -> float:
        """Return the learning rate after `step` of `steps` steps as a fraction of the peak, in `[0, 1]`.

        The warm-up is `(step + 1) / (warmup + 1)`, so the first step is not wasted at zero.
        """
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.kind == "constant":
            return 1.0
        if self.kind == "inverse_sqrt":
            hold = max(1, self.warmup if self.hold is None else self.hold)
            return max(self.min_ratio, min(1.0, math.sqrt(hold / max(1, step))))
        if self.kind == "wsd":
            decay = max(1.0, min(self.decay_fraction * steps, float(steps - self.warmup)))
            done = min(1.0, max(0.0, (step - (steps - decay)) / decay))
            return 1.0 - (1.0 - self.min_ratio) * done
        done = min(1.0, (step - self.warmup) / max(1, steps - self.warmup))
        return self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
