"""NumPy's files that someone else has written: arrays of plain values, nothing pickled, within bounds."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from subquad.data.packed import check_zip

_LAST_CODE, _HALVES = 0x10FFFF, (0xD800, 0xDFFF)
"""The greatest character, and the halves of surrogate pairs, which are none."""


def load_array(raw: bytes, file: Path) -> np.ndarray:
    """The array in the bytes of an npy file; `ValueError` names the file where it is damaged or no such file."""
    if raw.startswith(b"PK"):
        raise ValueError(f"{file} is no readable npy file: it is an archive of several arrays (npz)")
    if not raw.startswith(b"\x93NUMPY"):  # np.load would try to read a pickle
        raise ValueError(f"{file} is no readable npy file: it does not begin as one")
    try:
        array: np.ndarray = np.load(io.BytesIO(raw), allow_pickle=False)
    except Exception as error:  # a header is a Python literal, and fails as such do
        raise ValueError(f"{file} is no readable npy file: {error!r} (nothing pickled is read)") from error
    return _sized(array, file)


def load_arrays(raw: bytes, file: Path) -> dict[str, np.ndarray]:
    """The arrays in the bytes of an npz file. Raises as `load_array`, and for what unpacks to too much."""
    content = io.BytesIO(raw)
    if not zipfile.is_zipfile(content):
        raise ValueError(f"{file} is no readable npz file: it is no zip archive, or its end is missing")
    try:
        with zipfile.ZipFile(content) as archive:
            check_zip(archive, len(raw))
        content.seek(0)
        with np.load(content, allow_pickle=False) as arrays:
            found: dict[str, Any] = {name: arrays[name] for name in arrays.files}
    except Exception as error:
        raise ValueError(f"{file} is no readable npz file: {error!r} (nothing pickled is read)") from error
    for name, array in found.items():
        if not isinstance(array, np.ndarray):  # a member that is no npy file comes as bytes
            raise ValueError(f"{file} is no readable npz file: {name} is no array")
    return {name: _sized(array, file) for name, array in found.items()}


def _sized(array: np.ndarray, file: Path) -> np.ndarray:
    """Raise `ValueError` for an array that holds no plain values, or any number of them that take no bytes."""
    if array.size > array.nbytes:
        raise ValueError(f"{file} holds {array.size:,} values that take {array.nbytes:,} bytes")
    if array.dtype.kind not in "biufcSU":
        raise ValueError(f"{file} must hold numbers, booleans or texts, got {array.dtype}")
    if array.dtype.kind == "U" and array.size:
        codes = np.frombuffer(array.tobytes(), np.dtype("u4").newbyteorder(array.dtype.byteorder))
        if ((codes > _LAST_CODE) | ((codes >= _HALVES[0]) & (codes <= _HALVES[1]))).any():
            raise ValueError(f"{file} holds texts with codes that are no Unicode characters")
    return array
