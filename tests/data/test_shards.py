import hashlib
import json
import os
import pickle
import re
import struct

import numpy as np
import pytest

from subquad.data import shards
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


def damage(path, offset, content):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


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


@pytest.mark.parametrize(("size", "dtype"), [(256, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_the_dtype_follows_the_vocabulary(tmp_path, size, dtype):
    shard = TokenShard(write(tmp_path / "s", [[size - 1]], size))
    assert shard.tokens.dtype == np.dtype(dtype)
    assert shard.tokens.tolist() == [size - 1]


def test_documents_without_text_are_written_at_once(tmp_path):
    with ShardWriter(tmp_path / "s", vocab_size=256, tokenizer_hash="a" * 64, small=True) as writer:
        writer.add_documents(np.array([1, 2, 255]), np.array([1, 2]))
        writer.add_documents(np.array([4]), np.array([1]))
    shard = TokenShard(tmp_path / "s")
    assert shard.tokens.dtype == np.uint8
    assert shard.tokens.tolist() == [1, 2, 255, 4]
    assert shard.documents.tolist() == [0, 1, 3, 4]
    with ShardWriter(tmp_path / "t", vocab_size=257, tokenizer_hash="a" * 64, small=True) as writer:
        writer.add_documents(np.array([256]), np.array([1]))
    assert TokenShard(tmp_path / "t").tokens.tolist() == [256]


def test_another_process_maps_the_file_again(path):
    data = pickle.dumps(TokenShard(path))
    assert len(data) < 500
    assert pickle.loads(data).tokens.tolist() == [1, 2, 3, 4, 5]  # noqa: S301


@pytest.mark.parametrize("wrong", [300, -1])
def test_an_id_outside_the_vocabulary_is_refused_and_leaves_no_shard(tmp_path, wrong):
    with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary of 300 tokens"):
        write(tmp_path / "s", [[1, wrong]])
    with pytest.raises(ValueError, match="is not a token shard"):
        TokenShard(tmp_path / "s")


def test_a_shard_without_tokens_is_refused(tmp_path):
    with pytest.raises(ValueError, match="would hold no token"):
        write(tmp_path / "s", [[]])


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.tokens"):
        TokenShard(tmp_path / "gone.tokens")


def test_another_file_is_no_shard(tmp_path):
    (tmp_path / "s").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(ValueError, match=r"s is not a token shard: it begins with b'PK.*, not with b'SUBQUADT'"):
        TokenShard(tmp_path / "s")


@pytest.mark.parametrize("version", [0, 2])
def test_another_format_version_is_refused_by_name(path, version):
    damage(path, len(MAGIC), struct.pack("<I", version))
    with pytest.raises(ValueError, match=f"has token shard format version {version}; this release reads version 1"):
        TokenShard(path)


@pytest.mark.parametrize("left", [HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 9, -1])
def test_a_truncated_shard(path, left):
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is cut short"):
        TokenShard(path)


def test_a_shard_that_is_too_long(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(
        ValueError, match=r"cut short or too long: 4131 bytes, where 5 tokens and 2 documents take 4130"
    ):
        TokenShard(path)


@pytest.mark.parametrize("offset", [HEAD_BYTES, HEAD_BYTES + 9, HEAD_BYTES + 10 + 8])
def test_changed_tokens_or_offsets(path, offset):
    damage(path, offset, b"\x07")
    with pytest.raises(ValueError, match="is damaged: the checksum of its tokens is wrong"):
        TokenShard(path)


def test_a_changed_head(path):
    place = path.read_bytes().index(b'"text_bytes": 20')
    damage(path, place, b'"text_bytes": 99')
    with pytest.raises(ValueError, match="is damaged: the checksum of its head is wrong"):
        TokenShard(path)


def test_a_head_with_other_keys(path):
    text = json.dumps({"tokens": 5}).encode()
    checksum = hashlib.sha256(text).digest()
    damage(path, 0, shards._PREFIX.pack(MAGIC, 1, len(text), checksum) + text)
    with pytest.raises(ValueError, match="is damaged: it has no 'documents'"):
        TokenShard(path)


def test_another_tokenizer_is_refused(path):
    with pytest.raises(
        ValueError, match=r"was made with the tokenizer aaaaaaaaaaaaaaaa\.\.\., not with this one, bbbb"
    ):
        TokenShard(path, tokenizer_hash="b" * 64)


def test_contents_are_hashed_once_for_each_file(path, monkeypatch):
    hashed = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or real(file, kind))
    for _ in range(3):
        TokenShard(path)
    assert hashed == [str(path)]
    os.utime(path, ns=(1, 1))
    TokenShard(path)
    assert hashed == [str(path)] * 2
