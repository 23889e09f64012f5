"""Read untrusted files safely: plain or packed (`.xz`, `.gz`, `.bz2`) files, and NumPy's npy and npz.

A few kilobytes can unpack to terabytes, so nothing is unpacked to more than `most` bytes.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

_MODULES: dict[str, Any] = {".xz": lzma, ".gz": gzip, ".bz2": bz2}
PACKED = tuple(_MODULES)
"""Suffixes of packed files."""
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error)
"""Errors that a damaged packed file raises."""
BAD_ZIP = (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, LookupError, OverflowError)
"""Errors of a zip archive that is damaged, pickled, encrypted, or packed by an unknown method."""
LEAST, TIMES = 1 << 28, 100
"""A file may unpack to `LEAST` bytes or `TIMES` its own size, whichever is more; text packs to a tenth of its size."""
_MAGIC = {b"\xfd7zXZ\x00": lzma, b"\x1f\x8b": gzip, b"BZh": bz2}
_PIECE = 1 << 20


def most(packed: int) -> int:
    """Return the most bytes that a file of `packed` bytes may unpack to."""
    return max(LEAST, TIMES * packed)


def find_packed(folder: Path, *names: str) -> Path | None:
    """Return the first file in `folder` with one of `names`, plain or packed, or None."""
    candidates = (folder / f"{name}{suffix}" for name in names for suffix in ("", *PACKED))
    return next((file for file in candidates if file.is_file()), None)


def unpack(file: Path, raw: bytes) -> bytes:
    """Unpack the bytes `raw` of `file` by its suffix; raise one of `DAMAGE` for damage or too much content."""
    return _unpacked(_MODULES.get(file.suffix), raw)


def unpack_any(raw: bytes) -> bytes:
    """Unpack as `unpack`, but by the first bytes of `raw`."""
    return _unpacked(next((module for magic, module in _MAGIC.items() if raw.startswith(magic)), None), raw)


def _unpacked(module: Any, raw: bytes) -> bytes:
    if module is None:
        return raw
    content, left = io.BytesIO(), most(len(raw))
    with module.open(io.BytesIO(raw), "rb") as stream:
        while piece := stream.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise too_much(len(raw))
            content.write(piece)
    return content.getvalue()


def too_much(packed: int) -> OSError:
    """Return the error for `packed` bytes that unpack to more than `most(packed)`."""
    return OSError(f"{packed:,} packed bytes unpack to more than {most(packed):,}: unpack it yourself if you trust it")


def check_zip(archive: zipfile.ZipFile, packed: int) -> None:
    """Raise `OSError` if the files in an archive of `packed` bytes together take more than `most(packed)`."""
    if sum(info.file_size for info in archive.infolist()) > most(packed):
        raise too_much(packed)


def read_packed(file: Path) -> bytes:
    """Read and unpack a file; raise `ValueError`, naming it, if it is damaged."""
    raw = file.read_bytes()
    try:
        return unpack(file, raw)
    except DAMAGE as error:
        raise damaged(file, error) from error


def open_stream(file: Path) -> IO[bytes]:
    """Open the unpacked content of a file as a stream; reading damage raises one of `DAMAGE`."""
    module = _MODULES.get(file.suffix)
    return module.open(file, "rb") if module else file.open("rb")


def damaged(file: Path, error: Exception) -> ValueError:
    """Return the `ValueError` for a damaged file."""
    return ValueError(f"{file} is damaged and does not unpack: {error}")


_LAST_CODE, _HALVES = 0x10FFFF, (0xD800, 0xDFFF)
"""The last Unicode code point, and the range of surrogates, which are not characters."""


def load_array(raw: bytes, file: Path) -> np.ndarray:
    """Read the array in the bytes `raw` of an npy file; raise `ValueError`, naming `file`, if it is damaged."""
    if raw.startswith(b"PK"):
        raise ValueError(f"{file} is not a readable npy file: it is an archive of several arrays (npz)")
    if not raw.startswith(b"\x93NUMPY"):  # np.load would try to read a pickle
        raise ValueError(f"{file} is not a readable npy file: it does not begin with npy's magic bytes")
    try:
        array: np.ndarray = np.load(io.BytesIO(raw), allow_pickle=False)
    except Exception as error:  # the header is a Python literal, whose parser raises errors of many types
        raise ValueError(f"{file} is not a readable npy file: {error!r} (nothing pickled is read)") from error
    return _sized(array, file)


def load_arrays(raw: bytes, file: Path) -> dict[str, np.ndarray]:
    """Read the arrays in the bytes `raw` of an npz file; raise as `load_array`, and if they unpack to too much."""
    content = io.BytesIO(raw)
    if not zipfile.is_zipfile(content):
        raise ValueError(f"{file} is not a readable npz file: it is not a zip archive, or its end is missing")
    try:
        with zipfile.ZipFile(content) as archive:
            check_zip(archive, len(raw))
        content.seek(0)
        with np.load(content, allow_pickle=False) as arrays:
            found: dict[str, Any] = {name: arrays[name] for name in arrays.files}
    except Exception as error:
        raise ValueError(f"{file} is not a readable npz file: {error!r} (nothing pickled is read)") from error
    for name, array in found.items():
        if not isinstance(array, np.ndarray):  # np.load returns members of other formats as bytes
            raise ValueError(f"{file} is not a readable npz file: {name} is not an array")
    return {name: _sized(array, file) for name, array in found.items()}


def _sized(array: np.ndarray, file: Path) -> np.ndarray:
    """Return `array`; raise `ValueError` unless it holds plain values that each take at least a byte."""
    if array.size > array.nbytes:
        raise ValueError(f"{file} holds {array.size:,} values that take {array.nbytes:,} bytes")
    if array.dtype.kind not in "biufcSU":
        raise ValueError(f"{file} must hold numbers, booleans or strings, got {array.dtype}")
    if array.dtype.kind == "U" and array.size:
        codes = np.frombuffer(array.tobytes(), np.dtype("u4").newbyteorder(array.dtype.byteorder))
        if ((codes > _LAST_CODE) | ((codes >= _HALVES[0]) & (codes <= _HALVES[1]))).any():
            raise ValueError(f"{file} holds strings with invalid Unicode code points")
    return array
