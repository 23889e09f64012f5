"""Measures of a model on texts, labelled sequences or images. Names load on first use: `config` needs no torch."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.evaluation.config import EvalConfig

if TYPE_CHECKING:
    from subquad.evaluation._bag import BagOfTokens, fit_bag_of_tokens
    from subquad.evaluation._classify import ClassEvaluation, evaluate_classifier
    from subquad.evaluation._evaluate import Evaluation, PositionLoss, evaluate
    from subquad.evaluation._images import ImageEvaluation, evaluate_images
    from subquad.evaluation._positions import PositionPlan, RangeLoss, loss_by_position, plan_positions
    from subquad.evaluation._reader import Reader, train_reader
    from subquad.evaluation.harness import TaskEvaluation, evaluate_tasks

_HOME = {
    "BagOfTokens": "_bag",
    "ClassEvaluation": "_classify",
    "Evaluation": "_evaluate",
    "ImageEvaluation": "_images",
    "PositionLoss": "_evaluate",
    "PositionPlan": "_positions",
    "RangeLoss": "_positions",
    "Reader": "_reader",
    "TaskEvaluation": "harness",
    "evaluate": "_evaluate",
    "evaluate_classifier": "_classify",
    "evaluate_images": "_images",
    "evaluate_tasks": "harness",
    "fit_bag_of_tokens": "_bag",
    "loss_by_position": "_positions",
    "plan_positions": "_positions",
    "train_reader": "_reader",
}
__all__ = [
    "BagOfTokens",
    "ClassEvaluation",
    "EvalConfig",
    "Evaluation",
    "ImageEvaluation",
    "PositionLoss",
    "PositionPlan",
    "RangeLoss",
    "Reader",
    "TaskEvaluation",
    "evaluate",
    "evaluate_classifier",
    "evaluate_images",
    "evaluate_tasks",
    "fit_bag_of_tokens",
    "loss_by_position",
    "plan_positions",
    "train_reader",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"subquad.evaluation.{_HOME[name]}"), name)
    raise AttributeError(f"module 'subquad.evaluation' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
