"""Load image data sets in their published layouts: array files, folders of pictures, Hugging Face datasets."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.config import suggest
from subquad.data.files import check_path
from subquad.data.image_files import (
    LABELS_WANTED,
    ImageSet,
    decode,
    holds_cifar,
    holds_idx,
    is_npz,
    read_cifar,
    read_idx,
    read_npz,
    stacked,
)
from subquad.data.sources import hub_dataset

SUFFIXES = (".png", ".jpg", ".jpeg")
EVERY = 10
"""Hold out every tenth image, by name, of a folder without a train and a test part."""


def load_images(path: str, *, labels: bool = False) -> dict[str, ImageSet]:
    """Read an image data set as `{"train": ..., "test": ...}`, in the order of its files.

    `path` is one of

    - a folder of MNIST's idx files, `train-images-idx3-ubyte` and so on, plain or packed as .gz, .xz or .bz2;
    - an .npz file (also packed as .npz.xz), or a folder with one, in Keras's layout (x_train, y_train, x_test, y_test)
      or with JPEG files joined in one array (blob, offset, label, n_train, classes);
    - a folder of CIFAR-10's binary version: `data_batch_1.bin` and so on, `test_batch.bin`;
    - a folder of PNG or JPEG files: train/CLASS/NAME.png and test/CLASS/NAME.png; without labels train/NAME.png and
      test/NAME.png; or NAME.png alone, of which every tenth by name is held out as `test`;
    - hf:NAME[:CONFIG], a Hugging Face dataset with a column of images.

    Nothing pickled is read. With `labels`, every image must have a label and every class an image in both parts.
    Raises `FileNotFoundError` for missing files, `ImportError` for a dataset without the extra `datasets`, and
    `ValueError`, naming the file and the place in it, for damaged files, different image sizes and invalid labels.
    """
    sets = _read(path)
    train, test = sets["train"], sets["test"]
    if train.shape != test.shape:
        raise ValueError(f"{path}: images must have one size, but train has {train.shape} and test {test.shape}")
    if not labels:
        return sets
    for part, images in sets.items():
        if images.labels is None:
            raise ValueError(f"{path}: the {part} images have no labels; give {LABELS_WANTED}")
        counts = np.bincount(images.labels, minlength=len(images.classes))
        for number, count in enumerate(counts.tolist()):
            if not count:
                raise ValueError(f"{path}: class {number} ({images.classes[number]!r}) has no example in {part}")
    return sets


def load_pictures(path: str) -> ImageSet | None:
    """Read a PNG or JPEG file, or all in a folder itself; None for other paths. `ValueError` as `load_images`."""
    place = Path(path).expanduser()
    if place.is_file() and place.suffix.lower() in SUFFIXES:
        return unlabelled([place])
    files = pictures(place) if place.is_dir() else []
    return unlabelled(files) if files else None


def _read(path: str) -> dict[str, ImageSet]:
    """Read the images at `path`, whose file names tell the layout."""
    check_path(path, "hf:NAME")
    if path.startswith("hf:"):
        return read_dataset(path)
    place = Path(path).expanduser()
    if place.is_file():
        if not is_npz(place):
            raise ValueError(f"{path} is not a set of images; give an .npz or .npz.xz file, or a folder")
        return read_npz(place)
    if holds_idx(place):
        return read_idx(place)
    if holds_cifar(place):
        return read_cifar(place)
    if any((place / part).is_dir() for part in ("train", "test")) or pictures(place):
        return read_pictures(place)
    match [file for file in sorted(place.iterdir()) if is_npz(file)]:
        case [file]:
            return read_npz(file)
        case [_, *_] as files:
            raise ValueError(f"{path} holds {len(files)} npz files; name one: {', '.join(map(str, files[:9]))}")
    raise ValueError(f"{path} holds no images: no idx files, no CIFAR-10 batches (.bin), no PNG, JPEG or npz files")


def pictures(folder: Path) -> list[Path]:
    """Return the PNG and JPEG files in a folder, sorted by name, numbers first and by value."""
    found = [file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
    return sorted(found, key=lambda file: _natural(file.stem))


def _natural(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _folders(folder: Path) -> list[Path]:
    found = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(found, key=lambda entry: _natural(entry.name))


def read_pictures(folder: Path) -> dict[str, ImageSet]:
    """Read pictures in train and test, with or without folders of classes, or in one folder, which is split."""
    if files := pictures(folder):
        if len(files) < 2:
            raise ValueError(f"{folder} holds one image; at least two are needed, one of which is held out")
        held_out = files[EVERY - 1 :: EVERY] or files[-1:]
        chosen = set(held_out)
        return {"train": unlabelled([file for file in files if file not in chosen]), "test": unlabelled(held_out)}
    for part in ("train", "test"):
        if not (folder / part).is_dir():
            raise FileNotFoundError(f"{folder} has no folder {part}")
    named = [entry.name for entry in _folders(folder / "train")]
    return {part: _part(folder / part, named) for part in ("train", "test")}


def _part(folder: Path, classes: list[str]) -> ImageSet:
    files, labels = pictures(folder), []
    below = _folders(folder)
    if files and below:
        raise ValueError(
            f"{folder} holds both images without a label ({files[0].name}) and folders of classes ({below[0].name}); "
            "put all images or none into folders of classes"
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
            raise ValueError(f"{entry} is a class without an example in train; {known}")
        inside = pictures(entry)
        if not inside:
            raise ValueError(f"{entry} is a class without an example: it holds no PNG or JPEG file")
        files += inside
        labels += [classes.index(entry.name)] * len(inside)
    return ImageSet(unlabelled(files).pixels, np.array(labels, np.int64), tuple(classes))


def unlabelled(files: list[Path]) -> ImageSet:
    """Read `files` as images without labels."""
    return ImageSet(stacked(((str(file), decode(file, str(file))) for file in files), len(files)), None, ())


def read_dataset(asked: str) -> dict[str, ImageSet]:
    """Read the splits train and test (or validation) of a Hugging Face dataset."""
    name, *rest = asked.removeprefix("hf:").split(":")
    if not name or len(rest) > 1:
        raise ValueError(f"a dataset of images is hf:NAME[:CONFIG], got {asked!r}")
    splits = hub_dataset(asked, name, *rest)
    held_out = next((part for part in ("test", "validation", "valid") if part in splits), None)
    if "train" not in splits or held_out is None:
        raise ValueError(f"{asked!r} needs the splits train and test (or validation); it has {', '.join(splits)}")
    return {"train": _rows(asked, splits["train"], "train"), "test": _rows(asked, splits[held_out], held_out)}


def _rows(asked: str, rows: Any, part: str) -> ImageSet:
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
        return ImageSet(pixels, None, ())
    labels = np.array([-1 if value is None else value for value in rows[label]], np.int64)
    if (labels < 0).any():
        raise ValueError(f"{asked}, {part} row {int(np.argmax(labels < 0))} has no label")
    return ImageSet(pixels, labels, tuple(kinds[label].names))
