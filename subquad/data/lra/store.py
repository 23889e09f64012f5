"""Store labelled sequences on disk, and read them cut to a length and padded.

A folder holds `{train,held_out,test}.tokens` (`subquad.data.shards`), `{train,held_out,test}.labels` (uint16,
little-endian), for pairs `{train,held_out,test}.pairs` (two little-endian int64 each, the documents' numbers in the
shard), and `manifest.json` with the classes and the SHA-256 of all these. Sequences are stored whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.config import digest
from subquad.data.files import Progress, cache_folder, fill_once, write_json
from subquad.data.shards import ShardWriter, TokenShard
from subquad.data.windows import check_index
from subquad.parsing import check_keys, read_json

Item = TypeVar("Item")
VERSION = 1
PARTS = ("train", "held_out", "test")
_KINDS = {"version": int, "classes": list, "vocab_size": int, "pairs": bool, "source": str, "sha256": dict}
NO_LABELS = np.empty(0, np.int64)
PIECE = 1 << 24
"""Tokens that `pieces` gathers before it yields them."""


class Labelled(NamedTuple):
    """Sequences and their labels: `tokens` of all joined, sequence i with `lengths[i]` tokens and `labels[i]`."""

    tokens: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray


class Pairs(NamedTuple):
    """Documents (with unused labels), and pairs of them: their numbers `which` `[N, 2]`, `labels` `[N]`."""

    documents: Iterable[Labelled]
    which: np.ndarray
    labels: np.ndarray


class Contents(NamedTuple):
    """A data set as read: its parts, the names of its labels and the size of its vocabulary."""

    parts: dict[str, Iterable[Labelled] | Pairs]
    classes: tuple[str, ...]
    vocab_size: int


class Store:
    """The parts of a labelled data set, mapped from a folder; `ValueError` for a damaged one or another version."""

    def __init__(self, folder: Path) -> None:
        manifest = read_json(folder / "manifest.json")
        check_keys(manifest, _KINDS, str(folder / "manifest.json"))
        check_keys(manifest["sha256"], dict.fromkeys(PARTS, list), str(folder / "manifest.json"))
        if manifest["version"] != VERSION:
            raise ValueError(f"{folder} has format version {manifest['version']}, this release reads version {VERSION}")
        self.folder = folder
        self.classes: tuple[str, ...] = tuple(map(str, manifest["classes"]))
        self.vocab_size: int = manifest["vocab_size"]
        self.pairs: bool = manifest["pairs"]
        self.source: str = manifest["source"]
        self.fingerprint = digest([manifest[name] for name in ("classes", "vocab_size", "pairs", "sha256")])
        """Hash of everything in the store but its source."""
        self.tokens: dict[str, TokenShard] = {}
        self.labels: dict[str, np.ndarray] = {}
        self.index: dict[str, np.ndarray] = {}
        """Numbers of each example's documents in the shard, `[N, 1]` or `[N, 2]`."""
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
        """Raise `ValueError` if labels, documents and classes of a part do not fit each other."""
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
                f"{self.folder} is damaged: {part} does not have the vocabulary of {self.vocab_size} tokens"
            )


