"""Documents laid out one after another in a scratch file: read once, checked, then visited as often as needed."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from tokenizers import Tokenizer

from subquad.data.shards import ShardWriter
from subquad.data.sources import Source
from subquad.data.tokenizers import Encoder, tokenizer_hash, vocab_size


class Part(NamedTuple):
    """A document, or a part of one: its name (empty for a dataset's row) and its bytes in the spool."""

    name: str
    start: int
    end: int


class Spool:
    """A scratch file of documents. `parts` and `keys` hold one entry a document, in order of reading."""

    def __init__(self, path: Path) -> None:
        self.parts: list[Part] = []
        self.keys: list[bytes] = []
        self._stream = path.open("w+b")
        self._map: mmap.mmap | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._map is not None:
            self._map.close()
        self._stream.close()

    def __getitem__(self, part: Part) -> bytes:
        if self._map is None:
            raise ValueError("nothing has been read into the spool yet")
        return self._map[part.start : part.end]

    def read(self, source: Source, progress: Callable[[str, int, int], None]) -> None:
        """Append all documents of `source`; `ValueError` where it has none."""
        before, end = len(self.parts), self._stream.seek(0, 2)
        for number, document in enumerate(source.documents(), 1):
            self._stream.write(document.text)
            self.parts.append(Part(document.name if source.names else "", end, end + len(document.text)))
            self.keys.append(document.key)
            end += len(document.text)
            progress("reading", number, max(number, len(source.names)))
        if len(self.parts) == before:
            raise ValueError(f"there is no text at all in {source.asked!r}")
        self._stream.flush()
        if self._map is not None:
            self._map.close()
        self._map = mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_READ)


def write_shard(
    path: Path, spool: Spool, parts: list[Part], tokenizer: Tokenizer, progress: Callable[[str, int, int], None]
) -> None:
    """Write the tokens of `parts` as a shard, with the tokenizer's separator, if it has one, between documents."""
    encoder = Encoder(tokenizer)
    total = sum(part.end - part.start for part in parts)
    with ShardWriter(path, vocab_size=vocab_size(tokenizer), tokenizer_hash=tokenizer_hash(tokenizer)) as writer:

        def end_document(part: Part) -> None:
            text = spool[part]
            writer.end_document(text_bytes=len(text), words=len(text.decode().split()))
            progress("encoding", writer.text_bytes, total)

        current = 0
        for number, ids in encoder.encode(spool[part] for part in parts):
            if number != current:
                writer.add(encoder.separator)
                end_document(parts[current])
                current = number
            writer.add(ids)
        end_document(parts[current])
