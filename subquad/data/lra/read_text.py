"""Read data sets of documents and expressions from files (plain or packed) and from the Hugging Face hub.

Labelled documents as bytes, such as IMDB's reviews (Maas et al. 2011); pairs of papers as bytes, labelled by whether
one cites the other; ListOps as released by Long Range Arena. Errors name the file and the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from subquad.config import suggest
from subquad.data.config import LabelledConfig
from subquad.data.files import Progress
from subquad.data.lra import listops
from subquad.data.lra.store import Contents, Pairs, counted, is_label, pieces
from subquad.data.packed import DAMAGE, damaged, find_packed, most, open_stream, too_much
from subquad.data.sources import hold_out, hub_dataset
from subquad.data.texts import check_text
from subquad.parsing import decoded, parse_json


class Text(NamedTuple):
    """A document, its place for error messages, and its label as written in the file."""

    where: str
    text: bytes
    label: str


def needed(folder: Path, name: str) -> Path:
    """Return the file that `find_packed` finds; raise `FileNotFoundError` if there is none."""
    if (file := find_packed(folder, name)) is None:
        raise FileNotFoundError(f"there is no {name} (or .xz, .gz, .bz2) in {folder}")
    return file


def lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield `file, line N` and the line without its end; raise `ValueError` for a damaged packed file."""
    packed = file.stat().st_size
    left, number = most(packed), 0
    try:
        with open_stream(file) as stream:
            while line := stream.readline(left + 1):
                left, number = left - len(line), number + 1
                if left < 0:
                    raise too_much(packed)
                yield f"{file}, line {number}", line.rstrip(b"\r\n")
    except DAMAGE as error:
        raise damaged(file, error) from error


def cells(where: str, line: bytes, columns: str) -> list[bytes]:
    """Split a line at tabs; raise `ValueError` unless it has the `columns`, named between spaces."""
    found = line.split(b"\t")
    wanted = columns.split()
    if len(found) != len(wanted):
        raise ValueError(f"{where} has {len(found)} columns between tabs, not {len(wanted)}: {', '.join(wanted)}")
    return found


def as_bytes(where: str, text: bytes) -> np.ndarray:
    """Return a document's bytes as tokens; raise `ValueError` if it is empty or not UTF-8 text."""
    if not text:
        raise ValueError(f"{where} holds no text")
    check_text(text, where)
    return np.frombuffer(text, np.uint8)


HELD_OUT = 0.1
"""Fraction of the training documents in the validation part."""
SIDES = ("train", "test")
SENTIMENT = {"0": "negative", "1": "positive", "neg": "negative", "pos": "positive"}
UNLABELLED = "unsup"
"""Name of IMDB's folder of reviews without labels."""


