"""Read images as arrays of bytes: PNG and JPEG files, MNIST's idx files, npz files and CIFAR-10's binary batches.

Shape letters: N images, H rows, W columns, C channels (1 grey, 3 red, green, blue).
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subquad.data.packed import PACKED, find_packed, load_arrays, read_packed
from subquad.extras import needed

MOST_PIXELS = 1 << 26
"""Largest image that is read: a file of a few kilobytes can unpack to billions of pixels."""


@dataclass(frozen=True)
class ImageSet:
    """Images of one size, with their labels if they have any."""

    pixels: NDArray[np.uint8]
    """`[N, H, W, C]`."""
    labels: NDArray[np.int64] | None
    """`[N]`, indices into `classes`; None if the files have no labels."""
    classes: tuple[str, ...]
    """Names of the labels, label 0 first; empty without labels."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns, channels."""
        _, height, width, channels = self.pixels.shape
        return height, width, channels

    @property
    def flat(self) -> Tensor:
        """Bytes of each image as a sequence, `[N, T]`."""
        return torch.from_numpy(self.pixels.reshape(len(self.pixels), -1))

    def fingerprint(self) -> str:
        """Return a SHA-256 of all pixels and labels, 64 hexadecimal digits."""
        total = hashlib.sha256(str((self.pixels.shape, self.classes)).encode())
        total.update(self.pixels.tobytes())
        if self.labels is not None:
            total.update(self.labels.tobytes())
        return total.hexdigest()


