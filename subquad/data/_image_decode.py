"""From PNG and JPEG files to arrays. Shape letters: H rows, W columns, C channels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray


def decode(source: Path | IO[bytes], name: str) -> NDArray[np.uint8]:
    """Bytes `[H, W, C]` of a PNG or JPEG file: grey or colours; `ValueError` for damage and for other kinds."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(source) as opened:
            image = opened.convert({"1": "L", "P": "RGB"}.get(opened.mode, opened.mode))
            if image.mode not in ("L", "RGB"):
                raise ValueError(
                    f"{name} has the pixels {image.mode}; valid: 8 bits of grey (L) or of red, green, blue (RGB)"
                )
            pixels = np.array(image, np.uint8)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{name} is damaged or no image: {error}") from error
    return pixels[..., None] if pixels.ndim == 2 else pixels


def stacked(images: Iterator[tuple[str, NDArray[np.uint8]]], count: int) -> NDArray[np.uint8]:
    """Named images in one array `[count, H, W, C]`; `ValueError` for the first whose size is another."""
    pixels: NDArray[np.uint8] | None = None
    first = ""
    for row, (name, image) in enumerate(images):
        if pixels is None:
            pixels, first = np.empty((count, *image.shape), np.uint8), name
        if image.shape != pixels.shape[1:]:
            raise ValueError(
                f"{name} is {_size(image.shape)}, but {first} is {_size(pixels.shape[1:])}: all must have one size"
            )
        pixels[row] = image
    assert pixels is not None  # callers have at least one
    return pixels


def _size(shape: tuple[int, ...]) -> str:
    height, width, channels = shape
    return f"{height} x {width} x {channels} (rows x columns x channels)"
