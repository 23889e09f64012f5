"""Paths of data: what is missing, folders of prepared data, and files that go with a model."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from subquad.config import suggest
from subquad.disk import aside, beside, locked, remove, sweep, write_atomically

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
"""A callback `(what is being done, units done, units in all)`."""
BESIDE = 5
"""Number of neighbours that the error about a missing path lists."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""Tokenizer files that a model's folder may hold."""
MODEL_FILES = (*TOKENIZER_FILES, "generation_config.json")
"""Files that are copied along with a model, unchanged."""


def silent(what: str, done: int, total: int) -> None:
    """Report nothing; the default `Progress`."""


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
        away = beside(folder)  # `sweep` deletes it if this process ends before
        os.replace(folder, away)
    remove(away)
    return False


def _damage(check: Callable[[], object]) -> Exception | None:
    try:
        check()
    except (ValueError, OSError) as error:
        return error
    return None


def write_json(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write `values` to `path` as indented JSON, atomically."""
    write_atomically(Path(path), (json.dumps(values, indent=2) + "\n").encode())
