"""Tokenizers made of the text, and GPT-2's from its files."""

import json
import lzma
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.data import DataConfig, prepare
from subquad.data.tokenizers import Encoder, encode_text, load_tokenizer, pieces, separator_id, tokenizer_hash
from subquad.data.vocabularies import (
    SEPARATOR,
    character_ids,
    characters,
    gpt2_files,
    load_gpt2,
    make_tokenizer,
    train_bpe,
    train_unigram,
)
from subquad.training import TrainConfig, train

TEXTS = ["def f(x):\n    return x + 1\n", "The cat didn't sit; it's 42.\n\n\tThe  end ", "größe 漢字 \U0001f389"]
SOURCE = Path(textwrap.__file__).read_text(encoding="utf-8")
UNIGRAM = train_unigram([SOURCE, *TEXTS], 400)


@given(st.text())
def test_a_unigram_model_loses_nothing(text):
    assert UNIGRAM.decode(encode_text(UNIGRAM, text)) == text
    fed = [ids for _, ids in Encoder(UNIGRAM).encode([text.encode()])]
    assert UNIGRAM.decode(np.concatenate(fed).tolist()) == text


def test_a_unigram_model_has_a_separator_and_no_more_than_the_size_asked_for():
    assert UNIGRAM.get_vocab_size() == 400
    assert separator_id(UNIGRAM) == 0
    assert Encoder(UNIGRAM).cuts
    spelled = f"a{SEPARATOR}b"
    assert 0 in UNIGRAM.encode(spelled).ids
    fed = np.concatenate([ids for _, ids in Encoder(UNIGRAM).encode([spelled.encode()])])
    assert 0 not in fed
    assert UNIGRAM.decode(fed.tolist()) == spelled


def test_a_unigram_model_takes_the_cut_of_greatest_probability():
    scores = dict(json.loads(UNIGRAM.to_str())["model"]["vocab"])
    word = "return"
    cuts = [[word[a:b] for a, b in zip([0, *places], [*places, len(word)], strict=True)] for places in subsets(word)]
    best = max(
        (cut for cut in cuts if all(piece in scores for piece in cut)), key=lambda cut: sum(map(scores.get, cut))
    )
    assert UNIGRAM.encode(word).tokens == best
    assert len(best) < len(word)


def subsets(word):
    inner = range(1, len(word))
    return [[p for p in inner if bits >> p & 1] for bits in range(0, 1 << len(word), 2)]


@pytest.mark.parametrize("name", ["bpe", "unigram", "characters"])
def test_the_same_texts_give_the_same_tokenizer_in_another_process(name):
    code = (
        "from subquad.data.tokenizers import tokenizer_hash\nfrom subquad.data.vocabularies import make_tokenizer\n"
        f"print(tokenizer_hash(make_tokenizer({name!r}, [open({textwrap.__file__!r}).read()], 400)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == tokenizer_hash(make_tokenizer(name, [SOURCE], 400))


def test_characters_are_the_tokens(tmp_path):
    tokenizer = characters(["hello\n", "wörld\U0001f389"])
    text = "wör\nllo\U0001f389"
    ids = encode_text(tokenizer, text)
    assert [tokenizer.id_to_token(id) for id in ids] == list(text)
    assert tokenizer.decode(ids) == text
    assert sorted(tokenizer.get_vocab()) == sorted(set("hello\nwörld\U0001f389"))
    assert tokenizer.encode(text).ids == ids
    assert np.concatenate([ids for _, ids in Encoder(tokenizer).encode([text.encode(), b"he"])]).tolist() == [
        *ids,
        *encode_text(tokenizer, "he"),
    ]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path)
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    assert character_ids(again) == tokenizer.get_vocab()
    assert character_ids(UNIGRAM) is None
    assert character_ids(Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a"))) is None


def test_an_unknown_character_is_named_with_its_place():
    tokenizer = characters(["abc\n"])
    with pytest.raises(ValueError, match="the text has 'é' at character 2, which is none of the tokenizer's 4 char"):
        encode_text(tokenizer, "abé")
    with pytest.raises(ValueError, match="document 1 has 'x' at character 0, which is none of the tokenizer's 4"):
        list(Encoder(tokenizer).encode([b"a", b"xa"]))
    with pytest.raises(ValueError, match="the text has 'a' at character 0, which is none of the tokenizer's 0"):
        encode_text(characters([]), "a")


def corpus(tmp_path, **changes):
    for number in range(6):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number}.txt").write_text(f"Text number {number}: the same words, again and again.\n")
    options = {"path": str(tmp_path / "text"), "cache": str(tmp_path / "cache"), "held_out": 0.3} | changes
    return DataConfig(**options)


def test_a_corpus_of_characters_knows_those_of_both_parts(tmp_path):
    made = prepare(corpus(tmp_path, tokenizer="characters"))
    text = "".join((tmp_path / "text" / f"{n}.txt").read_text() for n in range(6))
    assert sorted(made.tokenizer.get_vocab()) == sorted(set(text))
    assert made.tokenizer.decode(made.held_out.tokens.tolist()).encode() == made.held_out_text()
    assert len(made.held_out) == made.held_out.text_bytes


