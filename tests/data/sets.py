"""Sets of token shards that are small enough for a test: every token of them is another number."""

import numpy as np

from subquad.data.shards import HEAD_BYTES, ShardWriter
from subquad.data.token_set import TokenSet, write_index
from subquad.data.tokenizers import load_tokenizer, tokenizer_hash


def make_set(folder, shards):
    """A set of shards, each a list of the lengths of its documents; tokens count on from 0."""
    folder.mkdir(parents=True, exist_ok=True)
    made_by, entries, token = tokenizer_hash(load_tokenizer("bytes")), [], 0
    for number, lengths in enumerate(shards):
        with ShardWriter(folder / f"{number:05d}.tokens", vocab_size=70000, tokenizer_hash=made_by) as writer:
            for length in lengths:
                writer.add(np.arange(token, token + length))
                writer.end_document(text_bytes=length, words=1)
                token += length
        entries.append(writer.entry)
    load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
    write_index(folder, entries, tokenizer_hash=made_by, vocab_size=70000)
    return TokenSet(folder)


def flip(path, offset=HEAD_BYTES):
    """Change one bit of the tokens."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
