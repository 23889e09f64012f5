"""Full attention replaced by a sub-quadratic mechanism in a trained model. Names load on first use: `config` needs no
torch."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.conversion.config import ConvertConfig

if TYPE_CHECKING:
    from subquad.conversion.replace import Replacement, replace_attention, replaced_layers
    from subquad.conversion.run import convert
    from subquad.conversion.transfer import attention_errors

_HOME = {
    "Replacement": "replace",
    "attention_errors": "transfer",
    "convert": "run",
    "replace_attention": "replace",
    "replaced_layers": "replace",
}
__all__ = ["ConvertConfig", "Replacement", "attention_errors", "convert", "replace_attention", "replaced_layers"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"subquad.conversion.{_HOME[name]}"), name)
    raise AttributeError(f"module 'subquad.conversion' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
