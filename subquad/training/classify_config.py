"""What a classifier learns, and what it learns before: read by the command line without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subquad.config import Config
from subquad.data.labelled_config import LabelledConfig
from subquad.models.encoder_config import Pooling


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(LabelledConfig):
    """What task=classify learns: labelled sequences of up to batch.length tokens."""

    pooling: Pooling = "mean"
    """What a sequence is judged by: the mean of its vectors, its last vector, or that of a class token before it."""


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Config):
    """What the encoder of a classifier learns first, from the training sequences alone, without their labels."""

    kind: Literal["none", "denoise", "causal"] = "none"
    """none: nothing; denoise: the tokens that were hidden, from all others; causal: the next token."""
