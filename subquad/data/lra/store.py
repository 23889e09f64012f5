"""Labelled sequences on disk: a token shard and a file of labels for each part, and what is common to all parts.

A folder holds `{train,held_out,test}.tokens` (`subquad.data.shards`), `{train,held_out,test}.labels` (uint16,
little-endian), for pairs `{train,held_out,test}.pairs` (two int64 each: the documents' numbers in the shard), and
`manifest.json` with the classes and the SHA-256 of all that. Sequences are whole: they are cut when they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from subquad.config import digest
from subquad.data.files import write_json
from subquad.data.shards import ShardWriter, TokenShard
from subquad.parsing import check_keys, read_json

VERSION = 1
PARTS = ("train", "held_out", "test")
_KINDS = {"version": int, "classes": list, "vocab_size": int, "pairs": bool, "source": str, "sha256": dict}
NO_LABELS = np.empty(0, np.int64)


class Labelled(NamedTuple):
    """Sequences and their labels: `tokens` in one piece, sequence i of `lengths[i]` tokens with `labels[i]`."""

    tokens: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray


class Pairs(NamedTuple):
    """Documents (their own labels are not read), and pairs of them: `which` `[N, 2]`, `labels` `[N]`."""

    documents: Iterable[Labelled]
    which: np.ndarray
    labels: np.ndarray


class Store:
    """The parts of a labelled data set, mapped from a folder.

    Raises `FileNotFoundError`, or `ValueError` for a folder of another version or one that is damaged.
    """

    def __init__(self, folder: Path) -> None:
        manifest = read_json(folder / "manifest.json")
        check_keys(manifest, _KINDS, str(folder / "manifest.json"))
        check_keys(manifest["sha256"], dict.fromkeys(PARTS, list), str(folder / "manifest.json"))
        if manifest["version"] != VERSION:
            raise ValueError(
                f"{folder} has version {manifest['version']} of labelled data, this release reads {VERSION}"
            )
        self.folder = folder
        self.classes: tuple[str, ...] = tuple(map(str, manifest["classes"]))
        self.vocab_size: int = manifest["vocab_size"]
        self.pairs: bool = manifest["pairs"]
        self.source: str = manifest["source"]
        self.fingerprint = digest([manifest[name] for name in ("classes", "vocab_size", "pairs", "sha256")])
        """Of all that the store holds, wherever it came from."""
        self.tokens: dict[str, TokenShard] = {}
        self.labels: dict[str, np.ndarray] = {}
        self.index: dict[str, np.ndarray] = {}
        """Which documents of the shard each example has, `[N, 1]` or `[N, 2]`."""
        for part in PARTS:
            self.tokens[part] = TokenShard(folder / f"{part}.tokens")
            checksums = [*manifest["sha256"][part], "", "", ""]
            self.labels[part] = _checked(folder / f"{part}.labels", checksums[1], "<u2")
            index = np.arange(len(self.labels[part]))
            if self.pairs:
                index = _checked(folder / f"{part}.pairs", checksums[2], "<i8")
            self._check(part, index)
            self.index[part] = index.reshape(len(self.labels[part]), -1)

    def _check(self, part: str, index: np.ndarray) -> None:
        """Raise `ValueError` where labels, documents and classes of a part do not fit each other."""
        labels, documents = self.labels[part], len(self.tokens[part].documents) - 1
        if not len(labels) or len(index) != len(labels) * (1 + self.pairs):
            raise ValueError(f"{self.folder} is damaged: {part} has {len(labels)} labels for {len(index)} documents")
        if index.min() < 0 or index.max() >= documents or labels.max() >= len(self.classes):
            raise ValueError(
                f"{self.folder} is damaged: {part} names documents up to {index.max()} of {documents}, classes up to "
                f"{labels.max()} of {len(self.classes)}"
            )
        if self.tokens[part].vocab_size != self.vocab_size:
            raise ValueError(
                f"{self.folder} is damaged: {part} has a vocabulary of {self.tokens[part].vocab_size}, not of "
                f"{self.vocab_size}"
            )


def write_store(
    folder: Path,
    parts: dict[str, Iterable[Labelled] | Pairs],
    *,
    classes: Sequence[str],
    vocab_size: int,
    source: str,
) -> None:
    """Fill the folder `folder`, which nobody reads yet; `parts` are read in their order.

    Raises `ValueError` for fewer than two classes, for one without an example in the training part and for a part
    without any.
    """
    checksums, pairs = {}, False
    for part, given in parts.items():
        pairs = isinstance(given, Pairs)
        documents = given.documents if isinstance(given, Pairs) else given
        labels, tokens = _write_tokens(folder / f"{part}.tokens", documents, vocab_size, f"{source}, part {part!r},")
        checksums[part] = [tokens]
        if isinstance(given, Pairs):
            labels = given.labels
        _check_classes(part, labels, classes, source)
        checksums[part].append(_write(folder / f"{part}.labels", labels.astype("<u2")))
        if isinstance(given, Pairs):
            checksums[part].append(_write(folder / f"{part}.pairs", given.which.astype("<i8")))
    values = {
        "version": VERSION,
        "source": source,
        "classes": list(classes),
        "vocab_size": vocab_size,
        "pairs": pairs,
        "sha256": checksums,
    }
    write_json(folder / "manifest.json", values)


def _check_classes(part: str, labels: np.ndarray, classes: Sequence[str], source: str) -> None:
    if len(classes) < 2:
        raise ValueError(f"{source}: there is nothing to tell apart, the only class is {', '.join(map(repr, classes))}")
    absent = [name for number, name in enumerate(classes) if not (labels == number).any()]
    if absent and part == "train":
        raise ValueError(f"{source}: no example to learn from has the class {', '.join(map(repr, absent))}")


def _write_tokens(path: Path, pieces: Iterable[Labelled], vocab_size: int, source: str) -> tuple[np.ndarray, str]:
    """Write a shard; the labels of its sequences and the SHA-256 of its tokens and lengths."""
    labels, total = [NO_LABELS], hashlib.sha256()
    made_by = digest(["labelled", vocab_size])
    with ShardWriter(path, vocab_size=vocab_size, tokenizer_hash=made_by, small=True) as writer:
        for piece in pieces:
            writer.add_documents(piece.tokens, piece.lengths)
            labels.append(piece.labels)
            total.update(piece.tokens.astype(writer.dtype).tobytes())
        if not writer.count:
            raise ValueError(f"{source} has no example")
        total.update(np.array(writer.starts, "<i8").tobytes())
    return np.concatenate(labels), total.hexdigest()


def _write(path: Path, array: np.ndarray) -> str:
    raw = array.tobytes()
    path.write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def _checked(path: Path, checksum: str, dtype: str) -> np.ndarray:
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != checksum:
        raise ValueError(f"{path} is damaged: its checksum is wrong")
    if len(raw) % np.dtype(dtype).itemsize:
        raise ValueError(f"{path} is damaged: {len(raw)} bytes are no whole number of values")
    return np.frombuffer(raw, dtype).astype(np.int64)
