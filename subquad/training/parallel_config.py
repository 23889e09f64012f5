"""How a run is spread over processes: read by the command line without loading torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from subquad.config import Config
from subquad.training.schedule import at_least


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """What the processes that `torchrun` starts share. One step sees data processes x batch.size x batch.accumulation
    windows, where the data processes are all processes divided by `context`."""

    context: int = 1
    """Processes that share each window, of which every one holds a part of the tokens (task=language)."""
    shard: bool = False
    """Whether every process keeps a part of the weights, gradients and optimizer states (FSDP2), not all of them."""
    timeout: float = 600.0
    """Seconds that a process waits for the others before it gives up."""

    def __post_init__(self) -> None:
        at_least("parallel.context", self.context, 1)
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"parallel.timeout must be a positive number of seconds, got {self.timeout}")
