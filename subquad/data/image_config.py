"""Which images to read and how to predict a pixel, apart from the code that does, so that reading it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subquad.config import Config


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """Images as sequences of pixels, row by row."""

    path: str | None = None
    """The images: a folder of idx files (MNIST), of PNG files, an npz file, or hf:NAME for a Hugging Face dataset."""
    output: Literal["categorical", "logistic"] = "categorical"
    """What a pixel is drawn from: 256 probabilities, or a mixture of logistic distributions cut into 256 bins."""
    mixtures: int = 10
    """Distributions in the mixture (output=logistic)."""
    axes: bool = False
    """Whether to add vectors learned for the row, the column and the channel of the pixel that is predicted."""
    near: int = 0
    """Rows and columns around the pixel to predict whose known pixels go into its input beside the one before, by a
    masked convolution; 0: the pixel before alone."""
    test_images: int = 1000
    """Held-out images that are measured at the end, evenly spread (all where there are fewer)."""
    samples: int = 100
    """Images that are generated at the end, as a picture; 0: none."""

    def __post_init__(self) -> None:
        for name, least in (("mixtures", 1), ("near", 0), ("test_images", 1), ("samples", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"image.{name} must be at least {least}, got {getattr(self, name)}")
