"""Measure a model on text, labelled sequences and images; `harness` runs tasks of lm-evaluation-harness."""

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
