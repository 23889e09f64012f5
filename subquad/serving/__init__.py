"""The OpenAI-compatible server. Names load on first use: `ServeConfig` needs neither torch nor FastAPI."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.serving.config import ServeConfig

if TYPE_CHECKING:
    from subquad.serving.app import make_app
    from subquad.serving.engine import Engine
    from subquad.serving.texts import Texts

__all__ = ["Engine", "ServeConfig", "Texts", "make_app"]
_MODULES = {"Engine": "engine", "Texts": "texts", "make_app": "app"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"subquad.serving.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'subquad.serving' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
