"""An audit of a causal language model: does what it computes now depend on what it may not know. See `audit`.

Names load on first use: `config` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.evaluation.audit.config import AuditConfig

if TYPE_CHECKING:
    from subquad.evaluation.audit._audit import audit, replay
    from subquad.evaluation.audit.adapter import Adapter
    from subquad.evaluation.audit.report import AuditReport, Check, Replayed

_HOME = {
    "Adapter": "adapter",
    "AuditReport": "report",
    "Check": "report",
    "Replayed": "report",
    "audit": "_audit",
    "replay": "_audit",
}
__all__ = ["Adapter", "AuditConfig", "AuditReport", "Check", "Replayed", "audit", "replay"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"subquad.evaluation.audit.{_HOME[name]}"), name)
    raise AttributeError(f"module 'subquad.evaluation.audit' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
