"""Measures of a model on a text or on labelled sequences. Names load on first use: `config` needs no torch."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.evaluation.config import EvalConfig

if TYPE_CHECKING:
    from subquad.evaluation._classify import ClassEvaluation, evaluate_classifier
    from subquad.evaluation._evaluate import Evaluation, PositionLoss, evaluate
    from subquad.evaluation.harness import TaskEvaluation, evaluate_tasks

_HOME = {
    "ClassEvaluation": "_classify",
    "Evaluation": "_evaluate",
    "PositionLoss": "_evaluate",
    "TaskEvaluation": "harness",
    "evaluate": "_evaluate",
    "evaluate_classifier": "_classify",
    "evaluate_tasks": "harness",
}
__all__ = [
    "ClassEvaluation",
    "EvalConfig",
    "Evaluation",
    "PositionLoss",
    "TaskEvaluation",
    "evaluate",
    "evaluate_classifier",
    "evaluate_tasks",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"subquad.evaluation.{_HOME[name]}"), name)
    raise AttributeError(f"module 'subquad.evaluation' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
