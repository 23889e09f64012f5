"""Which images to read and how to predict a pixel, apart from the code that does, so that reading it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.config import Config


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """Images as sequences of pixels, row by row."""

    path: str | None = None
    """The images: a folder of idx files (MNIST), of PNG files, an npz file, or hf:NAME for a Hugging Face dataset."""
