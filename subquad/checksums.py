"""Checksums of a saved model: a damaged file is named in an error and not used.

`checksums.json` beside the model holds the SHA-256 of its weights, its configuration and its tokenizer; a checkpoint
has those of all its files in its manifest. transformers does not read them. Our commands check all that they load:
models, adapters and their bases. Within `trusting` files that were changed on purpose are accepted.
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
MANIFEST, FORMAT = "manifest.json", "subquad-checkpoint"
"""The file of a checkpoint that lists the others, and the format that it names."""
ENDINGS = (".safetensors", ".json", ".jinja", ".model", ".py")
_trusts: ContextVar[bool] = ContextVar("trusts", default=False)


def write_checksums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the checksums of the model's files in `folder`: of `names`, by default of all."""
    chosen = [path.name for path in folder.iterdir() if path.is_file()] if names is None else names
    chosen = sorted(name for name in chosen if name.endswith(ENDINGS) and name != CHECKSUMS)
    sums = {name: disk.sha256_of(folder / name) for name in chosen}
    disk.write_atomically(folder / CHECKSUMS, (json.dumps(sums, indent=1) + "\n").encode())


def check_unchanged(folder: str | Path) -> None:
    """Raise `ValueError` for a file of the model in `folder` that is missing or not as it was saved.

    A folder without checksums is not checked, and none is within `trusting`.
    """
    folder = Path(folder)
    file = next((file for name in (CHECKSUMS, MANIFEST) if (file := folder / name).is_file()), None)
    if _trusts.get() or file is None:
        return
    for name, saved in _sums(file).items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: {file.name} names it; restore it, or give --trust-changed")
        if disk.sha256_of(folder / name) != saved:
            raise ValueError(
                f"{folder / name} is not as it was saved: its SHA-256 differs from that in {file.name}. Restore it, "
                "or give --trust-changed if it was changed on purpose"
            )


def _sums(file: Path) -> dict[str, str]:
    """Return the SHA-256 of a model's files by their names, without the files that only a resumed run reads."""
    sums = read_json_mapping(file)
    if file.name == MANIFEST:
        if sums.get("format") != FORMAT:
            return {}  # another program's
        check_keys(sums, {"files": dict}, str(file))
        files = {name: entry for name, entry in sums["files"].items() if name.endswith(ENDINGS)}
        for name, entry in files.items():
            check_keys(entry, {"sha256": str}, f"{file}, {name}")
        sums = {name: entry["sha256"] for name, entry in files.items() if not name.startswith("rng_state_")}
    check_keys(sums, dict.fromkeys(sums, str), str(file))
    return sums


@contextmanager
def trusting() -> Iterator[None]:
    """Within the block models are read as they are."""
    token = _trusts.set(True)
    try:
        yield
    finally:
        _trusts.reset(token)