def write_store(
    folder: Path, parts: dict[str, Iterable[Labelled] | Pairs], *, classes: Sequence[str], vocab_size: int, source: str
) -> None:
    """Write a store into the new folder `folder`, consuming `parts` in order.

    Raises `ValueError` for fewer than two classes, a class without a training example, and an empty part.
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
    values = {"version": VERSION, "source": source, "classes": list(classes), "vocab_size": vocab_size}
    write_json(folder / "manifest.json", {**values, "pairs": pairs, "sha256": checksums})


def _check_classes(part: str, labels: np.ndarray, classes: Sequence[str], source: str) -> None:
    if len(classes) < 2:
        raise ValueError(f"{source}: at least two classes are needed, got {', '.join(map(repr, classes)) or 'none'}")
    absent = [name for number, name in enumerate(classes) if not (labels == number).any()]
    if absent and part == "train":
        raise ValueError(f"{source}: no training example has the class {', '.join(map(repr, absent))}")


def _write_tokens(path: Path, pieces: Iterable[Labelled], vocab_size: int, source: str) -> tuple[np.ndarray, str]:
    """Write a shard and return the labels of its sequences and the SHA-256 of its tokens and offsets."""
    labels = [NO_LABELS]
    made_by = digest(["labelled", vocab_size])
    with ShardWriter(path, vocab_size=vocab_size, tokenizer_hash=made_by, small=True) as writer:
        for piece in pieces:
            writer.add_documents(piece.tokens, piece.lengths)
            labels.append(piece.labels)
        if not writer.count:
            raise ValueError(f"{source} has no example")
    return np.concatenate(labels), writer.entry.sha256


def _write(path: Path, array: np.ndarray) -> str:
    raw = array.tobytes()
    path.write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def _checked(path: Path, checksum: str, dtype: str) -> np.ndarray:
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != checksum:
        raise ValueError(f"{path} is damaged: its checksum is wrong")
    if len(raw) % np.dtype(dtype).itemsize:
        raise ValueError(f"{path} is damaged: its {len(raw)} bytes are not a multiple of the size of a value")
    return np.frombuffer(raw, dtype).astype(np.int64)


def pieces(found: Iterable[tuple[np.ndarray, int]]) -> Iterator[Labelled]:
    """Gather sequences with their labels into pieces of about `PIECE` tokens."""
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


def is_label(where: str, label: str, classes: Iterable[str]) -> int:
    """Return the number of the class `label`; raise `ValueError` for a missing or unknown label."""
    valid = list(classes)
    if not label:
        raise ValueError(f"{where} has no label; valid: {', '.join(valid)}")
    if label not in valid:
        raise ValueError(f"{where} has the label {label[:40]!r}; valid: {', '.join(valid)}")
    return valid.index(label)


def counted(items: Iterable[Item], what: str, report: Progress, total: int | None = None) -> Iterator[Item]:
    """Yield `items`, and report the progress of `what` at every thousandth; `total` None means unknown."""
    for number, item in enumerate(items):
        if number % 1000 == 0:
            report(what, number, number if total is None else total)
        yield item


def kept(cache: str | None, name: str, fill: Callable[[Path], None]) -> Store:
    """Open the store at `cache/name`, after `fill(folder)` if it is missing or damaged."""
    folder = cache_folder(cache) / name
    fill_once(folder, lambda: Store(folder), fill)
    return Store(folder)


class Sequences(Dataset[dict[str, Tensor]]):
    """The sequences `chosen` of one part of a store, as items of a `LabelledCorpus`."""

    def __init__(self, store: Store, part: str, length: int, chosen: np.ndarray) -> None:
        self.shard, self.pairs, self.length, self.chosen = store.tokens[part], store.pairs, length, chosen
        self.labels, self.index = store.labels[part][chosen], store.index[part][chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        check_index(self, index, "example")
        item = {"labels": torch.tensor(int(self.labels[index]))}
        for i, name in enumerate(("", "pair_")[: 1 + self.pairs]):
            tokens = self.sequence(index, i)
            padded = np.zeros(self.length, dtype=np.int64)
            padded[: len(tokens)] = tokens
            item[f"{name}input_ids"] = torch.from_numpy(padded)
            item[f"{name}attention_mask"] = (torch.arange(self.length) < len(tokens)).long()
        return item

    def sequence(self, index: int, second: int = 0) -> np.ndarray:
        """Return the tokens of sequence `index` without padding, of a pair those of document `second`, 0 or 1."""
        document = int(self.index[index, second])
        start, end = self.shard.documents[document : document + 2]
        return self.shard.tokens[start : min(int(end), int(start) + self.length)]

    @property
    def full_lengths(self) -> np.ndarray:
        """Lengths of the sequences before they are truncated, `[N, 1]`, or `[N, 2]` for pairs."""
        return np.diff(self.shard.documents)[self.index]

    @property
    def cut(self) -> int:
        """Number of sequences truncated to `length`."""
        return int((self.full_lengths > self.length).sum())


def choose(labels: np.ndarray, wanted: int | None, seed: int) -> np.ndarray:
    """Return the sorted indices of `wanted` examples (None: all), classes in proportion; `ValueError` for too few."""
    if wanted is None or wanted == len(labels):
        return np.arange(len(labels))
    if wanted > len(labels):
        raise ValueError(f"the data set has {len(labels):,} such examples, not {wanted:,}")
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    rank = np.empty(len(labels))
    for label in np.unique(labels):
        mine = order[labels[order] == label]
        rank[mine] = (np.arange(len(mine)) + 0.5) / len(mine)  # the lowest ranks hold each class in proportion
    return np.sort(order[np.argsort(rank[order], kind="stable")[:wanted]])
