"""The learning rate over the steps, as a factor of its peak. No torch, so the command line reads it fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from subquad.config import Config, check_fraction


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """The learning rate over the steps: a linear warm-up, then one of four shapes."""

    kind: Literal["cosine", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """cosine: half a cosine down to min_ratio; wsd: stay, then fall linearly to min_ratio over the last decay_fraction;
    inverse_sqrt: stay at the peak until hold, then fall as sqrt(hold / step), never below min_ratio; constant: stay."""
    warmup: int = 50
    """Steps of linear warm-up from zero."""
    min_ratio: float = 0.1
    """Smallest learning rate after the warm-up, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Share of all steps over which wsd falls."""
    hold: int | None = None
    """Step up to which inverse_sqrt is capped at the peak (None: the end of the warm-up)."""

    def __post_init__(self) -> None:
        self.check_least("schedule", warmup=0)
        check_fraction("schedule.", min_ratio=self.min_ratio, decay_fraction=self.decay_fraction)
        self.check_least("schedule", hold=max(1, self.warmup))

    def factor(self, step: int, steps: int) -> float:
        """The learning rate of the step after `step` steps of `steps`, over the peak: in `[0, 1]`.

        The warm-up gives `(step + 1) / (warmup + 1)`, so no step is wasted at zero.
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
