"""Read and write memory-mapped token shards.

A file is a head of 4,096 bytes, the tokens (uint8, uint16 or uint32), and the offsets at which documents begin (int64),
all little-endian. The head is a magic word, the format version, the length and the SHA-256 of the JSON that follows,
and this JSON: counts, dtype, the tokenizer's hash and the SHA-256 of everything after the head. Damaged or truncated
files are never opened.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from subquad.parsing import check_keys, decoded, parse_json

MAGIC = b"SUBQUADT"
FORMAT_VERSION = 1
HEAD_BYTES = 4096
_PREFIX = struct.Struct("<8sII32s")  # magic, version, bytes of JSON, SHA-256 of the JSON
_HEAD: dict[str, type] = dict.fromkeys(("documents", "text_bytes", "tokens", "vocab_size", "words"), int)
_HEAD |= dict.fromkeys(("dtype", "sha256", "tokenizer_hash"), str)
_verified: set[tuple[str, int, int, int]] = set()


class TokenShard:
    """The tokens of documents, mapped from a file.

    `tokens` is `[N]`; `documents` `[D + 1]` holds the offsets in `tokens` at which documents begin, then N.
    `text_bytes` and `words` count the UTF-8 bytes and whitespace-separated words of the text without separators.
    `vocab_size` and `tokenizer_hash` describe the tokenizer; `sha256` covers everything after the head.

    Raises `FileNotFoundError`, or `ValueError` for a file that is not a shard, has another format version, is truncated
    or damaged, or was not made with the tokenizer of `tokenizer_hash`. Contents are checked once per process.
    """

    tokens: np.ndarray
    documents: np.ndarray

    def __init__(self, path: str | Path, *, tokenizer_hash: str | None = None) -> None:
        self.path = Path(path)
        head = _read_head(self.path)
        if tokenizer_hash is not None and head["tokenizer_hash"] != tokenizer_hash:
            raise ValueError(
                f"{self.path} was made with the tokenizer {head['tokenizer_hash'][:16]}..., "
                f"not with this one, {tokenizer_hash[:16]}...; use the tokenizer that made it"
            )
        self.text_bytes: int = head["text_bytes"]
        self.words: int = head["words"]
        self.vocab_size: int = head["vocab_size"]
        self.tokenizer_hash: str = head["tokenizer_hash"]
        self.sha256: str = head["sha256"]
        count, documents, dtype = head["tokens"], head["documents"], np.dtype(head["dtype"])
        end = HEAD_BYTES + count * dtype.itemsize
        expected, stat = end + (documents + 1) * 8, self.path.stat()
        if stat.st_size != expected:
            raise ValueError(f"{self.path} is cut short or too long: it has {stat.st_size} bytes, not {expected}")
        self.tokens = np.memmap(self.path, dtype, mode="r", offset=HEAD_BYTES, shape=(count,))
        self.documents = np.memmap(self.path, "<i8", mode="r", offset=end, shape=(documents + 1,))
        seen = (str(self.path.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if seen not in _verified:
            self._verify()
            _verified.add(seen)

    def _verify(self) -> None:
        """Raise `ValueError` unless the contents match their checksum and the head."""
        with self.path.open("rb") as stream:
            stream.seek(HEAD_BYTES)
            if hashlib.file_digest(stream, "sha256").hexdigest() != self.sha256:
                raise ValueError(f"{self.path} is damaged: the checksum of its tokens is wrong")
        if (greatest := int(self.tokens.max())) >= self.vocab_size:
            raise ValueError(f"{self.path} is damaged: token {greatest} is outside the vocabulary of {self.vocab_size}")
        if self.documents[0] or self.documents[-1] != len(self) or (np.diff(self.documents) < 0).any():
            raise ValueError(f"{self.path} is damaged: its documents do not divide its {len(self)} tokens")

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple[type[TokenShard], tuple[Path]]:
        return TokenShard, (self.path,)  # another process maps the file again

    def __repr__(self) -> str:
        return f"TokenShard({str(self.path)!r}: {len(self):,} tokens, {len(self.documents) - 1:,} documents)"


def _read_head(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if not head.startswith(MAGIC):
        raise ValueError(f"{path} is not a token shard: it begins with {head[:8]!r}, not with {MAGIC!r}")
    if len(head) < HEAD_BYTES:
        raise ValueError(f"{path} is cut short: it has {len(head)} bytes, less than the {HEAD_BYTES} of a head")
    _, version, length, checksum = _PREFIX.unpack_from(head)
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {version}, this release reads {FORMAT_VERSION}: prepare it again")
    text = head[_PREFIX.size : _PREFIX.size + length]
    if hashlib.sha256(text).digest() != checksum:
        raise ValueError(f"{path} is damaged: the checksum of its head is wrong")
    values: dict[str, Any] = parse_json(decoded(text, str(path)), str(path))
    check_keys(values, _HEAD, str(path))
    if set(values) != set(_HEAD):
        raise ValueError(f"{path} is damaged: its head has the keys {sorted(values)}, not {sorted(_HEAD)}")
    if values["dtype"] not in ("|u1", "<u2", "<u4") or values["tokens"] < 1 or values["documents"] < 1:
        raise ValueError(
            f"{path} is damaged: its head has the dtype {values['dtype']!r}, {values['tokens']} tokens and "
            f"{values['documents']} documents"
        )
    return values


@dataclass(frozen=True)
class Entry:
    """A shard's entry in the index of a set."""

    name: str
    tokens: int
    documents: int
    text_bytes: int
    words: int
    sha256: str
    """SHA-256 of tokens and offsets, as in the shard's head."""


