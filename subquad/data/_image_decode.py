"""From PNG and JPEG files to arrays. Shape letters: H rows, W columns, C channels."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

MOST_PIXELS = 1 << 26
"""Of an image: a file of a few kilobytes can unpack to billions."""


def decode(source: Path | IO[bytes], name: str, mode: str | None = None) -> NDArray[np.uint8]:
    """Bytes `[H, W, C]` of a PNG or JPEG file: grey or colours, or as Pillow's `mode` has it.

    Raises `ValueError` for damage, for other kinds (Pillow would start other programs for some), and for more than
    `MOST_PIXELS`.
    """
    from PIL import Image

    stream: Path | IO[bytes] = io.BytesIO(source.read_bytes()) if isinstance(source, Path) else source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own, of what is damaged and refused below
            with Image.open(stream, formats=("PNG", "JPEG")) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise ValueError(f"{opened.width} x {opened.height} pixels are more than {MOST_PIXELS:,}")
                image = opened.convert(mode or {"1": "L", "P": "RGB"}.get(opened.mode, opened.mode))
    except Exception as error:  # Pillow raises what its decoder happens to stumble over
        raise ValueError(f"{name} is damaged or no image: {error}") from error
    if image.mode not in ("L", "RGB"):
        raise ValueError(f"{name} has the pixels {image.mode}; valid: 8 bits of grey (L) or of red, green, blue (RGB)")
    pixels = np.array(image, np.uint8)
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
