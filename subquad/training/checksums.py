"""Checksums of a finished model: a file that was damaged is named, not used.

`checksums.json` beside the model holds the SHA-256 of its weights, its configuration and its tokenizer. transformers
does not read it. `trusting` lets a model be read whose files somebody has changed on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from subquad import disk
from subquad.parsing import check_keys, read_json_mapping

CHECKSUMS = "checksums.json"
ENDINGS = (".safetensors", ".json", ".jinja", ".model")
_trusts: ContextVar[bool] = ContextVar("trusts", default=False)


def write_checksums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the checksums of the model's files in `folder`: of `names`, by default of all."""
    chosen = [path.name for path in folder.iterdir() if path.is_file()] if names is None else names
    sums = {name: disk.sha256_of(folder / name) for name in sorted(chosen) if name.endswith(ENDINGS)}
    disk.write_atomically(folder / CHECKSUMS, (json.dumps(sums, indent=1) + "\n").encode())


def check_unchanged(folder: Path) -> None:
    """Raise `ValueError` for a file of the model in `folder` that is missing or not as it was saved.

    A folder without `checksums.json` is not checked, and none is within `trusting`.
    """
    file = folder / CHECKSUMS
    if _trusts.get() or not file.is_file():
        return
    sums = read_json_mapping(file)
    check_keys(sums, dict.fromkeys(sums, str), str(file))
    for name, saved in sums.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: {CHECKSUMS} names it; restore it, or give --trust-changed")
        if disk.sha256_of(folder / name) != saved:
            raise ValueError(
                f"{folder / name} is not as it was saved: its SHA-256 differs from that in {CHECKSUMS}. Restore it, "
                "or give --trust-changed if it was changed on purpose"
            )


@contextmanager
def trusting() -> Iterator[None]:
    """Within the block models are read as they are."""
    token = _trusts.set(True)
    try:
        yield
    finally:
        _trusts.reset(token)