class ShardWriter:
    """Write a shard to `path`, a new temporary path as from `files.aside`.

    Call `add` for a document's tokens and `end_document` after the last, or `add_documents`. Leaving the `with` block
    writes the head; after an error it is missing, and the file cannot be opened. Tokens take two bytes, or four for a
    large vocabulary; with `small`, one byte if the vocabulary allows it.
    """

    def __init__(self, path: Path, *, vocab_size: int, tokenizer_hash: str, small: bool = False) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.tokenizer_hash = tokenizer_hash
        two_or_four = "<u2" if vocab_size <= 1 << 16 else "<u4"
        self.dtype = np.dtype("u1" if small and vocab_size <= 1 << 8 else two_or_four)
        self.count = self.text_bytes = self.words = 0
        self.starts = [0]
        self._sha256 = hashlib.sha256()
        self._stream: BinaryIO = path.open("wb")
        self._stream.write(bytes(HEAD_BYTES))

    def add(self, ids: np.ndarray) -> None:
        """Append token ids; raise `ValueError` for one outside the vocabulary."""
        if len(ids) and (ids.max() >= self.vocab_size or ids.min() < 0):
            wrong = int(ids.max()) if ids.max() >= self.vocab_size else int(ids.min())
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.vocab_size} tokens")
        self._write(ids.astype(self.dtype))
        self.count += len(ids)

    def end_document(self, text_bytes: int, words: int) -> None:
        """End a document of `text_bytes` UTF-8 bytes and `words` words."""
        self.starts.append(self.count)
        self.text_bytes += text_bytes
        self.words += words

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents without text, of `lengths` tokens each; raise as `add`."""
        ends = self.count + np.cumsum(lengths)
        self.add(ids)
        self.starts += ends.tolist()

    @property
    def entry(self) -> Entry:
        """The shard's index entry, complete after the `with` block."""
        sha256, documents = self._sha256.hexdigest(), len(self.starts) - 1
        return Entry(self.path.name, self.count, documents, self.text_bytes, self.words, sha256)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with self._stream:
            if error is None:
                self._finish()

    def _finish(self) -> None:
        if not self.count:
            raise ValueError(f"{self.path} would hold no token: the tokenizer yields none for this text")
        self._write(np.array(self.starts, dtype="<i8"))
        values = {
            "tokens": self.count,
            "documents": len(self.starts) - 1,
            "dtype": self.dtype.str,
            "vocab_size": self.vocab_size,
            "tokenizer_hash": self.tokenizer_hash,
            "text_bytes": self.text_bytes,
            "words": self.words,
            "sha256": self._sha256.hexdigest(),
        }
        text = json.dumps(values).encode()
        self._stream.seek(0)
        self._stream.write(_PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), hashlib.sha256(text).digest()) + text)

    def _write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        self._sha256.update(data)
        self._stream.write(data)
