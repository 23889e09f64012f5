"""Training runs. Importing the package loads nothing heavy: torch and transformers come with `train`."""

from typing import TYPE_CHECKING

from subquad.lazy import facade
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
    from subquad.training import runs as runs
    from subquad.training.errors import NonFiniteError
    from subquad.training.report import Report, measure, write_report
    from subquad.training.run import RunResult, train

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
__getattr__ = facade(
    __name__,
    {
        "NonFiniteError": "errors",
        "Report": "report",
        "RunResult": "run",
        "measure": "report",
        "runs": "runs",
        "train": "run",
        "write_report": "report",
    },
)
