"""Learning-rate schedules as factors of the peak."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

from subquad.config import Config, check_fraction

MOST_WARMUP = 50
"""Most steps of a warm-up that follows the number of steps."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """Learning-rate schedule: a linear warm-up, then one of four shapes."""

    kind: Literal["cosine", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """Shape after the warm-up. cosine: half a cosine; wsd: constant, then linear; inverse_sqrt: sqrt(hold / step)."""
    warmup: int | None = None
    """Steps of linear warm-up (None: a tenth of all steps, at most 50)."""
    min_ratio: float = 0.1
    """Lowest learning rate after the warm-up, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Fraction of all steps in which wsd decays."""
    hold: int | None = None
    """Last step that inverse_sqrt holds at the peak (None: the end of the warm-up)."""

    def __post_init__(self) -> None:
        self.check_least("schedule", warmup=0)
        check_fraction("schedule.", min_ratio=self.min_ratio, decay_fraction=self.decay_fraction)
        self.check_least("schedule", hold=max(1, self.warmup or 0))

    def check_steps(self, steps: int | None) -> None:
        """Raise `ValueError` if the warm-up takes all `steps` (None: not known yet)."""
        if self.warmup is not None and steps is not None and self.warmup >= steps:
            raise ValueError(f"schedule.warmup must be below run.steps={steps}, got {self.warmup}; null adapts it")

    def within(self, steps: int) -> Self:
        """Return the schedule with a warm-up that ends within `steps`: a tenth of them if it is too long."""
        return self if self.warmup is None or self.warmup < steps else self.replace(warmup=steps // 10)

    def warmup_of(self, steps: int | None) -> int:
        """Return the steps of warm-up of a run of `steps` steps (None: not known yet, taken for many)."""
        if self.warmup is not None:
            return self.warmup
        return MOST_WARMUP if steps is None else min(MOST_WARMUP, steps // 10)

    def factor(self, step: int, steps: int | None) -> float:
        """Return the learning rate after `step` of `steps` steps as a fraction of the peak, in `[0, 1]`.

        The warm-up is `(step + 1) / (warmup + 1)`, so the first step is not wasted at zero. It lasts while `steps` is
        not known (None).
        """
        warmup = self.warmup_of(steps)
        if step < warmup or steps is None:
            return min(1.0, (step + 1) / (warmup + 1))
        if self.kind == "constant":
            return 1.0
        if self.kind == "inverse_sqrt":
            hold = max(1, warmup if self.hold is None else self.hold)
            return max(self.min_ratio, min(1.0, math.sqrt(hold / max(1, step))))
        if self.kind == "wsd":
            decay = max(1.0, min(self.decay_fraction * steps, float(steps - warmup)))
            done = min(1.0, max(0.0, (step - (steps - decay)) / decay))
            return 1.0 - (1.0 - self.min_ratio) * done
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
