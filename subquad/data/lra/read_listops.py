"""ListOps as Long Range Arena has released it: basic_train.tsv, basic_val.tsv and basic_test.tsv."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from subquad.data.lra import listops
from subquad.data.lra._files import Contents, cells, is_label, lines, needed, pieces

if TYPE_CHECKING:
    from subquad.data.files import Progress
    from subquad.data.labelled_config import LabelledConfig

FILES = {"train": "basic_train.tsv", "held_out": "basic_val.tsv", "test": "basic_test.tsv"}
HEADER = "Source Target"


def contents(config: LabelledConfig, report: Progress) -> Contents:
    """The three files: a head, then an expression and its value in each line."""
    folder = Path(config.path or "").expanduser()
    files = {part: needed(folder, name) for part, name in FILES.items()}
    parts = {part: pieces(_rows(file, report)) for part, file in files.items()}
    return Contents(dict(parts), listops.CLASSES, listops.VOCAB_SIZE)


def _rows(file: Path, report: Progress) -> Iterator[tuple[np.ndarray, int]]:
    for number, (where, line) in enumerate(lines(file)):
        source, target = cells(where, line, HEADER)
        if not number:
            if [source, target] != [word.encode() for word in HEADER.split()]:
                raise ValueError(f"{where} must be 'Source<TAB>Target', got {line[:40]!r}")
            continue
        try:
            tokens = listops.read_words(source.decode())
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not len(tokens):
            raise ValueError(f"{where} has no expression before the tab")
        if number % 1000 == 0:
            report(f"reading {file.name}", number, number)
        yield tokens, is_label(where, target.decode(errors="replace"), listops.CLASSES)
