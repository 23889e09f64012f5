"""Write files and folders atomically: fill a temporary path, flush it to disk, rename it."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)
DAY = 24 * 3600.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a quota or a file that has no room left."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system that has no locks."""


class InUseError(OSError):
    """Another process holds a file; the message names the process."""


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yield a new path beside `path` for a file or folder, which is renamed to `path` at the end.

    Leaves nothing behind after an error. If another process has put a folder at `path` meanwhile, that one stays. A
    link at `path` stays too: what it points to is replaced. Raises as `writing` if there is no room.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path)
    try:
        with writing(path):
            yield temporary
            sync(temporary)
        try:
            os.replace(temporary, path)
        except OSError:
            if not (temporary.is_dir() and path.is_dir()):
                raise
        _sync(path.parent)
    finally:
        remove(temporary)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an `OSError` that names `path` if the block meets a full disk, whichever library has met it."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else _code_in(str(error))
        if code not in FULL:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error


def _code_in(text: str) -> int | None:
    """Return the system's error code in the text of an error of safetensors, which is not an `OSError`."""
    found = re.search(r"\(os error (\d+)\)", text)
    return int(found[1]) if found else None


def sweep(folder: Path, names: str, older_than: float = DAY) -> None:
    """Delete temporary paths that killed processes left in `folder`, for names that match the glob `names`.

    A path written to within the last `older_than` seconds stays: its process may still be running.
    """
    for path in folder.glob(f".{names}.{'[0-9a-f]' * 32}"):
        with suppress(FileNotFoundError):  # another process deleted or renamed it
            written = max(entry.stat().st_mtime for entry in [path, *path.glob("*")])
            if written < time.time() - older_than:
                logger.warning("deleted %s: the process that wrote it was killed", path)
                remove(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on `folder`, without a lock file; it is released when the process ends."""
    if sys.platform == "win32":
        yield  # Windows cannot lock a folder, but does not rename one with open files either
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def claimed(file: Path) -> Iterator[None]:
    """Hold `file`, which names this process, until the block or the process ends, however it ends.

    Raises `InUseError`, which names the process that holds it, at once. Processes that this one forks, such as workers
    that read data, do not hold it: they may outlive a killed one for seconds. A file system without locks causes a
    warning.
    """
    if sys.platform == "win32":
        yield  # Windows has no such lock
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise InUseError(os.read(descriptor, 1000).decode(errors="replace") or "another process") from error
            if error.errno not in NO_LOCKS:
                raise
            logger.warning("%s can't be locked (%s): nothing keeps another process out", file, error.strerror)
        with writing(file):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        os.close(descriptor)


def beside(path: Path) -> Path:
    """Return a new hidden path beside `path`, which `sweep` knows."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def sync(path: Path) -> None:
    """Flush a file to disk, or a folder with the files directly in it."""
    for entry in path.iterdir() if path.is_dir() else ():
        if entry.is_file():
            _sync(entry)
    _sync(path)


def _sync(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return  # only POSIX can open a folder
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file `path` atomically: readers see the whole old file or the whole new one.

    A pipe or a terminal is written to directly.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with aside(path) as draft:
        draft.write_bytes(data)
