"""Images as arrays of bytes, from the files that data sets are published in.

Shape letters: N images, H rows, W columns, C channels (1 grey, 3 red, green, blue).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from subquad.config import suggest
from subquad.data import _image_files, _image_folders


@dataclass(frozen=True)
class ImageSet:
    """Images of one size, and what they show where that is known."""

    pixels: NDArray[np.uint8]
    """`[N, H, W, C]`."""
    labels: NDArray[np.int64] | None
    """`[N]`, each a place in `classes`; None where the files have no labels."""
    classes: tuple[str, ...]
    """What each label means, label 0 first; empty without labels."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns, channels."""
        _, height, width, channels = self.pixels.shape
        return height, width, channels

    def fingerprint(self) -> str:
        """Sixty-four hexadecimal digits of all pixels and labels."""
        total = hashlib.sha256(str((self.pixels.shape, self.classes)).encode())
        total.update(self.pixels.tobytes())
        if self.labels is not None:
            total.update(self.labels.tobytes())
        return total.hexdigest()


def load_images(path: str, *, labels: bool = False) -> dict[str, ImageSet]:
    """The images of a data set: `{"train": ..., "test": ...}`, in the order of its files.

    `path` is one of
    - a folder of MNIST's idx files, `train-images-idx3-ubyte` and so on, plain or packed as .gz, .xz or .bz2;
    - an .npz file (also packed as .npz.xz), or a folder with one, with x_train, y_train, x_test, y_test, as Keras has
      it, or with JPEG files in one array (blob, offset, label, n_train, classes);
    - a folder of CIFAR-10's binary version: `data_batch_1.bin` and so on, `test_batch.bin`;
    - a folder of PNG or JPEG files: train/CLASS/NAME.png and test/CLASS/NAME.png, or without labels train/NAME.png and
      test/NAME.png; or NAME.png alone, of which every tenth by name is held out as `test`;
    - hf:NAME[:CONFIG], a Hugging Face dataset with a column of images.

    Nothing pickled is read. With `labels`, every image must have a label and every class an image in both parts.
    Raises `FileNotFoundError` for what is not there, `ImportError` for a dataset without the extra `datasets`, and
    `ValueError`, which names the file and the place in it, for damaged files, wrong sizes, and labels that are missing
    or of no class.
    """
    sets = _reader(path)(path)
    if not labels:
        return sets
    for part, images in sets.items():
        if images.labels is None:
            raise ValueError(f"{path}: the {part} images have no labels; give {_image_files.LABELS_WANTED}")
        counts = np.bincount(images.labels, minlength=len(images.classes))
        for number, count in enumerate(counts.tolist()):
            if not count:
                raise ValueError(
                    f"{path}: class {number} ({images.classes[number]!r}) has no example among the "
                    f"{sum(counts)} {part} images; each of the {len(counts)} classes needs one"
                )
    return sets


def load_pictures(path: str) -> ImageSet | None:
    """All images of a PNG or JPEG file, or of a folder that holds such files itself; None for another path.

    Raises `ValueError` as `load_images`.
    """
    place = Path(path).expanduser()
    if place.is_file() and place.suffix.lower() in _image_folders.SUFFIXES:
        return ImageSet(*_image_folders.unlabelled([place]))
    files = _image_folders.pictures(place) if place.is_dir() else []
    return ImageSet(*_image_folders.unlabelled(files)) if files else None


def _reader(path: str) -> Callable[[str], dict[str, ImageSet]]:
    """What reads `path`, by the names that are there."""
    if path.startswith("hf:"):
        return lambda asked: _sets(path, _image_folders.read_dataset(asked))
    place = Path(path).expanduser()
    if place.is_dir():
        for holds, read in (
            (_image_files.holds_idx, _image_files.read_idx),
            (_image_files.holds_cifar, _image_files.read_cifar),
            (_image_folders.holds_pictures, _image_folders.read_pictures),
        ):
            if holds(place):
                return lambda _, read=read: _sets(path, read(place))  # type: ignore[misc]
        match [file for file in sorted(place.iterdir()) if _image_files.is_npz(file)]:
            case [file]:
                return lambda _: _sets(path, _image_files.read_npz(file))
            case [_, *_] as files:
                raise ValueError(f"{path} holds {len(files)} npz files; name one: {', '.join(map(str, files[:9]))}")
        raise ValueError(f"{path} holds no images: no idx files, no CIFAR-10 batches (.bin), no PNG, JPEG or npz files")
    if place.is_file():
        if not _image_files.is_npz(place):
            raise ValueError(f"{path} is not a set of images; a file must be .npz or .npz.xz, or give its folder")
        return lambda _: _sets(path, _image_files.read_npz(place))
    near = [str(entry) for entry in sorted(place.parent.iterdir())[:20]] if place.parent.is_dir() else []
    raise FileNotFoundError(f"there is no file or folder {path!r}; {suggest(path, [*near, 'hf:NAME'])}")


def _sets(path: str, raw: dict[str, _image_files.Raw]) -> dict[str, ImageSet]:
    sets = {part: ImageSet(*images) for part, images in raw.items()}
    train, test = sets["train"], sets["test"]
    if train.shape != test.shape:
        raise ValueError(
            f"{path}: the images differ in size: train has {list(train.shape)}, test {list(test.shape)} (rows, "
            "columns, channels)"
        )
    return sets
