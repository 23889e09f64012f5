"""Tokenizers lose nothing, piece by piece too; files that are none are named."""

import re
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from subquad.data import tokenizers as module
from subquad.data.special_tokens import separator_id
from subquad.data.tokenizers import Encoder, bytes_tokenizer, encode_text, load_tokenizer
from subquad.data.vocabularies import SEPARATOR, TRAINED, make_tokenizer, train_bpe, train_unigram

TEXTS = ["def f(x):\n    return x + 1\n", "The cat didn't sit; it's 42.\n\n\tThe  end ", "größe 漢字 \U0001f389"] * 3
BYTES, BPE, UNIGRAM = bytes_tokenizer(), train_bpe(TEXTS, 300), train_unigram(TEXTS, 300)


def encode(tokenizer, *texts):
    return np.concatenate([ids for _, ids in Encoder(tokenizer).encode([text.encode() for text in texts])]).tolist()


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, UNIGRAM], ids=["bytes", "bpe", "unigram"])
@settings(max_examples=50)
@given(text=st.text())
@example(text=f"a{SEPARATOR}b")  # a separator that a document spells out is text
def test_tokenizers_lose_nothing_and_bytes_are_their_own_ids(tokenizer, text):
    fed = encode(tokenizer, text)
    assert tokenizer is not BYTES or fed == tokenizer.encode(text).ids == list(text.encode())
    assert separator_id(tokenizer) not in fed
    assert tokenizer.decode(fed) == tokenizer.decode(encode_text(tokenizer, text), skip_special_tokens=False) == text


def test_sizes_and_separators():
    assert [module.vocab_size(tokenizer) for tokenizer in (BYTES, BPE)] == [256, 300]
    assert [Encoder(tokenizer).separator.tolist() for tokenizer in (BYTES, BPE, UNIGRAM)] == [[], [0], [0]]
    assert separator_id(BPE) in BPE.encode(f"a{SEPARATOR}b").ids
    assert module.vocab_size(Tokenizer(models.WordLevel(vocab={"a": 0, "b": 9}, unk_token="a"))) == 10, "gaps count"


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["word", " ", "  ", "\n", "\n\n", "\t", "é", "漢字", "1", "'s", "!?", "\u2028"])))
def test_pieces_do_not_change_tokens(parts):
    text = "".join(parts)
    with mock.patch.object(module, "_PIECE", 1):
        cut = [piece.decode() for piece in module.pieces(text.encode())]
    assert "".join(cut) == text
    for tokenizer in (BPE, UNIGRAM):
        assert [id for piece in cut for id in tokenizer.encode(piece).ids] == tokenizer.encode(text).ids


def test_long_texts_are_cut_for_trained_tokenizers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 1000)
    text = b"some words and\nlines\n" * 200
    assert len(list(module.pieces(text))) == 5
    assert [number for number, _ in Encoder(BPE).encode([text, b"short"])] == [0, 0, 0, 0, 0, 1]
    wordpiece = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "[SEP]": 1, "the": 2, "cat": 3, "##s": 4}))
    wordpiece.pre_tokenizer = pre_tokenizers.Whitespace()
    wordpiece.normalizer = normalizers.Lowercase()
    wordpiece.enable_truncation(2)
    wordpiece.enable_padding(length=9)
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert encode(tokenizer, "The cats see the cat") == [2, 3, 4, 0, 2, 3]
    assert Encoder(tokenizer).separator.tolist() == [1]
    assert [number for number, _ in Encoder(tokenizer).encode([text, b"short"])] == [0, 1]


def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    for name, message in (
        ("byte", r"unknown tokenizer 'byte'.*did you mean 'bytes'\? valid: PATH/tokenizer.json"),
        ("bpe", "the tokenizer 'bpe' has to be trained first; valid here: bytes or a tokenizer.json"),
        (tmp_path, r"/tokenizer\.json is not a tokenizer\.json: "),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(name)


@pytest.mark.parametrize("name", ["bytes", *TRAINED])
def test_carriage_returns_are_counted_and_warned_of(name, caplog):
    unix = "one line\nand another one\n" * 40
    dos = unix.replace("\n", "\r\n")
    tokenizer = BYTES if name == "bytes" else make_tokenizer(name, [unix, dos], 300)
    module.warn_of_carriage_returns(tokenizer, np.array(encode(tokenizer, unix)), "the text")
    assert caplog.text == ""
    module.warn_of_carriage_returns(tokenizer, np.array(encode(tokenizer, dos)), "the text")
    (said,) = caplog.messages
    assert re.match(r"the text has CRLF line ends \(\d+ carriage returns\): the loss counts each", said)
    assert name != "bytes" or "(80 carriage" in said
