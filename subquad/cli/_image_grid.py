"""Images side by side as one PNG. Shape letters: H rows, W columns, C channels of an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
OCCLUDED = (70, 90, 170)
"""The colour of occluded pixels."""
GAP, BACKGROUND = 2, (128, 128, 128)
CAPTION = 14
"""Height of the line above the columns."""
LEAST = 56
"""Pixels of the picture that an image's longer side has at least: small images are shown larger."""


def grid(rows: Sequence[Sequence[Pixels]], captions: Sequence[str] = ()) -> Image:
    """A picture of rows of images `[H, W, C]` of one size, each pixel a square; `captions` stand above the columns."""
    from PIL import Image, ImageDraw

    height, width, _ = rows[0][0].shape
    scale = max(1, math.ceil(LEAST / max(height, width)))
    columns = max(len(row) for row in rows)
    cell_y, cell_x = height * scale + GAP, width * scale + GAP
    top = GAP + (CAPTION if captions else 0)
    canvas = np.full((top + len(rows) * cell_y, GAP + columns * cell_x, 3), BACKGROUND, np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            shown = np.broadcast_to(image, (height, width, 3)).repeat(scale, 0).repeat(scale, 1)
            y, x = top + i * cell_y, GAP + j * cell_x
            canvas[y : y + height * scale, x : x + width * scale] = shown
    picture = Image.fromarray(canvas)
    draw = ImageDraw.Draw(picture)
    for j, caption in enumerate(captions):
        draw.text((GAP + j * cell_x, 1), caption, fill=(255, 255, 255))
    return picture


def square(images: Sequence[Pixels]) -> list[list[Pixels]]:
    """The images in rows, about as many as columns."""
    columns = math.ceil(math.sqrt(len(images)))
    return [list(images[first : first + columns]) for first in range(0, len(images), columns)]


def occluded(image: Pixels, mask_HW: NDArray[np.bool_]) -> Pixels:
    """The image in colours, with the occluded pixels painted."""
    shown = np.broadcast_to(image, (*image.shape[:2], 3)).copy()
    shown[mask_HW] = OCCLUDED
    return shown


def save(picture: Image, file: str | Path) -> None:
    """Write a PNG."""
    picture.save(file, format="PNG")
