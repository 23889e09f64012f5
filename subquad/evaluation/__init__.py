"""Measure a model on text, labelled sequences and images; `harness` runs tasks of lm-evaluation-harness."""

from typing import TYPE_CHECKING

from subquad.lazy import facade

if TYPE_CHECKING:
    from subquad.evaluation.classes import ClassEvaluation, evaluate_classifier
    from subquad.evaluation.images import ImageEvaluation, evaluate_images
    from subquad.evaluation.text import Evaluation, evaluate

__all__ = [
    "ClassEvaluation",
    "Evaluation",
    "ImageEvaluation",
    "evaluate",
    "evaluate_classifier",
    "evaluate_images",
]

# Of these only what evaluates images needs an extra.
__getattr__ = facade(
    __name__,
    {
        "ClassEvaluation": "classes",
        "Evaluation": "text",
        "ImageEvaluation": "images",
        "evaluate": "text",
        "evaluate_classifier": "classes",
        "evaluate_images": "images",
    },
)
__dir__ = __all__.copy
