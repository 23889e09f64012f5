"""Training runs. `train`, `RunResult` and `runs` load on first use, because they need Accelerate and transformers."""

from typing import TYPE_CHECKING

from subquad.lazy import facade
from subquad.training.config import (
    BatchConfig,
    ClassifyConfig,
    LoraConfig,
    OptimizerConfig,
    PretrainConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from subquad.training import runs as runs
    from subquad.training.run import RunResult, train

__all__ = [
    "BatchConfig",
    "ClassifyConfig",
    "LoraConfig",
    "OptimizerConfig",
    "PretrainConfig",
    "RunConfig",
    "RunResult",
    "ScheduleConfig",
    "TrainConfig",
    "train",
]
__getattr__ = facade(__name__, {"RunResult": "run", "runs": "runs", "train": "run"})
__dir__ = __all__.copy
