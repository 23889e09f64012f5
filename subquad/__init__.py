"""subquad: sub-quadratic attention for PyTorch that can be trusted, trained and shipped.

Importing the package loads nothing heavy: torch comes with the first name that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subquad import attention, data, evaluation, generation, hf, models, ops, parallel, testing, training
    from subquad.evaluation.audit import audit
    from subquad.state import State

__version__ = "0.1.0"
__all__ = [
    "State",
    "__version__",
    "attention",
    "audit",
    "data",
    "evaluation",
    "generation",
    "hf",
    "models",
    "ops",
    "parallel",
    "testing",
    "training",
]


def __getattr__(name: str) -> Any:
    if name == "State":
        return importlib.import_module("subquad.state").State
    if name == "audit":
        return importlib.import_module("subquad.evaluation.audit").audit
    if name in __all__:
        return importlib.import_module(f"subquad.{name}")
    raise AttributeError(f"module 'subquad' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
