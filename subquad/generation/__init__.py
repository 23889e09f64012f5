"""Sampling with a state that is carried from token to token. Names load on first use: `config` needs no torch."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.generation.config import SamplingConfig

if TYPE_CHECKING:
    from subquad.generation._generate import Generation, generate
    from subquad.generation.batch import BatchDecoder, Request, generate_batch
    from subquad.generation.beam import Beam, beam_search
    from subquad.generation.images import DrawnImages, complete_images, generate_images
    from subquad.generation.stop import StopStrings
    from subquad.generation.stream import TextStream

__all__ = [
    "BatchDecoder",
    "Beam",
    "DrawnImages",
    "Generation",
    "Request",
    "SamplingConfig",
    "StopStrings",
    "TextStream",
    "beam_search",
    "complete_images",
    "generate",
    "generate_batch",
    "generate_images",
]
_MODULES = {
    "BatchDecoder": "batch",
    "Beam": "beam",
    "DrawnImages": "images",
    "Generation": "_generate",
    "Request": "batch",
    "StopStrings": "stop",
    "TextStream": "stream",
    "beam_search": "beam",
    "complete_images": "images",
    "generate": "_generate",
    "generate_batch": "batch",
    "generate_images": "images",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"subquad.generation.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'subquad.generation' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
