"""Benchmarks of operators, models and decoding: times, memory, and how near they come to what the machine can do.

The configurations load without torch; what measures brings it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.bench.config import DecodeConfig, ModelConfig, OpsConfig

if TYPE_CHECKING:
    from subquad.bench._report import Report
    from subquad.bench.decode import measure_decode
    from subquad.bench.model import measure_model
    from subquad.bench.ops import measure_ops

_HOME = {"Report": "_report", "measure_decode": "decode", "measure_model": "model", "measure_ops": "ops"}
__all__ = ["DecodeConfig", "ModelConfig", "OpsConfig", "Report", "measure_decode", "measure_model", "measure_ops"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"subquad.bench.{_HOME[name]}"), name)
    raise AttributeError(f"module 'subquad.bench' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
