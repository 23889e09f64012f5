import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from subquad.data import DataConfig, prepare
from subquad.data import tokenizers as module
from subquad.data.tokenizers import (
    Encoder,
    bytes_tokenizer,
    load_tokenizer,
    pieces,
    separator_id,
    tokenizer_hash,
    vocab_size,
    warn_of_carriage_returns,
)
from subquad.data.vocabularies import SEPARATOR, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n", "The cat didn't sit; it's 42.\n\n\tThe  end ", "größe 漢字 \U0001f389"]
BPE = train_bpe(TEXTS * 3, 300)


def encode(tokenizer, text):
    return np.concatenate([ids for _, ids in Encoder(tokenizer).encode([text.encode()])]).tolist()


@given(st.text())
def test_bytes_are_their_own_ids(text):
    tokenizer = bytes_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode()) == encode(tokenizer, text)
    assert tokenizer.decode(ids) == text


def test_bytes_have_a_vocabulary_of_256_and_no_separator():
    assert vocab_size(bytes_tokenizer()) == 256
    assert Encoder(bytes_tokenizer()).separator.tolist() == []
    assert Encoder(bytes_tokenizer()).is_bytes
    assert not Encoder(BPE).is_bytes


@given(st.text())
def test_bpe_loses_nothing(text):
    assert BPE.decode(encode(BPE, text)) == text


def test_bpe_has_the_size_asked_for_and_a_separator():
    assert vocab_size(BPE) == 300
    assert BPE.id_to_token(separator_id(BPE)) == SEPARATOR
    assert vocab_size(train_bpe(["ab"], 4096)) < 300


def test_a_separator_that_a_document_spells_out_is_text():
    text = f"a{SEPARATOR}b"
    assert separator_id(BPE) in BPE.encode(text).ids
    assert separator_id(BPE) not in encode(BPE, text)
    assert BPE.decode(encode(BPE, text)) == text


def test_training_is_the_same_in_another_process():
    code = (
        "from subquad.data.tokenizers import tokenizer_hash\n"
        "from subquad.data.vocabularies import train_bpe\n"
        f"print(tokenizer_hash(train_bpe({TEXTS * 3!r}, 300)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == tokenizer_hash(BPE)


def test_a_file_keeps_the_tokenizer(tmp_path):
    for tokenizer in (BPE, bytes_tokenizer()):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert tokenizer_hash(load_tokenizer(tmp_path / "tokenizer.json")) == tokenizer_hash(tokenizer)
        assert tokenizer_hash(load_tokenizer(str(tmp_path))) == tokenizer_hash(tokenizer)


@given(st.lists(st.sampled_from(["word", " ", "  ", "\n", "\n\n", "\t", "é", "漢字", "1", "'s", "!?", "\u2028"])))
def test_pieces_do_not_change_tokens(parts):
    text = "".join(parts)
    cut = [piece.decode() for piece in small_pieces(text.encode())]
    assert "".join(cut) == text
    assert [id for piece in cut for id in BPE.encode(piece).ids] == BPE.encode(text).ids


def small_pieces(text):
    before, module._PIECE = module._PIECE, 1
    try:
        return list(pieces(text))
    finally:
        module._PIECE = before


def test_a_long_text_is_cut_into_many_pieces():
    text = b"some words and\nlines\n" * 50_000
    assert len(list(pieces(text))) == 5
    numbers = [number for number, _ in Encoder(BPE).encode([text, b"short"])]
    assert numbers == [0, 0, 0, 0, 0, 1]


def test_another_tokenizer_is_fed_whole_documents(tmp_path):
    wordpiece = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "[SEP]": 1, "the": 2, "cat": 3, "##s": 4}))
    wordpiece.pre_tokenizer = pre_tokenizers.Whitespace()
    wordpiece.normalizer = normalizers.Lowercase()
    wordpiece.enable_truncation(2)
    wordpiece.enable_padding(length=9)
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert encode(tokenizer, "The cats see the cat") == [2, 3, 4, 0, 2, 3]
    assert not Encoder(tokenizer).cuts
    assert Encoder(BPE).cuts
    assert Encoder(tokenizer).separator.tolist() == [1]
    long = b"the cats " * 60_000
    assert len(list(Encoder(tokenizer).encode([long]))) == 1


def test_gaps_in_the_ids_count():
    assert vocab_size(Tokenizer(models.WordLevel(vocab={"a": 0, "b": 9}, unk_token="a"))) == 10


def test_an_unknown_tokenizer_is_answered_with_the_valid_ones():
    with pytest.raises(
        ValueError, match=r"unknown tokenizer 'byte'.*did you mean 'bytes'\? valid: PATH/tokenizer.json"
    ):
        load_tokenizer("byte")


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} is not a tokenizer.json: "):
        load_tokenizer(file)


@pytest.mark.parametrize("name", ["bytes", "bpe", "characters", "unigram"])
def test_carriage_returns_are_counted_and_said(name, tmp_path, caplog):
    unix = "one line\nand another one\n" * 40
    texts = {"unix": unix, "dos": unix.replace("\n", "\r\n")}
    (tmp_path / "texts").mkdir()
    for kind, text in texts.items():
        (tmp_path / "texts" / f"{kind}.txt").write_bytes(text.encode())
    config = DataConfig(path=str(tmp_path / "texts"), tokenizer=name, vocab_size=300, cache=str(tmp_path / "cache"))
    tokenizer = bytes_tokenizer() if name == "bytes" else prepare(config).tokenizer
    for kind, text in texts.items():
        caplog.clear()
        warn_of_carriage_returns(tokenizer, np.array(tokenizer.encode(text).ids), "the text")
        said = [record.getMessage() for record in caplog.records if "CRLF" in record.getMessage()]
        assert len(said) == (kind == "dos"), said
        if name == "bytes" and said:
            assert said[0].startswith("the text has CRLF line ends (80 carriage returns): the loss counts each")
