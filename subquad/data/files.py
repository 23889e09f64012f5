"""Files that are either whole or not there: written aside, flushed to the disk, then renamed."""

from __future__ import annotations

import difflib
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from subquad.config import suggest

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
"""Called as (what is being done, units done, units in all)."""
DAY = 24 * 3600.0
BESIDE = 5
"""Names that are listed for a path that is missing."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""Files that may lie beside a model for its tokenizer."""
MODEL_FILES = (*TOKENIZER_FILES, "generation_config.json")
"""Files that are copied along with a model, unchanged."""


def silent(what: str, done: int, total: int) -> None:
    """Report nothing: the `Progress` of callers that pass none."""


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Give a new path beside `path` to write a file or fill a folder at; it is renamed to `path` at the end.

    After an error nothing is left. A folder that someone else has put at `path` meanwhile stays, and ours goes.
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
    """Delete what killed processes left in `folder` of `aside(folder / name)`, where the glob `names` fits the name.

    A path that was written to in the last `older_than` seconds stays: its process may be at work.
    """
    for path in folder.glob(f".{names}.{'[0-9a-f]' * 32}"):
        with suppress(FileNotFoundError):  # another process sweeps too, or is done
            written = max(entry.stat().st_mtime for entry in [path, *path.glob("*")])
            if written < time.time() - older_than:
                logger.warning("deleted %s: the process that wrote it was killed", path)
                remove(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep out other processes that lock `folder`, which gets no new file; the lock ends with the process."""
    if sys.platform == "win32":
        yield  # no lock there, but no folder with an open file is renamed either
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def cache_folder(cache: str | None) -> Path:
    """Return where prepared data is: `cache`, or `$SUBQUAD_CACHE`, or `~/.cache/subquad`."""
    chosen = cache or os.environ.get("SUBQUAD_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "subquad"


def set_aside(path: Path) -> Path:
    """Rename what is at `path` to a name that `sweep` knows, and return that."""
    away = _beside(path)
    os.replace(path, away)
    return away


def fill_once(folder: Path, check: Callable[[], object], fill: Callable[[Path], None]) -> None:
    """Fill `folder` by `fill(temporary)` where it is not there yet, or where `check` finds it damaged."""
    if not usable(folder, check):
        with aside(folder) as temporary:
            temporary.mkdir()
            fill(temporary)


def check_path(asked: str, *forms: str) -> None:
    """Raise `FileNotFoundError` for a missing path, with the other `forms` of one and the nearest that stand beside it.

    Of a Hugging Face dataset, hf:NAME, nothing is known here.
    """
    place = Path(asked).expanduser()
    if asked in forms or asked.startswith("hf:") or place.is_file() or place.is_dir():
        return
    beside = [str(entry) for entry in sorted(place.parent.glob("[!.]*"))[:1000]]
    near = difflib.get_close_matches(asked, beside, n=BESIDE) or beside[:BESIDE]
    raise FileNotFoundError(f"there is no file or folder {asked!r}; {suggest(asked, [*forms, *near])}")


def usable(folder: Path, check: Callable[[], object]) -> bool:
    """Return whether `folder` is there and `check` finds it whole; a damaged one is removed, with a warning.

    It is checked again and renamed under a lock: another process may have put a whole one there since the first check.
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
        logger.warning("prepared data in %s cannot be used and is made again: %s", folder, damage)
        away = set_aside(folder)
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
    """Flush a file, or a folder with the files right in it, to the disk."""
    if path.is_dir():
        for entry in path.iterdir():
            if entry.is_file():
                _sync(entry)
        if os.name != "posix":
            return  # only POSIX opens folders
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or a folder, or nothing where there is none."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a mapping as JSON."""
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
