"""Whole models. `DecoderConfig` loads without torch; `Decoder` brings it."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.models.config import DecoderConfig

if TYPE_CHECKING:
    from subquad.models.decoder import Decoder

__all__ = ["Decoder", "DecoderConfig"]


def __getattr__(name: str) -> Any:
    if name == "Decoder":
        return importlib.import_module("subquad.models.decoder").Decoder
    raise AttributeError(f"module 'subquad.models' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
