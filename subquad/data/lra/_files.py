"""Plain and packed files of a data set, read line by line; errors name the file and the line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from subquad.data.lra.store import Labelled, Pairs
from subquad.data.packed import DAMAGE, damaged, find_packed, most, open_stream, too_much
from subquad.data.sources import check_text

PIECE = 1 << 24
"""Bytes of text that are handed on at once."""


class Contents(NamedTuple):
    """What a reader finds: the parts, what the labels mean, and how many tokens there are."""

    parts: dict[str, Iterable[Labelled] | Pairs]
    classes: tuple[str, ...]
    vocab_size: int


class Text(NamedTuple):
    """A document, where it stands, and its label as it is written there."""

    where: str
    text: bytes
    label: str


def needed(folder: Path, name: str) -> Path:
    """As `find_packed`; `FileNotFoundError` where there is none."""
    if (file := find_packed(folder, name)) is None:
        raise FileNotFoundError(f"there is no {name} (or .xz, .gz, .bz2) in {folder}")
    return file


def lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Each line without its end, after `file, line N`; `ValueError` for a packed file that is damaged."""
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
    """The columns of a line between tabs; `ValueError` for another number of them."""
    found = line.split(b"\t")
    wanted = columns.split()
    if len(found) != len(wanted):
        raise ValueError(f"{where} has {len(found)} columns between tabs, not the {len(wanted)}: {', '.join(wanted)}")
    return found


def is_label(where: str, label: str, classes: Iterable[str]) -> int:
    """The number of the class `label`; `ValueError` for one that is none."""
    valid = list(classes)
    if not label:
        raise ValueError(f"{where} has no label; valid: {', '.join(valid)}")
    if label not in valid:
        raise ValueError(f"{where} has the label {label[:40]!r}; valid: {', '.join(valid)}")
    return valid.index(label)


def as_bytes(where: str, text: bytes) -> np.ndarray:
    """A document's bytes as tokens; `ValueError` for one that is empty or not UTF-8 text."""
    if not text:
        raise ValueError(f"{where} holds no text")
    check_text(text, where)
    return np.frombuffer(text, np.uint8)


def pieces(found: Iterable[tuple[np.ndarray, int]]) -> Iterator[Labelled]:
    """Sequences with their labels, some megabytes at once."""
    tokens: list[np.ndarray] = []
    labels: list[int] = []
    size = 0
    for sequence, label in found:
        tokens.append(sequence)
        labels.append(label)
        size += len(sequence)
        if size >= PIECE:
            yield _joined(tokens, labels)
            tokens, labels, size = [], [], 0
    if tokens:
        yield _joined(tokens, labels)


def _joined(tokens: list[np.ndarray], labels: list[int]) -> Labelled:
    return Labelled(np.concatenate(tokens), np.array([len(sequence) for sequence in tokens]), np.array(labels))