def test_a_corpus_by_a_unigram_model(tmp_path, caplog):
    made = prepare(corpus(tmp_path, tokenizer="unigram", vocab_size=300))
    assert made.train.vocab_size == made.tokenizer.get_vocab_size() <= 300
    whole = made.tokenizer.decode(made.held_out.tokens.tolist(), skip_special_tokens=True)
    assert whole.encode() == made.held_out_text()
    other = prepare(corpus(tmp_path, tokenizer="unigram", vocab_size=280))
    assert other.folder != made.folder
    size = made.tokenizer.get_vocab_size()
    assert size < 300
    assert f"the text is enough for {size} tokens only, not for 300" in caplog.text


def test_the_prompt_of_the_samples_is_checked_before_training(tmp_path):
    values = {"data": corpus(tmp_path, tokenizer="characters").to_dict(), "run": {"folder": str(tmp_path / "run")}}
    with pytest.raises(ValueError, match=r"run.prompt='Import\?': the text has 'I' at character 0.*another prompt"):
        train(TrainConfig.from_dict(values | {"run": values["run"] | {"prompt": "Import?"}}))


def test_a_prompt_without_a_token_is_refused(tmp_path):
    word = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "text": 1}))
    word.pre_tokenizer = pre_tokenizers.Whitespace()
    word.save(str(tmp_path / "tokenizer.json"))
    values = {"data": corpus(tmp_path, tokenizer=str(tmp_path / "tokenizer.json")).to_dict(), "run": {"prompt": " "}}
    with pytest.raises(ValueError, match=r"run.prompt=' ' holds no token of this tokenizer"):
        train(TrainConfig.from_dict(values | {"run": values["run"] | {"folder": str(tmp_path / "run")}}))


def gpt2(folder, *, vocabulary=None, merges="#version: 0.2\nh e\nhe l\n", names=("encoder.json", "vocab.bpe")):
    folder.mkdir()
    alphabet = sorted(set(train_bpe(["a"], 257).get_vocab()) - {SEPARATOR})
    tokens = [*alphabet, "he", "hel", SEPARATOR]
    ids = {token: number for number, token in enumerate(tokens)} if vocabulary is None else vocabulary
    (folder / names[0]).write_text(json.dumps(ids))
    (folder / names[1]).write_text(merges)
    return folder


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_gpt2s_two_files(names, tmp_path):
    folder = gpt2(tmp_path / "gpt2", names=names)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hello").tokens == ["hel", "l", "o"]
    assert tokenizer.decode(tokenizer.encode("größe").ids) == "größe"
    assert separator_id(tokenizer) == 258
    packed = tmp_path / "packed"
    packed.mkdir()
    for name in names:
        (packed / f"{name}.xz").write_bytes(lzma.compress((folder / name).read_bytes()))
    assert tokenizer_hash(load_tokenizer(packed)) == tokenizer_hash(tokenizer)
    assert gpt2_files(tmp_path) is None


@pytest.mark.parametrize(("changes", "message"), [
    ({"merges": "h e\nhe\n"}, r"vocab\.bpe, line 2: a merge is two tokens with a space between, got 'he'"),
    ({"merges": "#version: 0.2\nh q\n"}, r"vocab\.bpe, line 2: encoder\.json has no token 'hq'"),
    ({"vocabulary": {"a": 0, "b": 2}}, r"encoder\.json must map each token to a number of its own, from 0 on"),
    ({"vocabulary": ["a"]}, r"encoder\.json must map each token to a number of its own, from 0 on"),
    ({"vocabulary": {"a": 0, "b": 1}, "merges": ""}, r"encoder\.json has no token '.': a byte-level vocabulary holds"),
])  # fmt: skip
def test_damaged_files_of_gpt2_are_named(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(gpt2(tmp_path / "gpt2", **changes))


def test_files_that_cannot_be_read_are_named(tmp_path):
    folder = gpt2(tmp_path / "gpt2")
    (folder / "encoder.json").write_text("{")
    with pytest.raises(ValueError, match=r"encoder\.json is not JSON: "):
        load_tokenizer(folder)
    (folder / "encoder.json").unlink()
    (folder / "encoder.json.xz").write_bytes(b"no xz")
    with pytest.raises(ValueError, match=r"encoder\.json\.xz is damaged and does not unpack"):
        load_tokenizer(folder)


def test_gpt2s_own_files(data_folder):
    tokenizer = load_tokenizer(data_folder / "gpt2_bpe")
    assert tokenizer.get_vocab_size() == 50_257
    assert separator_id(tokenizer) == 50_256
    assert encode_text(tokenizer, "Hello world") == [15496, 995]
    text = lzma.decompress((data_folder / "tinyshakespeare" / "input.txt.xz").read_bytes())[:50_000]
    ids = np.concatenate([ids for _, ids in Encoder(tokenizer).encode([text])])
    assert tokenizer.decode(ids.tolist()).encode() == text
    assert len(list(pieces(text))) == 1


def test_tiny_shakespeare_has_65_characters(data_folder, tmp_path):
    path = str(data_folder / "tinyshakespeare" / "input.txt.xz")
    made = prepare(DataConfig(path=path, held_out=0.1, tokenizer="characters", cache=str(tmp_path)))
    assert made.train.vocab_size == 65
    assert len(made.train) == 1_003_854
    assert load_gpt2(*gpt2_files(data_folder / "gpt2_bpe")).get_vocab_size() == 50_257
    assert re.match("First Citizen", made.tokenizer.decode(made.train.tokens[:13].tolist()))
