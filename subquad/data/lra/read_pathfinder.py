"""Pathfinder as Long Range Arena has released it: curv_contour_length_14/imgs/N/*.png and metadata/N.npy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from subquad.data._arrays import load_array
from subquad.data._image_decode import decode
from subquad.data.lra._files import Contents, is_label, pieces
from subquad.data.lra.pathfinder import CLASSES, VOCAB_SIZE

if TYPE_CHECKING:
    from subquad.data.files import Progress
    from subquad.data.labelled_config import LabelledConfig

FOLDERS = {
    "hard": "curv_contour_length_14",
    "intermediate": "curv_contour_length_9",
    "easy": "curv_baseline",
}
COLUMNS = (0, 1, 3)
"""Of a line of the metadata: the folder, the name and the label of an image."""


class _Row(NamedTuple):
    where: str
    file: Path
    label: int


def contents(config: LabelledConfig, report: Progress) -> Contents:
    """Images in the order of the metadata: the first 80 % are learned from, then 10 % and 10 %.

    Files that are empty are left out, as Long Range Arena does.
    """
    root = Path(config.path or "").expanduser()
    folder = root / FOLDERS[config.pathfinder.difficulty]
    if not (folder / "metadata").is_dir():
        folder = root
    listed = sorted((folder / "metadata").glob("*.npy"), key=lambda file: (len(file.stem), file.stem))
    if not listed:
        raise FileNotFoundError(
            f"there is no metadata/*.npy in {root} nor in {root / FOLDERS[config.pathfinder.difficulty]}"
        )
    rows = [row for file in listed for row in _rows(folder, file) if row.file.stat().st_size]
    first, second = (len(rows) * tenths // 10 for tenths in (8, 9))
    size = int(config.dataset.removeprefix("pathfinder"))
    sides = {"train": rows[:first], "held_out": rows[first:second], "test": rows[second:]}
    parts = {part: pieces(_images(some, size, part, report)) for part, some in sides.items()}
    return Contents(dict(parts), CLASSES, VOCAB_SIZE)


def _rows(folder: Path, listed: Path) -> Iterator[_Row]:
    """The images that a file of metadata names: text with a line each, or an array of strings."""
    raw = listed.read_bytes()
    if raw.startswith(b"\x93NUMPY"):
        array = load_array(raw, listed)
        if array.ndim != 2:
            raise ValueError(f"{listed} must be a table, a row for each image, got an array of shape {array.shape}")
        table = [[_word(cell) for cell in line] for line in array]
    else:
        table = [line.split() for line in raw.decode("utf-8", "replace").splitlines() if line.strip()]
    for number, line in enumerate(table, 1):
        where = f"{listed}, line {number}"
        if len(line) <= max(COLUMNS):
            raise ValueError(f"{where} has {len(line)} columns: folder, name, number and label must come first")
        path, name, label = (line[i] for i in COLUMNS)
        if Path(path, name).is_absolute() or ".." in Path(path, name).parts:
            raise ValueError(f"{where} names {path}/{name}, which is outside of {folder}")
        if not (folder / path / name).is_file():
            raise FileNotFoundError(f"{where} names {folder / path / name}, which is not there")
        yield _Row(where, folder / path / name, is_label(where, label, ("0", "1")))


def _word(cell: object) -> str:
    return cell.decode("utf-8", "replace") if isinstance(cell, bytes) else str(cell)


def _images(rows: list[_Row], size: int, part: str, report: Progress) -> Iterator[tuple[np.ndarray, int]]:
    for number, row in enumerate(rows):
        if number % 1000 == 0:
            report(f"reading {part}", number, len(rows))
        pixels = decode(row.file, str(row.file), "L")[..., 0]
        if pixels.shape != (size, size):
            raise ValueError(f"{row.file} has {pixels.shape[1]} x {pixels.shape[0]} pixels, not {size} x {size}")
        yield pixels.ravel(), row.label
