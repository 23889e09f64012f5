"""Pairs of papers as bytes: does one cite the other? In the release of Long Range Arena, or papers and pairs apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from subquad.data.lra._files import Contents, as_bytes, cells, is_label, lines, needed, pieces
from subquad.data.lra.store import Pairs
from subquad.data.packed import find_packed
from subquad.parsing import decoded, parse_json

if TYPE_CHECKING:
    from subquad.data.files import Progress
    from subquad.data.labelled_config import LabelledConfig

RELEASE = {"train": "new_aan_pairs.train.tsv", "held_out": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
PAPERS = "papers.jsonl"
PAIRS = {"train": "pairs_train.tsv", "held_out": "pairs_val.tsv", "test": "pairs_test.tsv"}
CLASSES = ("unrelated", "cited")
LABELS = {b"0": "0", b"1": "1", b"0.0": "0", b"1.0": "1"}


def contents(config: LabelledConfig, report: Progress) -> Contents:
    """`new_aan_pairs.{train,eval,test}.tsv`: label, two names, two texts; or `papers.jsonl` and
    `pairs_{train,val,test}.tsv`: label and two names."""
    folder = Path(config.path or "").expanduser()
    papers = find_packed(folder, PAPERS)
    if papers is None and find_packed(folder, RELEASE["train"]) is None:
        raise FileNotFoundError(
            f"{folder} holds neither {PAPERS} with {PAIRS['train']} nor {RELEASE['train']} (or .xz, .gz, .bz2)"
        )
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
            raise ValueError(f"{where}: the paper {name!r} stands there for the second time")
        found[name] = as_bytes(where, text)
    return found


def _pairs(file: Path, texts: dict[str, np.ndarray] | None, report: Progress) -> Pairs:
    """The pairs of a file; each document is kept once. In the release a name with another text is another document."""
    documents: list[np.ndarray] = []
    numbers: dict[tuple[str, bytes], int] = {}
    index, labels = [], []
    for number, (where, line) in enumerate(lines(file)):
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
        if number % 1000 == 0:
            report(f"reading {file.name}", number, number)
    rows = np.array(index, dtype=np.int64).reshape(-1, 2)
    return Pairs(pieces((document, 0) for document in documents), rows, np.array(labels, dtype=np.int64))


def _unquoted(cell: bytes) -> bytes:
    """A cell without the quotation marks around it; marks inside are doubled there."""
    if len(cell) > 1 and cell[:1] == cell[-1:] == b'"':
        return cell[1:-1].replace(b'""', b'"')
    return cell
