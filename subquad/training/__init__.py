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
from subquad.training.extend_config import ExtendConfig

if TYPE_CHECKING:
    from subquad.training import adapters as adapters
    from subquad.training import runs as runs
    from subquad.training.errors import NonFiniteError
    from subquad.training.extension import extend, train_control
    from subquad.training.report import Report, measure, write_report
    from subquad.training.run import RunResult, train

__all__ = [
    "BatchConfig",
    "ClassifyConfig",
    "ExtendConfig",
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
    "extend",
    "measure",
    "train",
    "train_control",
    "write_report",
]
__getattr__ = facade(
    __name__,
    {
        "NonFiniteError": "errors",
        "Report": "report",
        "RunResult": "run",
        "adapters": "adapters",
        "extend": "extension",
        "measure": "report",
        "runs": "runs",
        "train": "run",
        "train_control": "extension",
        "write_report": "report",
    },
)
