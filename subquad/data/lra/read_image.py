"""Images as sequences of grey levels, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from subquad.data.images import ImageSet, load_images
from subquad.data.lra._files import Contents
from subquad.data.lra.sequences import choose
from subquad.data.lra.store import Labelled

if TYPE_CHECKING:
    from subquad.data.files import Progress
    from subquad.data.labelled_config import LabelledConfig

HELD_OUT = 10
"""One of so many training images is measured while training."""
PIECE = 1000
"""Images that are handed on at once."""


def contents(config: LabelledConfig, report: Progress) -> Contents:
    """The images of `subquad.data.images.load_images`, grey.

    A tenth of the training images is held out, of each class its share, the same at every seed: files may be sorted by
    class. With validation=test the test images are measured while training too.
    """
    report("reading the images", 0, 1)
    sets = load_images(config.path or "", labels=True)
    train, test = sets["train"], sets["test"]
    everything = np.arange(len(_labels(train)))
    if config.validation == "apart":
        count = len(everything) // HELD_OUT
        if not count:
            raise ValueError(f"{config.path}: {len(everything)} training images are too few to hold out a tenth")
        out = choose(_labels(train), count, 0)
        held_out = _pieces(train, out)
        everything = np.setdiff1d(everything, out)
    else:
        held_out = _pieces(test, np.arange(len(_labels(test))))
    parts = {
        "train": _pieces(train, everything),
        "held_out": held_out,
        "test": _pieces(test, np.arange(len(_labels(test)))),
    }
    return Contents(dict(parts), train.classes, 1 << 8)


def grey(pixels: np.ndarray, /) -> np.ndarray:
    """`0.299 R + 0.587 G + 0.114 B` (ITU-R BT.601), rounded: `[N, H, W, C]` to `[N, H, W]`, uint8.

    In whole numbers of 1/65,536, as Pillow's mode L is computed. One channel stays as it is; a fourth is not read.
    """
    if pixels.shape[-1] < 3:
        return pixels[..., 0]
    red, green, blue = (pixels[..., i].astype(np.uint32) for i in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16).astype(np.uint8)


def _labels(images: ImageSet) -> np.ndarray:
    assert images.labels is not None  # asked for
    return images.labels


def _pieces(images: ImageSet, chosen: np.ndarray) -> Iterator[Labelled]:
    for start in range(0, len(chosen), PIECE):
        some = chosen[start : start + PIECE]
        tokens = grey(images.pixels[some]).reshape(len(some), -1)
        yield Labelled(tokens.ravel(), np.full(len(some), tokens.shape[1]), _labels(images)[some])
