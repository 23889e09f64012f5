"""Masks of the occluded pixels of an image. Shape letters: H rows, W columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from subquad.config import suggest
from subquad.data.image_files import decode
from subquad.data.packed import load_array

KINDS = ("bottom", "center", "left", "random", "right", "top")
FORMS = "bottom, top, left, right, center or random with a fraction, as bottom:0.5, or a mask file (.png, .npy)"


def occlusion(asked: str, height: int, width: int, *, seed: int = 0) -> NDArray[np.bool_]:
    """Return the mask `[H, W]` that the text `asked` describes, True where occluded.

    - bottom:F, top:F, left:F, right:F: the fraction F of the rows or columns, at that side;
    - center:F: a rectangle in the middle, with the fraction F of the rows and of the columns;
    - random:F: the fraction F of the pixels, drawn by `seed`;
    - NAME.png, white (128 and above) where occluded; NAME.npy, booleans or zeros and ones.

    Raises `FileNotFoundError` for a missing file, and `ValueError` for any other form, for a mask of another size, and
    for a mask that occludes nothing.
    """
    kind, _, number = asked.partition(":")
    if asked.endswith((".png", ".npy")):
        mask_HW = _file(Path(asked), height, width)
        if not mask_HW.any():
            raise ValueError(f"{asked} occludes nothing: no pixel is white or True")
        return mask_HW
    if kind not in KINDS:
        raise ValueError(f"unknown occlusion {asked!r}; {suggest(kind, KINDS)}; or a mask file (.png, .npy)")
    try:
        fraction = float(number)
    except ValueError:
        raise ValueError(f"an occlusion is {FORMS}, got {asked!r}") from None
    if not 0 < fraction <= 1:
        raise ValueError(f"the fraction of an occlusion must be above 0 and at most 1, got {asked!r}")
    mask_HW = np.zeros((height, width), np.bool_)
    if kind == "random":
        count = round(fraction * mask_HW.size)
        mask_HW.flat[np.random.default_rng(seed).permutation(mask_HW.size)[:count]] = True
    else:
        mask_HW[_slices(kind, fraction, height, width)] = True
    if not mask_HW.any():
        raise ValueError(f"{asked!r} occludes no pixel of {height} x {width}: the fraction is too small")
    return mask_HW


def _slices(kind: str, fraction: float, height: int, width: int) -> tuple[slice, slice]:
    """Return the occluded rows and columns."""
    rows, columns = round(fraction * height), round(fraction * width)
    top, left = (height - rows) // 2, (width - columns) // 2
    everything = slice(None)
    return {
        "top": (slice(0, rows), everything),
        "bottom": (slice(height - rows, height), everything),
        "left": (everything, slice(0, columns)),
        "right": (everything, slice(width - columns, width)),
        "center": (slice(top, top + rows), slice(left, left + columns)),
    }[kind]


def _file(file: Path, height: int, width: int) -> NDArray[np.bool_]:
    if not file.is_file():
        raise FileNotFoundError(f"there is no mask file {file}")
    if file.suffix == ".png":
        mask_HW = decode(file, str(file)).max(-1) >= 128
    else:
        array = load_array(file.read_bytes(), file)
        if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
            raise ValueError(f"{file} must hold booleans or zeros and ones, got {array.dtype}")
        mask_HW = array.astype(np.bool_)
    if mask_HW.shape != (height, width):
        raise ValueError(
            f"{file} is a mask of {' x '.join(map(str, mask_HW.shape))}, but the images are {height} x {width} (rows x "
            "columns)"
        )
    return mask_HW
