"""Read image data sets as sequences of grey levels, row by row: labelled images, and the release of Pathfinder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from subquad.data.config import LabelledConfig
from subquad.data.files import Progress
from subquad.data.image_files import decode
from subquad.data.images import ImageSet, load_images
from subquad.data.lra.pathfinder import CLASSES, VOCAB_SIZE
from subquad.data.lra.store import Contents, Labelled, choose, counted, is_label, pieces
from subquad.data.packed import load_array

HELD_OUT = 10
"""One training image in this many goes to the validation part."""
PIECE = 1000
"""Images yielded at once."""


def grey_images(config: LabelledConfig, report: Progress) -> Contents:
    """Read the images of `subquad.data.images.load_images` and convert them to grey.

    A tenth of each class's training images is the validation part, the same for every seed; with validation=test it is
    the test part.
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
    tested = _pieces(test, np.arange(len(_labels(test))))
    parts = {"train": _pieces(train, everything), "held_out": held_out, "test": tested}
    return Contents(dict(parts), train.classes, 1 << 8)


def grey(pixels: np.ndarray, /) -> np.ndarray:
    """Return `0.299 R + 0.587 G + 0.114 B` (ITU-R BT.601), rounded: `[N, H, W, C]` to `[N, H, W]`, uint8.

    Computed in units of 1/65,536, as for Pillow's mode L. A single channel is returned unchanged; a fourth is ignored.
    """
    if pixels.shape[-1] < 3:
        return pixels[..., 0]
    red, green, blue = (pixels[..., i].astype(np.uint32) for i in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16).astype(np.uint8)


def _labels(images: ImageSet) -> np.ndarray:
    assert images.labels is not None  # `load_images(labels=True)`
    return images.labels


def _pieces(images: ImageSet, chosen: np.ndarray) -> Iterator[Labelled]:
    for start in range(0, len(chosen), PIECE):
        some = chosen[start : start + PIECE]
        tokens = grey(images.pixels[some]).reshape(len(some), -1)
        yield Labelled(tokens.ravel(), np.full(len(some), tokens.shape[1]), _labels(images)[some])


FOLDERS = {
    "hard": "curv_contour_length_14",
    "intermediate": "curv_contour_length_9",
    "easy": "curv_baseline",
}
COLUMNS = (0, 1, 3)
"""Columns of the metadata that hold an image's folder, name and label."""


class _Row(NamedTuple):
    where: str
    file: Path
    label: int


def pathfinder_release(config: LabelledConfig, report: Progress) -> Contents:
    """Read images in the order of the metadata, 80 : 10 : 10 %, leaving empty files out, as in Long Range Arena."""
    root = Path(config.path or "").expanduser()
    folder = root / FOLDERS[config.pathfinder.difficulty]
    if not (folder / "metadata").is_dir():
        folder = root
    listed = sorted((folder / "metadata").glob("*.npy"), key=lambda file: (len(file.stem), file.stem))
    if not listed:
        raise FileNotFoundError(
            f"{root} holds no metadata/*.npy or {FOLDERS[config.pathfinder.difficulty]}/metadata/*.npy"
        )
    rows = [row for file in listed for row in _rows(folder, file) if row.file.stat().st_size]
    first, second = (len(rows) * tenths // 10 for tenths in (8, 9))
    size = int(config.dataset.removeprefix("pathfinder"))
    sides = {"train": rows[:first], "held_out": rows[first:second], "test": rows[second:]}
    parts = {part: pieces(_images(some, size, part, report)) for part, some in sides.items()}
    return Contents(dict(parts), CLASSES, VOCAB_SIZE)


def _rows(folder: Path, listed: Path) -> Iterator[_Row]:
    """Yield the images named by a metadata file: text with a line for each, or an array of strings."""
    raw = listed.read_bytes()
    if raw.startswith(b"\x93NUMPY"):
        array = load_array(raw, listed)
        if array.ndim != 2:
            raise ValueError(f"{listed} must be a table with a row for each image, got an array of shape {array.shape}")
        table = [
            [cell.decode("utf-8", "replace") if isinstance(cell, bytes) else str(cell) for cell in line]
            for line in array
        ]
    else:
        table = [line.split() for line in raw.decode("utf-8", "replace").splitlines() if line.strip()]
    for number, line in enumerate(table, 1):
        where = f"{listed}, line {number}"
        if len(line) <= max(COLUMNS):
            raise ValueError(f"{where} has {len(line)} columns, but needs folder, name, number and label")
        path, name, label = (line[i] for i in COLUMNS)
        if Path(path, name).is_absolute() or ".." in Path(path, name).parts:
            raise ValueError(f"{where} names {path}/{name}, which is outside of {folder}")
        if not (folder / path / name).is_file():
            raise FileNotFoundError(f"{where} names {folder / path / name}, which does not exist")
        yield _Row(where, folder / path / name, is_label(where, label, ("0", "1")))


def _images(rows: list[_Row], size: int, part: str, report: Progress) -> Iterator[tuple[np.ndarray, int]]:
    for row in counted(rows, f"reading {part}", report, len(rows)):
        pixels = decode(row.file, str(row.file), "L")[..., 0]
        if pixels.shape != (size, size):
            raise ValueError(f"{row.file} has {pixels.shape[1]} x {pixels.shape[0]} pixels, not {size} x {size}")
        yield pixels.ravel(), row.label
