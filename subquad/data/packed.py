"""Files that are read plain or packed: `.xz`, `.gz` or `.bz2` after the name says which.

A few kilobytes can unpack to terabytes. Nothing unpacks to more than `most` bytes: whoever has such a file unpacks it
himself.
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

_MODULES: dict[str, Any] = {".xz": lzma, ".gz": gzip, ".bz2": bz2}
PACKED = tuple(_MODULES)
"""The suffixes."""
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error)
"""What reading a damaged packed file raises."""
BAD_ZIP = (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, LookupError, OverflowError)
"""What a zip archive raises that is damaged, pickled, packed in an unknown way, or has a password."""
LEAST, TIMES = 1 << 28, 100
"""A file may unpack to `LEAST` bytes, a larger one to so many times its own size; text packs to a tenth of its size."""
_MAGIC = {b"\xfd7zXZ\x00": lzma, b"\x1f\x8b": gzip, b"BZh": bz2}
_PIECE = 1 << 20


def most(packed: int) -> int:
    """Bytes that a file of `packed` bytes may unpack to."""
    return max(LEAST, TIMES * packed)


def find_packed(folder: Path, *names: str) -> Path | None:
    """The first file of these names in `folder`, plain or packed; None where there is none."""
    candidates = (folder / f"{name}{suffix}" for name in names for suffix in ("", *PACKED))
    return next((file for file in candidates if file.is_file()), None)


def unpack(file: Path, raw: bytes) -> bytes:
    """The content of `file`, whose bytes are `raw`; raises one of `DAMAGE` where it is damaged or a bomb."""
    return _unpacked(_MODULES.get(file.suffix), raw)


def unpack_any(raw: bytes) -> bytes:
    """As `unpack`, packed as the first bytes say."""
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
    """The error for what unpacks to more than it may."""
    return OSError(f"{packed:,} packed bytes unpack to more than {most(packed):,}: unpack it yourself if that is right")


def check_zip(archive: zipfile.ZipFile, packed: int) -> None:
    """Raise `OSError` for an archive of `packed` bytes whose files take more than they may together."""
    if sum(info.file_size for info in archive.infolist()) > most(packed):
        raise too_much(packed)


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
