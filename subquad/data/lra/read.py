"""Data sets that are read from files or from the Hugging Face hub, once, and kept as a store."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.config import digest, suggest
from subquad.data.labelled_config import LabelledConfig
from subquad.data.lra.kept import kept
from subquad.data.lra.store import VERSION, Store, write_store

if TYPE_CHECKING:
    from subquad.data.files import Progress

READERS = {
    "listops": "read_listops",
    "text": "read_text",
    "retrieval": "read_retrieval",
    "image": "read_image",
    "pathfinder": "read_pathfinder",
}
"""The module of each data set: its `contents(config, report) -> Contents`."""


def read(config: LabelledConfig, *, progress: Progress | None = None) -> Store:
    """The data set at `config.path`, read or opened.

    What was read is found again by the names, sizes and times of the files (of a dataset, by its fingerprint).
    Raises as `labelled_corpus`.
    """
    rules = config.dataset.rstrip("0123456789")
    report = progress or (lambda *_: None)
    options = [config.validation, config.pathfinder.difficulty if rules == "pathfinder" else None]
    if (config.path or "").startswith("hf:"):
        rows = hub_rows(config.path or "")
        state: Any = {name: part._fingerprint for name, part in sorted(rows.items())}
    else:
        state = _state(config.path or "")

    def fill(folder: Path) -> None:
        module = importlib.import_module(f"subquad.data.lra.{READERS[rules]}")
        parts, classes, vocab_size = module.contents(config, report)
        write_store(folder, parts, classes=classes, vocab_size=vocab_size, source=str(config.path))

    return kept(config.cache, f"labelled-{config.dataset}-{digest([config.path, state, options, VERSION])}", fill)


def hub_rows(asked: str) -> Any:
    """The parts of `hf:NAME` or `hf:NAME:CONFIG`; `ImportError` without the extra `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{asked!r} needs the package datasets, which is not installed: pip install 'subquad[datasets]'"
        ) from error
    name, _, config = asked.removeprefix("hf:").partition(":")
    return datasets.load_dataset(name, config or None)


def _state(asked: str) -> list[Any]:
    """Names, sizes and times of all files below a path; `FileNotFoundError` where there is none."""
    place = Path(asked).expanduser()
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = sorted(Path(folder, name) for folder, _, names in os.walk(place) for name in names)
    else:
        near = [str(entry) for entry in sorted(place.parent.iterdir())[:20]] if place.parent.is_dir() else []
        raise FileNotFoundError(f"there is no file or folder {asked!r}; {suggest(asked, [*near, 'hf:NAME'])}")
    stats = [(file, file.stat()) for file in files]
    return [[file.as_posix(), stat.st_size, stat.st_mtime_ns] for file, stat in stats]
