"""Folders of PNG and JPEG files, and Hugging Face datasets of images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.config import suggest
from subquad.data._image_decode import decode, stacked
from subquad.data._image_files import Raw

SUFFIXES = (".png", ".jpg", ".jpeg")
EVERY = 10
"""Where no folder splits the images, one in so many, by name, is held out."""


def pictures(folder: Path) -> list[Path]:
    """The PNG and JPEG files in a folder, sorted: by number where names are numbers."""
    found = [file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
    return sorted(found, key=lambda file: _natural(file.stem))


def _natural(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _folders(folder: Path) -> list[Path]:
    found = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(found, key=lambda entry: _natural(entry.name))


def holds_pictures(folder: Path) -> bool:
    """Whether the folder has the parts train and test, or pictures."""
    return any((folder / part).is_dir() for part in ("train", "test")) or bool(pictures(folder))


def read_pictures(folder: Path) -> dict[str, Raw]:
    """Pictures in train and test, below folders of their classes or not; or in one folder, which is split."""
    if files := pictures(folder):
        if len(files) < 2:
            raise ValueError(f"{folder} holds one image; at least two are needed, one of them to hold out")
        held_out = files[EVERY - 1 :: EVERY] or files[-1:]
        chosen = set(held_out)
        return {"train": unlabelled([file for file in files if file not in chosen]), "test": unlabelled(held_out)}
    for part in ("train", "test"):
        if not (folder / part).is_dir():
            raise FileNotFoundError(f"{folder} has no folder {part}")
    named = [entry.name for entry in _folders(folder / "train")]
    return {part: _part(folder / part, named) for part in ("train", "test")}


def _part(folder: Path, classes: list[str]) -> Raw:
    files, labels = pictures(folder), []
    below = _folders(folder)
    if files and below:
        raise ValueError(
            f"{folder} holds both images without a label ({files[0].name}) and folders of classes ({below[0].name}); "
            "put every image into the folder of its class, or none"
        )
    if not below:
        if classes:
            raise ValueError(f"{folder} has no folders of classes, as train has: {', '.join(classes)}")
        if not files:
            raise ValueError(f"{folder} holds no PNG or JPEG file")
        return unlabelled(files)
    for entry in below:
        if entry.name not in classes:
            known = suggest(entry.name, classes) if classes else "train has no classes"
            raise ValueError(f"{entry} is a class that has no example in train; {known}")
        inside = pictures(entry)
        if not inside:
            raise ValueError(f"{entry} is a class without an example: it holds no PNG or JPEG file")
        files += inside
        labels += [classes.index(entry.name)] * len(inside)
    return Raw(unlabelled(files).pixels, np.array(labels, np.int64), tuple(classes))


def unlabelled(files: list[Path]) -> Raw:
    """The images of these files."""
    return Raw(stacked(((str(file), decode(file, str(file))) for file in files), len(files)), None, ())


def read_dataset(asked: str) -> dict[str, Raw]:
    """The splits train and test (or validation) of a Hugging Face dataset: its first column of images, its labels."""
    name, *rest = asked.removeprefix("hf:").split(":")
    if not name or len(rest) > 1:
        raise ValueError(f"a dataset of images is hf:NAME[:CONFIG], got {asked!r}")
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{asked!r} needs the package datasets, which is not installed: pip install 'subquad[datasets]'"
        ) from error
    splits: Any = datasets.load_dataset(name, *rest)
    held_out = next((part for part in ("test", "validation", "valid") if part in splits), None)
    if "train" not in splits or held_out is None:
        raise ValueError(f"{asked!r} needs the splits train and test (or validation); it has {', '.join(splits)}")
    return {"train": _rows(asked, splits["train"], "train"), "test": _rows(asked, splits[held_out], held_out)}


def _rows(asked: str, rows: Any, part: str) -> Raw:
    import io

    import datasets

    kinds = rows.features
    column = next((name for name, kind in kinds.items() if isinstance(kind, datasets.Image)), None)
    if column is None:
        raise ValueError(f"{asked!r} has no column of images; its columns are {', '.join(kinds)}")
    label = next((name for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)), None)
    encoded = rows.cast_column(column, datasets.Image(decode=False))

    def images() -> Iterator[tuple[str, NDArray[np.uint8]]]:
        for row, item in enumerate(encoded):
            name, content = f"{asked}, {part} row {row}", item[column]
            if content is None:
                raise ValueError(f"{name} has no image")
            yield name, decode(io.BytesIO(content["bytes"]) if content["bytes"] else Path(content["path"]), name)

    if not len(rows):
        raise ValueError(f"{asked!r} has no row in {part}")
    pixels = stacked(images(), len(rows))
    if label is None:
        return Raw(pixels, None, ())
    labels = np.array([-1 if value is None else value for value in rows[label]], np.int64)
    if (labels < 0).any():
        raise ValueError(f"{asked}, {part} row {int(np.argmax(labels < 0))} has no label")
    return Raw(pixels, labels, tuple(kinds[label].names))
