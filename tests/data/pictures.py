"""Small image files of the layouts that are read."""

import bz2
import gzip
import io
import lzma
from pathlib import Path

import numpy as np
from PIL import Image

PACK = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}


def digits(count=20, size=4, classes=2, seed=0):
    """Grey images `[N, size, size]` and labels: class k has a bright row k."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    pixels = rng.integers(0, 40, (count, size, size), dtype=np.uint8)
    pixels[np.arange(count), labels] = 220
    return pixels, labels


def idx_bytes(array, kind=8):
    sizes = b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, kind, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, *, train=20, test=8, size=4, classes=2, suffix="", labels=True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, seed in (("train", train, 0), ("t10k", test, 1)):
        pixels, classes_N = digits(count, size, classes, seed)
        (folder / f"{part}-images-idx3-ubyte{suffix}").write_bytes(PACK[suffix](idx_bytes(pixels)))
        if labels:
            (folder / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(PACK[suffix](idx_bytes(classes_N)))
    return folder


def write_png(file: Path, pixels, mode=None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(file) if mode else Image.fromarray(pixels).save(file)


def keras(**changes):
    """The arrays of an npz file in Keras's layout."""
    (x, y), (x_test, y_test) = digits(20), digits(8, seed=1)
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test} | changes


def jpegs(**changes):
    """The arrays of an npz file of JPEG files joined in one."""
    parts = []
    for shade in range(6):
        buffer = io.BytesIO()
        Image.fromarray(np.full((4, 4, 3), shade * 40, np.uint8)).save(buffer, "JPEG")
        parts.append(np.frombuffer(buffer.getvalue(), np.uint8))
    arrays = {"blob": np.concatenate(parts), "offset": np.cumsum([0, *map(len, parts)]), "label": np.arange(6) % 2}
    return arrays | {"n_train": 4, "classes": np.array(["cat", "dog"])} | changes


def records(*labels):
    """A batch of CIFAR-10."""
    return b"".join(bytes([label]) + bytes([10] * 1024 + [20] * 1024 + [30] * 1024) for label in labels)
