"""Measures of a model on a text. Names load on first use: `config` needs no torch."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.evaluation.config import EvalConfig

if TYPE_CHECKING:
    from subquad.evaluation._evaluate import Evaluation, PositionLoss, evaluate

_LAZY = ("Evaluation", "PositionLoss", "evaluate")
__all__ = ["EvalConfig", "Evaluation", "PositionLoss", "evaluate"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module("subquad.evaluation._evaluate"), name)
    raise AttributeError(f"module 'subquad.evaluation' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
