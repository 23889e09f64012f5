"""Experiments that re-run the papers' claims: one folder each, a recipe, the paper's figures, ours, and a verdict.

An experiment's `experiment.py` imports its tools from here. Importing the package loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.reproduction.recipe import Arm, Recipe, Scale
from subquad.reproduction.units import Unit

if TYPE_CHECKING:
    from subquad.reproduction.claims import Verdict
    from subquad.reproduction.train import train_unit

_HOME = {"Verdict": "claims", "train_unit": "train"}
__all__ = ["Arm", "Recipe", "Scale", "Unit", "Verdict", "train_unit"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"subquad.reproduction.{_HOME[name]}"), name)
    raise AttributeError(f"module 'subquad.reproduction' has no attribute {name!r}; it has {', '.join(__all__)}")
