"""subquad: sub-quadratic attention for PyTorch that can be trusted, trained and shipped.

Importing the package loads nothing heavy: torch comes with the first name that needs it.
"""

from typing import TYPE_CHECKING

from subquad.lazy import facade
from subquad.version import __version__

if TYPE_CHECKING:
    from subquad import (
        adaptation,
        attention,
        data,
        evaluation,
        generation,
        hf,
        models,
        ops,
        parallel,
        testing,
        training,
    )
    from subquad.evaluation.audit import audit
    from subquad.memory import keep_freed_memory
    from subquad.state import State


__all__ = [
    "State",
    "__version__",
    "adaptation",
    "attention",
    "audit",
    "data",
    "evaluation",
    "generation",
    "hf",
    "keep_freed_memory",
    "models",
    "ops",
    "parallel",
    "testing",
    "training",
]

__getattr__ = facade(
    __name__,
    {name: name for name in __all__ if name != "__version__"}
    | {"State": "state", "audit": "subquad.evaluation.audit", "keep_freed_memory": "memory"},
)


def __dir__() -> list[str]:
    return __all__