def decode(source: Path | IO[bytes], name: str, mode: str | None = None) -> NDArray[np.uint8]:
    """Decode a PNG or JPEG file to `[H, W, C]`, grey or RGB as it is stored, or converted to Pillow's `mode`.

    Raises `ValueError`, naming the image `name`, for damage, for more than `MOST_PIXELS` pixels, and for other formats,
    since Pillow starts external programs for some.
    """
    with needed("reading images"):
        from PIL import Image
    stream: Path | IO[bytes] = io.BytesIO(source.read_bytes()) if isinstance(source, Path) else source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of damage that is refused below
            with Image.open(stream, formats=("PNG", "JPEG")) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise ValueError(f"{opened.width} x {opened.height} pixels are more than {MOST_PIXELS:,}")
                image = opened.convert(mode or {"1": "L", "P": "RGB"}.get(opened.mode, opened.mode))
    except Exception as error:  # Pillow's decoders raise errors of many types
        raise ValueError(f"{name} is damaged or not an image: {error}") from error
    if image.mode not in ("L", "RGB"):
        raise ValueError(f"{name} has pixels of mode {image.mode}; valid: 8-bit grey (L) or RGB")
    pixels = np.array(image, np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def stacked(images: Iterator[tuple[str, NDArray[np.uint8]]], count: int) -> NDArray[np.uint8]:
    """Stack `count` named images to `[count, H, W, C]`; raise `ValueError` at the first of a different size."""
    pixels: NDArray[np.uint8] | None = None
    first = ""
    for row, (name, image) in enumerate(images):
        if pixels is None:
            pixels, first = np.empty((count, *image.shape), np.uint8), name
        if image.shape != pixels.shape[1:]:
            raise ValueError(f"{name} is {_size(image.shape)}, but {first} is {_size(pixels.shape[1:])}")
        pixels[row] = image
    assert pixels is not None  # every caller passes at least one image
    return pixels


def _size(shape: tuple[int, ...]) -> str:
    height, width, channels = shape
    return f"{height} x {width} x {channels} (rows x columns x channels)"


LABELS_WANTED = "idx label files, y_train and y_test, or train/CLASS/NAME.png"
_IDX = {"train": "train", "test": "t10k"}
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MOST_CLASSES = 1 << 16
CIFAR_RECORD = 1 + 3 * 32 * 32


def _idx_file(folder: Path, part: str, what: str) -> Path | None:
    dims = {"images": 3, "labels": 1}[what]
    stem = f"{_IDX[part]}-{what}"
    return find_packed(folder, f"{stem}-idx{dims}-ubyte", f"{stem}.idx{dims}-ubyte")


def holds_idx(folder: Path) -> bool:
    """Return whether `folder` holds an idx file of images."""
    return any(_idx_file(folder, part, "images") for part in _IDX)


def read_idx(folder: Path) -> dict[str, ImageSet]:
    """Read MNIST's idx files of images and, if they exist, of labels, for `train` and `test`."""
    read: dict[str, tuple[NDArray[np.uint8], NDArray[np.int64] | None]] = {}
    for part in _IDX:
        file = _idx_file(folder, part, "images")
        if file is None:
            raise FileNotFoundError(f"{folder} has no {_IDX[part]}-images-idx3-ubyte (plain, .gz, .xz or .bz2)")
        pixels = _idx(file, 3)
        labels, named = None, _idx_file(folder, part, "labels")
        if named is not None:
            labels = _idx(named, 1).astype(np.int64)
            if len(labels) != len(pixels):
                raise ValueError(f"{named} has {len(labels)} labels for the {len(pixels)} images of {file}")
        read[part] = (pixels[..., None], labels)
    classes = _numbered(labels for _, labels in read.values())
    return {
        part: ImageSet(pixels, labels, () if labels is None else classes) for part, (pixels, labels) in read.items()
    }


def _numbered(labels: Iterable[NDArray[np.int64] | None]) -> tuple[str, ...]:
    """Return the numbers up to the greatest label as names of the classes."""
    most = max((int(known.max()) for known in labels if known is not None and len(known)), default=-1)
    return tuple(map(str, range(most + 1)))


def _idx(file: Path, dims: int) -> NDArray[np.uint8]:
    """Read an idx file: two zero bytes, the type (8: unsigned bytes), the dimensions, their sizes, the bytes."""
    raw = read_packed(file)
    header = 4 + 4 * dims
    if len(raw) < header:
        raise ValueError(f"{file} ends at byte {len(raw)}, within its header of {header} bytes")
    for place, (value, meaning) in enumerate([(0, "zero"), (0, "zero"), (8, "unsigned bytes"), (dims, "dimensions")]):
        if raw[place] != value:
            raise ValueError(f"{file} is not a valid idx file: byte {place} is {raw[place]}, not {value} ({meaning})")
    sizes = [int.from_bytes(raw[place : place + 4], "big") for place in range(4, header, 4)]
    for place, size in enumerate(sizes):
        if size < 1:
            raise ValueError(f"{file} is empty: the size at byte {4 + 4 * place} is {size}")
    expected = header + int(np.prod(sizes, dtype=object))
    if len(raw) != expected:
        shape = " x ".join(map(str, sizes))
        raise ValueError(f"{file} has {len(raw)} bytes, not the {expected} of the size in its header, {shape}")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(sizes).copy()


def is_npz(file: Path) -> bool:
    """Return whether a file's name ends in .npz, possibly followed by a suffix of `PACKED`."""
    return file.suffix == ".npz" or (file.suffix in PACKED and file.with_suffix("").suffix == ".npz")


def read_npz(file: Path) -> dict[str, ImageSet]:
    """Read an npz file in Keras's layout, or with JPEG files joined in one array; refuse pickled arrays."""
    arrays = load_arrays(read_packed(file), file)
    if {"blob", "offset", "n_train"} <= set(arrays):
        return _jpegs(file, arrays)
    for name in ("x_train", "x_test"):
        if name not in arrays:
            raise ValueError(f"{file} has no array {name}; it has {', '.join(sorted(arrays)) or 'none'}")
    labels = {part: _npz_labels(file, arrays.get(f"y_{part}"), f"y_{part}") for part in ("train", "test")}
    classes = _numbered(labels.values())
    if "classes" in arrays and classes:
        classes = _named_classes(file, arrays["classes"], labels)
    read = {}
    for part, known in labels.items():
        pixels = _npz_pixels(file, arrays[f"x_{part}"], f"x_{part}")
        if known is not None and len(known) != len(pixels):
            raise ValueError(f"{file}: y_{part} has {len(known)} labels for the {len(pixels)} images of x_{part}")
        read[part] = ImageSet(pixels, known, () if known is None else classes)
    return read


def _npz_pixels(file: Path, array: NDArray[np.generic], name: str) -> NDArray[np.uint8]:
    if array.dtype != np.uint8:
        raise ValueError(f"{file}: {name} must hold bytes (uint8), got {array.dtype}")
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[-1] not in (1, 3) or 0 in array.shape:
        raise ValueError(f"{file}: {name} must be [N, H, W] or [N, H, W, 1 or 3], got {list(array.shape)}")
    return np.asarray(array, np.uint8)


def _npz_labels(file: Path, array: NDArray[np.generic] | None, name: str) -> NDArray[np.int64] | None:
    if array is None:
        return None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{file}: {name} must be integers [N], got {array.dtype} {list(array.shape)}")
    labels = array.astype(np.int64)
    if len(labels) and labels.min() < 0:
        row = int(np.argmax(labels < 0))
        raise ValueError(f"{file}: {name} row {row} is the label {labels[row]}; labels start at 0")
    if len(labels) and labels.max() >= MOST_CLASSES:
        row = int(labels.argmax())
        raise ValueError(f"{file}: {name} row {row} is the label {labels[row]}, above {MOST_CLASSES - 1}")
    return labels


def _named_classes(
    file: Path, names: NDArray[np.generic], labels: dict[str, NDArray[np.int64] | None]
) -> tuple[str, ...]:
    if names.ndim != 1:
        raise ValueError(f"{file}: classes must be names [classes], got shape {list(names.shape)}")
    classes = tuple(str(name) for name in names.tolist())
    for part, known in labels.items():
        if known is not None and len(known) and known.max() >= len(classes):
            row = int(np.argmax(known >= len(classes)))
            raise ValueError(f"{file}: {part} row {row} is the label {known[row]}; valid: 0 to {len(classes) - 1}")
    return classes


def _jpegs(file: Path, arrays: dict[str, NDArray[np.generic]]) -> dict[str, ImageSet]:
    """Read JPEG or PNG files joined in the array `blob`; file i is `blob[offset[i]:offset[i + 1]]`."""
    blob, offset, n_train = arrays["blob"], arrays["offset"], arrays["n_train"]
    whole = all(np.issubdtype(array.dtype, np.integer) for array in (offset, n_train)) and n_train.size == 1
    if blob.dtype != np.uint8 or blob.ndim != 1 or not whole or offset.ndim != 1 or len(offset) < 3:
        raise ValueError(f"{file}: blob must be uint8 [bytes], offset integers [N + 1] and n_train one integer")
    train, offset = int(n_train.item()), offset.astype(np.int64)
    steps = np.diff(offset)
    if offset[0] != 0 or offset[-1] != len(blob) or steps.min() < 1:
        row = 0 if offset[0] != 0 else int(np.argmax(steps < 1)) if steps.min() < 1 else len(steps)
        raise ValueError(f"{file}: offset row {row} is not valid for the {len(blob)} bytes of blob")
    count = len(steps)
    if not 0 < train < count:
        raise ValueError(f"{file}: n_train must be from 1 to {count - 1}, got {train}")
    labels = None
    classes: tuple[str, ...] = ()
    if "label" in arrays:
        labels = _npz_labels(file, arrays["label"], "label")
        assert labels is not None
        if len(labels) != count:
            raise ValueError(f"{file}: label has {len(labels)} rows for {count} images")
        names = arrays.get("classes", np.arange(int(labels.max()) + 1))
        classes = _named_classes(file, names, {"label": labels})

    def images() -> Iterator[tuple[str, NDArray[np.uint8]]]:
        for row in range(count):
            name = f"{file}: image {row}"
            yield name, decode(io.BytesIO(blob[offset[row] : offset[row + 1]].tobytes()), name)

    pixels = stacked(images(), count)
    parts = {"train": slice(0, train), "test": slice(train, count)}
    return {
        part: ImageSet(pixels[cut], None if labels is None else labels[cut], classes) for part, cut in parts.items()
    }


def _cifar_files(folder: Path) -> dict[str, list[Path]]:
    names = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
    return {part: [file for name in own if (file := find_packed(folder, name))] for part, own in names.items()}


def holds_cifar(folder: Path) -> bool:
    """Return whether `folder` holds CIFAR-10 batches; raise `ValueError` for its pickled Python version."""
    if (folder / "data_batch_1").is_file() or (folder / "test_batch").is_file():
        raise ValueError(f"{folder} holds pickles, which can run code and are not read; use CIFAR-10's binary version")
    return any(_cifar_files(folder).values())


def read_cifar(folder: Path) -> dict[str, ImageSet]:
    """Read CIFAR-10's binary version: records of a label and 3,072 bytes, 32 x 32 red, then green, then blue."""
    read = {}
    for part, files in _cifar_files(folder).items():
        if not files:
            wanted = "data_batch_1.bin" if part == "train" else "test_batch.bin"
            raise FileNotFoundError(f"{folder} has no {wanted} (plain, .gz, .xz or .bz2)")
        records = np.concatenate([_cifar(file) for file in files])
        pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        read[part] = ImageSet(np.ascontiguousarray(pixels), records[:, 0].astype(np.int64), CIFAR_CLASSES)
    return read


def _cifar(file: Path) -> NDArray[np.uint8]:
    raw = read_packed(file)
    if not raw or len(raw) % CIFAR_RECORD:
        raise ValueError(f"{file} is cut short: its {len(raw)} bytes are not a multiple of a record's {CIFAR_RECORD}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, CIFAR_RECORD)
    if (wrong := records[:, 0] > 9).any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{file}: byte {row * CIFAR_RECORD} is the label {records[row, 0]}; valid: 0 to 9")
    return records
