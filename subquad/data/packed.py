"""Files that are read plain or packed: `.xz`, `.gz` or `.bz2` after the name says which."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from pathlib import Path
from typing import IO, Any

_MODULES: dict[str, Any] = {".xz": lzma, ".gz": gzip, ".bz2": bz2}
PACKED = tuple(_MODULES)
"""The suffixes."""
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error)
"""What reading a damaged packed file raises."""


def find_packed(folder: Path, *names: str) -> Path | None:
    """The first file of these names in `folder`, plain or packed; None where there is none."""
    candidates = (folder / f"{name}{suffix}" for name in names for suffix in ("", *PACKED))
    return next((file for file in candidates if file.is_file()), None)


def unpack(file: Path, raw: bytes) -> bytes:
    """The content of `file`, whose bytes are `raw`; raises one of `DAMAGE` where it is damaged."""
    module = _MODULES.get(file.suffix)
    try:
        content: bytes = module.decompress(raw) if module else raw
    except ValueError as error:  # bz2 has another error than the others for what ends early
        raise EOFError(str(error)) from error
    return content


def read_packed(file: Path) -> bytes:
    """The content of a file; `ValueError` names it where it is damaged."""
    raw = file.read_bytes()
    try:
        return unpack(file, raw)
    except DAMAGE as error:
        raise damaged(file, error) from error


def open_stream(file: Path) -> IO[bytes]:
    """The content of a file as a stream; reading it raises one of `DAMAGE` where it is damaged."""
    module = _MODULES.get(file.suffix)
    stream: IO[bytes] = module.open(file, "rb") if module else file.open("rb")
    return stream


def damaged(file: Path, error: Exception) -> ValueError:
    """The error that names a damaged file."""
    return ValueError(f"{file} is damaged and does not unpack: {error}")
