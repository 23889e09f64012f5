"""Whole models, each with its configuration."""

from subquad.models.build import build_model
from subquad.models.classifier import Classifier
from subquad.models.config import DecoderConfig
from subquad.models.decoder import Decoder
from subquad.models.encoder import Encoder, EncoderConfig
from subquad.models.image import ImageModel, ImageModelConfig
from subquad.models.perceiver import Perceiver, PerceiverIO
from subquad.models.perceiver_ar import PerceiverAR

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
    "build_model",
]