def texts(config: LabelledConfig, report: Progress) -> Contents:
    """Read `train/CLASS/*.txt` and `test/CLASS/*.txt`, or `*train.tsv` and `*test.tsv`, or a Hugging Face dataset.

    Lines of the TSV files have the label first and the text last. The validation part is a tenth of the training
    documents, chosen by a hash of their text; with validation=test it is the test part.
    """
    asked = config.path or ""
    read = _dataset if asked.startswith("hf:") else _folders if (Path(asked).expanduser() / "train").is_dir() else _tsv
    sides = {side: read(asked, side) for side in SIDES}
    labels = sorted({document.label for document in sides["train"]} - {""})
    found = {
        side: [
            (as_bytes(where, text), is_label(where, label, labels))
            for where, text, label in counted(documents, f"reading {side}", report, len(documents))
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
            f"{asked} holds neither the folders train and test nor a file *{side}.tsv[.xz|.gz|.bz2]"
        )
    found = []
    for where, line in lines(folder / matching[0]):
        label, tab, rest = line.partition(b"\t")
        if not tab:
            raise ValueError(f"{where} has no tab: it must be a label, a tab and a text, with other columns between")
        found.append(Text(where, rest.rpartition(b"\t")[2], label.decode(errors="replace")))
    return found


def hub_parts(asked: str) -> Any:
    """Load the parts of `hf:NAME` or `hf:NAME:CONFIG`; `ImportError` without the extra `datasets`."""
    name, _, config = asked.removeprefix("hf:").partition(":")
    return hub_dataset(asked, name, config or None)


def _dataset(asked: str, side: str) -> list[Text]:
    rows = hub_parts(asked)
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
        if label is None or (names and not 0 <= label < len(names)):  # datasets writes -1 for no label
            raise ValueError(f"{where} has no label; valid: {', '.join(names or ['one in each row'])}")
        found.append(Text(where, (text or "").encode(), names[label] if names else str(label)))
    return found


RELEASE = {"train": "new_aan_pairs.train.tsv", "held_out": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
PAPERS = "papers.jsonl"
PAIRS = {"train": "pairs_train.tsv", "held_out": "pairs_val.tsv", "test": "pairs_test.tsv"}
CLASSES = ("unrelated", "cited")
LABELS = {b"0": "0", b"1": "1", b"0.0": "0", b"1.0": "1"}


def paper_pairs(config: LabelledConfig, report: Progress) -> Contents:
    """Read pairs of papers, either in the release's layout or with papers and pairs in separate files.

    The release has `new_aan_pairs.{train,eval,test}.tsv`: label, two names, two texts. The other layout has
    `papers.jsonl` and `pairs_{train,val,test}.tsv`: label and two names.
    """
    folder = Path(config.path or "").expanduser()
    papers = find_packed(folder, PAPERS)
    if papers is None and find_packed(folder, RELEASE["train"]) is None:
        raise FileNotFoundError(f"{folder} holds neither {PAPERS} nor {RELEASE['train']}, plain or as .xz, .gz, .bz2")
    names = RELEASE if papers is None else PAIRS
    texts = _papers(papers) if papers is not None else None
    parts = {part: _pairs(needed(folder, name), texts, report) for part, name in names.items()}
    return Contents(dict(parts), CLASSES, 1 << 8)


def _papers(file: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for where, line in lines(file):
        try:
            row = parse_json(decoded(line, where), where)
            name, text = str(row["id"]), row["text"].encode()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is not JSON with an id and a text: {error!r}") from error
        if name in found:
            raise ValueError(f"{where}: the paper {name!r} occurs for the second time")
        found[name] = as_bytes(where, text)
    return found


def _pairs(file: Path, texts: dict[str, np.ndarray] | None, report: Progress) -> Pairs:
    """Read the pairs of a file, storing each document once; in the release, name and text together identify one."""
    documents: list[np.ndarray] = []
    numbers: dict[tuple[str, bytes], int] = {}
    index, labels = [], []
    for where, line in counted(lines(file), f"reading {file.name}", report):
        columns = "label first second" if texts is not None else "label first second first_text second_text"
        label, *rest = (_unquoted(cell) for cell in cells(where, line, columns))
        labels.append(is_label(where, LABELS.get(label, label.decode(errors="replace")), ("0", "1")))
        pair = []
        for i, name in enumerate(name.decode(errors="replace") for name in rest[:2]):
            key = name, rest[2 + i] if texts is None else b""
            if key not in numbers:
                if texts is None:
                    documents.append(as_bytes(f"{where}, text {i + 1}", rest[2 + i]))
                elif name in texts:
                    documents.append(texts[name])
                else:
                    raise ValueError(f"{where}: {PAPERS} has no paper {name[:40]!r}")
                numbers[key] = len(numbers)
            pair.append(numbers[key])
        index.append(pair)
    rows = np.array(index, dtype=np.int64).reshape(-1, 2)
    return Pairs(pieces((document, 0) for document in documents), rows, np.array(labels, dtype=np.int64))


def _unquoted(cell: bytes) -> bytes:
    """Remove the quotation marks around a cell and undouble those inside."""
    if len(cell) > 1 and cell[:1] == cell[-1:] == b'"':
        return cell[1:-1].replace(b'""', b'"')
    return cell


FILES = {"train": "basic_train.tsv", "held_out": "basic_val.tsv", "test": "basic_test.tsv"}
HEADER = "Source Target"


def listops_release(config: LabelledConfig, report: Progress) -> Contents:
    """Read the release's three files: a header, then an expression and its value in each line."""
    folder = Path(config.path or "").expanduser()
    files = {part: needed(folder, name) for part, name in FILES.items()}
    parts = {part: pieces(_rows(file, report)) for part, file in files.items()}
    return Contents(dict(parts), listops.CLASSES, listops.VOCAB_SIZE)


def _rows(file: Path, report: Progress) -> Iterator[tuple[np.ndarray, int]]:
    for number, (where, line) in enumerate(counted(lines(file), f"reading {file.name}", report)):
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
        yield tokens, is_label(where, target.decode(errors="replace"), listops.CLASSES)
