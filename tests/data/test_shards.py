"""Token shards: what is written is read, and nothing damaged is opened."""

import hashlib
import os
import pickle
import re
import struct

import numpy as np
import pytest

from subquad.data.shards import HEAD_BYTES, MAGIC, ShardWriter, TokenShard


def write(path, documents=((1, 2, 3), (4, 5)), vocab_size=300):
    with ShardWriter(path, vocab_size=vocab_size, tokenizer_hash="a" * 64) as writer:
        for ids in documents:
            writer.add(np.array(ids))
            writer.end_document(text_bytes=10, words=2)
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "some.tokens")


def test_what_is_written_is_read(path):
    shard = TokenShard(path, tokenizer_hash="a" * 64)
    assert len(shard) == 5
    assert shard.tokens.tolist() == [1, 2, 3, 4, 5]
    assert shard.documents.tolist() == [0, 3, 5]
    assert (shard.text_bytes, shard.words, shard.vocab_size, shard.tokenizer_hash) == (20, 4, 300, "a" * 64)
    assert isinstance(shard.tokens, np.memmap)
    assert repr(shard).endswith("some.tokens': 5 tokens, 2 documents)")
    with pytest.raises(ValueError, match="read-only"):
        shard.tokens[0] = 9
    with pytest.raises(ValueError, match=r"made with the tokenizer aaaaaaaaaaaaaaaa\.\.\., not with this one, bbbb"):
        TokenShard(path, tokenizer_hash="b" * 64)
    with pytest.raises(FileNotFoundError, match=r"gone\.tokens"):
        TokenShard(path.with_name("gone.tokens"))
    pickled = pickle.dumps(shard)  # another process maps the file again
    assert len(pickled) < 500
    assert pickle.loads(pickled).tokens.tolist() == [1, 2, 3, 4, 5]  # noqa: S301


@pytest.mark.parametrize(("size", "small", "dtype"), [
    (256, False, "<u2"), (65536, False, "<u2"), (65537, False, "<u4"), (256, True, "u1"), (257, True, "<u2"),
])  # fmt: skip
def test_the_dtype_follows_the_vocabulary(tmp_path, size, small, dtype):
    with ShardWriter(tmp_path / "s", vocab_size=size, tokenizer_hash="a" * 64, small=small) as writer:
        writer.add_documents(np.array([1, 2, size - 1]), np.array([1, 2]))
        writer.add_documents(np.array([4]), np.array([1]))
    shard = TokenShard(tmp_path / "s")
    assert shard.tokens.dtype == np.dtype(dtype)
    assert shard.tokens.tolist() == [1, 2, size - 1, 4]
    assert shard.documents.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize(("ids", "message"), [
    ([1, 300], "token id 300 is outside the vocabulary of 300 tokens"),
    ([1, -1], "token id -1 is outside the vocabulary of 300 tokens"),
    ([], "would hold no token"),
])  # fmt: skip
def test_wrong_tokens_are_refused_and_leave_no_shard(tmp_path, ids, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "s", [ids])
    with pytest.raises(ValueError, match="is not a token shard"):
        TokenShard(tmp_path / "s")


def put(place, content):
    return lambda raw: raw[:place] + content + raw[place + len(content) :]


@pytest.mark.parametrize(("change", "message"), [
    (lambda raw: b"PK\x03\x04 and so on", r"is not a token shard: it begins with b'PK.*, not with b'SUBQUADT'"),
    (put(len(MAGIC), struct.pack("<I", 0)), "has format version 0, this release reads 1: prepare it again"),
    (lambda raw: raw[: HEAD_BYTES - 1], "is cut short: it has 4095 bytes, less than the 4096 of a head"),
    (lambda raw: raw[:HEAD_BYTES], "is cut short or too long: it has 4096 bytes, not 4130"),
    (lambda raw: raw + b"\0", "is cut short or too long: it has 4131 bytes, not 4130"),
    (put(HEAD_BYTES, b"\7"), "is damaged: the checksum of its tokens is wrong"),
    (put(HEAD_BYTES + 18, b"\7"), "is damaged: the checksum of its tokens is wrong"),
    (lambda raw: raw.replace(b'text_bytes": 20', b'text_bytes": 99'), "is damaged: the checksum of its head is wrong"),
])  # fmt: skip
def test_a_damaged_shard_is_refused_by_name(path, change, message):
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} {message}"):
        TokenShard(path)


def test_contents_are_hashed_once_for_each_file(path, monkeypatch):
    hashed, real = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or real(file, kind))
    for _ in range(3):
        TokenShard(path)
    assert hashed == [str(path)]
    os.utime(path, ns=(1, 1))
    TokenShard(path)
    assert hashed == [str(path)] * 2
