"""Whole models. The configurations load without torch; the models bring it."""

import importlib
from typing import TYPE_CHECKING, Any

from subquad.models.config import DecoderConfig
from subquad.models.encoder_config import EncoderConfig
from subquad.models.image_config import ImageModelConfig

if TYPE_CHECKING:
    from subquad.models.classifier import Classifier
    from subquad.models.decoder import Decoder
    from subquad.models.encoder import Encoder
    from subquad.models.image import ImageModel
    from subquad.models.perceiver import PerceiverAR
    from subquad.models.perceiver_io import Perceiver, PerceiverIO

_HOME = {
    "Classifier": "classifier",
    "Decoder": "decoder",
    "Encoder": "encoder",
    "ImageModel": "image",
    "Perceiver": "perceiver_io",
    "PerceiverAR": "perceiver",
    "PerceiverIO": "perceiver_io",
}
__all__ = [
    "Classifier",
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "ImageModel",
    "ImageModelConfig",
    "Perceiver",
    "PerceiverAR",
    "PerceiverIO",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"subquad.models.{_HOME[name]}"), name)
    raise AttributeError(f"module 'subquad.models' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
