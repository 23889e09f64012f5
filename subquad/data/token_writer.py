"""Write documents as token shards straight from their sources, holding about one document in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from subquad.config import check_at_least
from subquad.data.files import Progress, silent, write_json
from subquad.data.shards import Entry, ShardWriter
from subquad.data.sources import Source, no_text, open_source
from subquad.data.special_tokens import CONFIG, log_separator, tokenizer_config
from subquad.data.token_set import TokenSet, write_index
from subquad.data.tokenizers import Encoder, tokenizer_hash, vocab_size
from subquad.disk import aside


def write_tokens(
    folder: str | Path,
    texts: Sequence[str | Source],
    tokenizer: Tokenizer,
    *,
    shard_tokens: int,
    progress: Progress | None = None,
) -> TokenSet:
    """Write all documents of `texts`, in order, as shards of at least `shard_tokens` tokens (the last may have fewer).

    A text is a source, or a path in any form that `DataConfig.path` takes. A document is never split between shards and
    ends with the tokenizer's separator, if it has one. `folder` must not exist; it appears, with the shards,
    `index.json` and the tokenizer, when everything is written.

    Raises `FileExistsError` if `folder` exists, `ValueError` for `shard_tokens` below 1 and for texts without a
    document, and the errors of reading the texts.
    """
    folder = Path(folder)
    check_target(folder, shard_tokens)
    sources = [open_source(text) if isinstance(text, str) else text for text in texts]
    log_separator(tokenizer)
    with aside(folder) as temporary:
        temporary.mkdir()
        entries = _write_shards(temporary, sources, tokenizer, shard_tokens, progress or silent)
        tokenizer.save(str(temporary / "tokenizer.json"), pretty=False)
        write_json(temporary / CONFIG, tokenizer_config(tokenizer))
        write_index(temporary, entries, tokenizer_hash=tokenizer_hash(tokenizer), vocab_size=vocab_size(tokenizer))
    return TokenSet(folder)


def check_target(folder: str | Path, shard_tokens: int) -> None:
    """Check the arguments of `write_tokens` before any work; raise its `FileExistsError` or `ValueError`."""
    if Path(folder).exists():
        raise FileExistsError(f"{folder} exists already; choose another folder for the shards, or delete it")
    check_at_least(1, shard_tokens=shard_tokens)


def _write_shards(
    folder: Path, sources: Sequence[Source], tokenizer: Tokenizer, shard_tokens: int, progress: Progress
) -> list[Entry]:
    """Write the shards and return their index entries."""
    encoder, read = Encoder(tokenizer), 0

    def texts() -> Iterator[bytes]:
        nonlocal read
        for source in sources:
            for document in source.documents():
                read += 1
                yield document.text

    pieces = encoded(encoder, texts())
    entries: list[Entry] = []
    while (first := next(pieces, None)) is not None:
        with shard_writer(folder / f"{len(entries):05d}.tokens", tokenizer) as writer:
            for number, ids, size in chain([first], pieces):
                writer.add(ids)
                if size is None:
                    continue
                writer.add(encoder.separator)
                writer.end_document(*size)
                progress("encoding", number + 1, read)
                if writer.count >= shard_tokens:
                    break
        entries.append(writer.entry)
    if not entries:
        raise ValueError(no_text(", ".join(repr(source.asked) for source in sources)))
    return entries


def encoded(encoder: Encoder, texts: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray, tuple[int, int] | None]]:
    """Yield each document's number, its next token ids, and with the last ids its bytes and words, else None."""
    sizes: deque[tuple[int, int]] = deque()  # a queue, since the encoder reads documents ahead

    def sized() -> Iterator[bytes]:
        for text in texts:
            sizes.append((len(text), len(text.decode().split())))
            yield text

    for (number, ids), (following, _) in pairwise(chain(encoder.encode(sized()), [(-1, encoder.separator)])):
        yield number, ids, None if number == following else sizes.popleft()


def shard_writer(path: Path, tokenizer: Tokenizer) -> ShardWriter:
    """Return a shard writer for the tokens of `tokenizer`."""
    return ShardWriter(path, vocab_size=vocab_size(tokenizer), tokenizer_hash=tokenizer_hash(tokenizer))
