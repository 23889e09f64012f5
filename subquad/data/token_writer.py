"""Text of any size to a set of token shards, in the memory of one document."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from tokenizers import Tokenizer

from subquad.data.files import Progress, aside, silent
from subquad.data.shards import ShardWriter
from subquad.data.sources import Source, open_source
from subquad.data.token_set import Entry, TokenSet, write_index
from subquad.data.tokenizers import Encoder, tokenizer_hash, vocab_size


def write_tokens(
    folder: str | Path,
    texts: Sequence[str | Source],
    tokenizer: Tokenizer,
    *,
    shard_tokens: int,
    progress: Progress | None = None,
) -> TokenSet:
    """Write all documents of some texts, in order, as shards of at least `shard_tokens` tokens each but the last.

    A text is a path as `DataConfig.path` has it, or a source. A document is never divided between shards and ends with
    the tokenizer's separator, if it has one. The folder, which must not exist, appears when everything is written: the
    shards, `index.json` and `tokenizer.json`.

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
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")


def _write_shards(
    folder: Path, sources: Sequence[Source], tokenizer: Tokenizer, shard_tokens: int, progress: Progress
) -> list[Entry]:
    """The shards, and a line of the index for each."""
    encoder = Encoder(tokenizer)
    sizes: deque[tuple[int, int]] = deque()  # bytes and words of the documents that were read and not yet written
    entries: list[Entry] = []
    writer: ShardWriter | None = None
    current = -1
    with ExitStack() as unfinished:
        for number, ids in encoder.encode(_texts(sources, sizes)):
            if writer is not None and number != current:
                _end_document(writer, encoder, sizes)
                progress("encoding", number, number + len(sizes))
                if writer.count >= shard_tokens:
                    entries.append(_closed(writer, unfinished))
                    writer = None
            if writer is None:
                path = folder / f"{len(entries):05d}.tokens"
                writer = ShardWriter(path, vocab_size=vocab_size(tokenizer), tokenizer_hash=tokenizer_hash(tokenizer))
                unfinished.push(writer)
            writer.add(ids)
            current = number
        if writer is None:
            raise ValueError(f"there is no text at all in {', '.join(repr(source.asked) for source in sources)}")
        _end_document(writer, encoder, sizes)
        entries.append(_closed(writer, unfinished))
    return entries


def _end_document(writer: ShardWriter, encoder: Encoder, sizes: deque[tuple[int, int]]) -> None:
    writer.add(encoder.separator)
    text_bytes, words = sizes.popleft()
    writer.end_document(text_bytes=text_bytes, words=words)


def _closed(writer: ShardWriter, unfinished: ExitStack) -> Entry:
    """The line of the index of a shard that is finished here."""
    unfinished.pop_all().close()
    return Entry(
        name=writer.path.name,
        tokens=writer.count,
        documents=len(writer.starts) - 1,
        text_bytes=writer.text_bytes,
        words=writer.words,
        sha256=writer.sha256,
    )


def _texts(sources: Sequence[Source], sizes: deque[tuple[int, int]]) -> Iterator[bytes]:
    for source in sources:
        for document in source.documents():
            sizes.append((len(document.text), len(document.text.decode().split())))
            yield document.text
