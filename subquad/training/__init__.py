"""Training runs. Importing the package loads nothing heavy: torch and transformers come with `train`."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.training.config import (
    BatchConfig,
    ClassifyConfig,
    ImageConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    PretrainConfig,
    ProbeConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from subquad.training.errors import NonFiniteError
    from subquad.training.report import Report, measure, write_report
    from subquad.training.run import RunResult, train

_LAZY = {
    "NonFiniteError": "errors",
    "Report": "report",
    "RunResult": "run",
    "measure": "report",
    "train": "run",
    "write_report": "report",
}

__all__ = [
    "BatchConfig",
    "ClassifyConfig",
    "ImageConfig",
    "LoraConfig",
    "NonFiniteError",
    "OptimizerConfig",
    "ParallelConfig",
    "PretrainConfig",
    "ProbeConfig",
    "Report",
    "RunConfig",
    "RunResult",
    "ScheduleConfig",
    "TrainConfig",
    "measure",
    "train",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"subquad.training.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'subquad.training' has no attribute {name!r}; it has {', '.join(__all__)}")
