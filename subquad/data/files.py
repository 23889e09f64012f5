"""Write files and folders atomically: fill a temporary path, flush it to disk, rename it."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from subquad.config import suggest

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
"""A callback `(what is being done, units done, units in all)`."""
DAY = 24 * 3600.0
BESIDE = 5
"""Number of neighbours that the error about a missing path lists."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""Tokenizer files that may lie beside a model."""
MODEL_FILES = (*TOKENIZER_FILES, "generation_config.json")
"""Files that are copied along with a model, unchanged."""


def silent(what: str, done: int, total: int) -> None:
    """Report nothing; the default `Progress`."""


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yield a new path beside `path` for a file or folder, which is renamed to `path` at the end.

    Leaves nothing behind after an error. If another process has put a folder at `path` meanwhile, that one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        yield temporary
        sync(temporary)
        try:
            os.replace(temporary, path)
        except OSError:
            if not (temporary.is_dir() and path.is_dir()):
                raise
        sync(path.parent)
    finally:
        remove(temporary)


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


def cache_folder(cache: str | None) -> Path:
    """Return the folder of prepared data: `cache`, or `$SUBQUAD_CACHE`, or `~/.cache/subquad`."""
    chosen = cache or os.environ.get("SUBQUAD_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "subquad"


def fill_once(folder: Path, check: Callable[[], object], fill: Callable[[Path], None]) -> None:
    """Fill `folder` by `fill(temporary)` if it does not exist or `check` raises."""
    if not usable(folder, check):
        with aside(folder) as temporary:
            temporary.mkdir()
            fill(temporary)


def check_path(asked: str, *forms: str) -> None:
    """Raise `FileNotFoundError` for a missing path (not hf:NAME), naming the valid `forms` and nearest neighbours."""
    place = Path(asked).expanduser()
    if asked in forms or asked.startswith("hf:") or place.is_file() or place.is_dir():
        return
    beside = [str(entry) for entry in sorted(place.parent.glob("[!.]*"))[:1000]]
    near = difflib.get_close_matches(asked, beside, n=BESIDE) or beside[:BESIDE]
    raise FileNotFoundError(f"there is no file or folder {asked!r}; {suggest(asked, [*forms, *near])}")


def usable(folder: Path, check: Callable[[], object]) -> bool:
    """Return whether `folder` exists and `check` does not raise; remove a damaged one with a warning.

    It is checked again under a lock before it is removed: another process may have replaced it since.
    """
    sweep(folder.parent, f"{folder.name.partition('-')[0]}-*")
    if not folder.is_dir():
        return False
    if _damage(check) is None:
        return True
    with locked(folder.parent):
        if not folder.is_dir():
            return False
        damage = _damage(check)
        if damage is None:
            return True
        logger.warning("prepared data in %s is damaged and will be rebuilt: %s", folder, damage)
        away = _beside(folder)  # `sweep` finds it if this process ends before it is removed
        os.replace(folder, away)
    remove(away)
    return False


def _damage(check: Callable[[], object]) -> Exception | None:
    try:
        check()
    except (ValueError, OSError) as error:
        return error
    return None


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def sync(path: Path) -> None:
    """Flush a file to disk, or a folder with the files directly in it."""
    if path.is_dir():
        for entry in path.iterdir():
            if entry.is_file():
                _sync(entry)
        if os.name != "posix":
            return  # only POSIX can open a folder
    _sync(path)


def _sync(path: Path) -> None:
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


def write_json(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write `values` to `path` as indented JSON."""
    Path(path).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
