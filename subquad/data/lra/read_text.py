"""Labelled documents as bytes, such as the reviews of IMDB (Maas et al. 2011)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.config import suggest
from subquad.data.lra._files import Contents, Text, as_bytes, is_label, lines, pieces
from subquad.data.split import hold_out

if TYPE_CHECKING:
    from subquad.data.files import Progress
    from subquad.data.labelled_config import LabelledConfig

HELD_OUT = 0.1
"""Of the training documents, measured while training."""
SIDES = ("train", "test")
SENTIMENT = {"0": "negative", "1": "positive", "neg": "negative", "pos": "positive"}
UNLABELLED = "unsup"
"""A folder of IMDB that has no labels."""


def contents(config: LabelledConfig, report: Progress) -> Contents:
    """`train/CLASS/*.txt` and `test/CLASS/*.txt`, or `*train.tsv` and `*test.tsv`, or a dataset.

    A line of the TSV files has the label first and the text last. Of the training documents a tenth is held out by a
    hash of their text, or (validation=test) the test documents are measured while training too.
    """
    asked = config.path or ""
    read = _dataset if asked.startswith("hf:") else _folders if (Path(asked).expanduser() / "train").is_dir() else _tsv
    sides = {side: read(asked, side) for side in SIDES}
    labels = sorted({document.label for document in sides["train"]} - {""})
    found = {
        side: [
            (as_bytes(where, text), is_label(where, label, labels))
            for where, text, label in _counted(documents, side, report)
        ]
        for side, documents in sides.items()
    }
    parts = {"train": found["train"], "held_out": found["test"], "test": found["test"]}
    if config.validation == "apart":
        out = hold_out([sequence.tobytes() for sequence, _ in found["train"]], HELD_OUT)
        for part, wanted in (("train", False), ("held_out", True)):
            parts[part] = [row for row, apart in zip(found["train"], out, strict=True) if apart is wanted]
    classes = tuple(SENTIMENT.get(label, label) for label in labels)
    return Contents({part: pieces(rows) for part, rows in parts.items()}, classes, 1 << 8)


def _counted(documents: list[Text], side: str, report: Progress) -> Iterator[Text]:
    for number, document in enumerate(documents):
        if number % 1000 == 0:
            report(f"reading {side}", number, len(documents))
        yield document


def _folders(asked: str, side: str) -> list[Text]:
    root = Path(asked).expanduser() / side
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name != UNLABELLED)
    found = [Text(str(file), file.read_bytes(), name) for name in names for file in sorted((root / name).glob("*.txt"))]
    if empty := [name for name in names if not any(document.label == name for document in found)]:
        raise ValueError(f"the class {empty[0]!r} has no example: there is no .txt file in {root / empty[0]}")
    if not names:
        raise ValueError(f"{root} has no folder for a class, such as pos and neg")
    return found


def _tsv(asked: str, side: str) -> list[Text]:
    folder = Path(asked).expanduser()
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    matching = [
        name
        for name in names
        if name.removesuffix(Path(name).suffix * (not name.endswith(".tsv"))).endswith(f"{side}.tsv")
    ]
    if not matching:
        raise FileNotFoundError(
            f"{asked} has neither the folders train and test nor a file that ends in {side}.tsv (or .xz, .gz, .bz2)"
        )
    found = []
    for where, line in lines(folder / matching[0]):
        label, tab, rest = line.partition(b"\t")
        if not tab:
            raise ValueError(f"{where} has no tab: it must have the label first and the text last, with tabs between")
        found.append(Text(where, rest.rpartition(b"\t")[2], label.decode(errors="replace")))
    return found


def _dataset(asked: str, side: str) -> list[Text]:
    from subquad.data.lra.read import hub_rows

    rows: Any = hub_rows(asked)
    if side not in rows:
        raise ValueError(f"{asked!r} has no part {side!r}; {suggest(side, map(str, rows))}")
    rows = rows[side]
    for column in ("text", "label"):
        if column not in rows.column_names:
            raise ValueError(f"{asked!r} has no column {column!r}; {suggest(column, rows.column_names)}")
    names = getattr(rows.features["label"], "names", None)
    found = []
    for number, (text, label) in enumerate(zip(rows["text"], rows["label"], strict=True)):
        where = f"{asked}, {side}, row {number}"
        if label is None or (names and not 0 <= label < len(names)):  # -1 stands for none
            raise ValueError(f"{where} has no label; valid: {', '.join(names or ['one in each row'])}")
        found.append(Text(where, (text or "").encode(), names[label] if names else str(label)))
    return found
