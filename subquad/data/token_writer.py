"""Documents to token shards: through a scratch file where they are read more than once, or straight from a source."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from subquad.config import check_at_least
from subquad.data.files import Progress, aside, silent
from subquad.data.shards import Entry, ShardWriter
from subquad.data.sources import Source, open_source
from subquad.data.token_set import TokenSet, write_index
from subquad.data.tokenizers import Encoder, tokenizer_hash, vocab_size


class Part(NamedTuple):
    """A document, or a part of one: its name (empty for a dataset's row) and its bytes in the spool."""

    name: str
    start: int
    end: int


class Spool:
    """A scratch file of documents, read once and checked, then visited as often as needed.

    `parts` and `keys` hold one entry a document, in order of reading.
    """

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

    def read(self, source: Source, progress: Progress) -> None:
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


def write_shard(path: Path, spool: Spool, parts: list[Part], tokenizer: Tokenizer, progress: Progress) -> None:
    """Write the tokens of `parts` as a shard, with the tokenizer's separator, if it has one, between documents."""
    encoder = Encoder(tokenizer)
    total = sum(part.end - part.start for part in parts)
    with _writer(path, tokenizer) as writer:
        for number, ids, last in _encoded(encoder, (spool[part] for part in parts)):
            writer.add(ids)
            if not last:
                continue
            if number + 1 < len(parts):
                writer.add(encoder.separator)
            text = spool[parts[number]]
            writer.end_document(text_bytes=len(text), words=_words(text))
            progress("encoding", writer.text_bytes, total)


def write_tokens(
    folder: str | Path,
    texts: Sequence[str | Source],
    tokenizer: Tokenizer,
    *,
    shard_tokens: int,
    progress: Progress | None = None,
) -> TokenSet:
    """Write all documents of some texts, in order, as shards of at least `shard_tokens` tokens each but the last.

    A text is a path as `DataConfig.path` has it, or a source; the memory of one document is enough. A document is never
    divided between shards and ends with the tokenizer's separator, if it has one. The folder, which must not exist,
    appears when everything is written: the shards, `index.json` and `tokenizer.json`.

    Raises `FileExistsError` for a folder that is there, `ValueError` for fewer than one token in a shard and where
    there is no text at all, and as reading the texts does.
    """
    folder = Path(folder)
    check_target(folder, shard_tokens)
    sources = [open_source(text) if isinstance(text, str) else text for text in texts]
    with aside(folder) as temporary:
        temporary.mkdir()
        entries = _write_shards(temporary, sources, tokenizer, shard_tokens, progress or silent)
        tokenizer.save(str(temporary / "tokenizer.json"), pretty=False)
        write_index(temporary, entries, tokenizer_hash=tokenizer_hash(tokenizer), vocab_size=vocab_size(tokenizer))
    return TokenSet(folder)


def check_target(folder: str | Path, shard_tokens: int) -> None:
    """Raise `FileExistsError` or `ValueError` where `write_tokens` would, before any work."""
    if Path(folder).exists():
        raise FileExistsError(f"{folder} exists already; choose another folder for the shards, or delete it")
    check_at_least(1, shard_tokens=shard_tokens)


def _write_shards(
    folder: Path, sources: Sequence[Source], tokenizer: Tokenizer, shard_tokens: int, progress: Progress
) -> list[Entry]:
    """Write the shards; return a line of the index for each."""
    encoder = Encoder(tokenizer)
    sizes: deque[tuple[int, int]] = deque()  # bytes and words of the documents that were read and not yet written
    pieces = _encoded(encoder, _sized(sources, sizes))
    entries: list[Entry] = []
    while (first := next(pieces, None)) is not None:
        with _writer(folder / f"{len(entries):05d}.tokens", tokenizer) as writer:
            for number, ids, last in chain([first], pieces):
                writer.add(ids)
                if not last:
                    continue
                writer.add(encoder.separator)
                text_bytes, words = sizes.popleft()
                writer.end_document(text_bytes=text_bytes, words=words)
                progress("encoding", number + 1, number + 1 + len(sizes))
                if writer.count >= shard_tokens:
                    break
        entries.append(writer.entry)
    if not entries:
        raise ValueError(f"there is no text at all in {', '.join(repr(source.asked) for source in sources)}")
    return entries


def _encoded(encoder: Encoder, texts: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Yield a document's number, its next tokens, and whether they are its last."""
    for (number, ids), (following, _) in pairwise(chain(encoder.encode(texts), [(-1, encoder.separator)])):
        yield number, ids, number != following


def _sized(sources: Sequence[Source], sizes: deque[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the text of each document, and append its bytes and words to `sizes`."""
    for source in sources:
        for document in source.documents():
            sizes.append((len(document.text), _words(document.text)))
            yield document.text


def _words(text: bytes) -> int:
    return len(text.decode().split())


def _writer(path: Path, tokenizer: Tokenizer) -> ShardWriter:
    return ShardWriter(path, vocab_size=vocab_size(tokenizer), tokenizer_hash=tokenizer_hash(tokenizer))
