"""Tokenizers trained on a text, and GPT-2's from its files."""

import json
import lzma
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.data import DataConfig, prepare
from subquad.data.special_tokens import separator_id
from subquad.data.tokenizers import Encoder, encode_text, load_tokenizer, tokenizer_hash, vocab_size
from subquad.data.vocabularies import SEPARATOR, TRAINED, character_ids, characters, gpt2_files, make_tokenizer
from subquad.training import TrainConfig, train
from tests.data.lra.layouts import put
from tests.models.small import assert_refused

SOURCE = Path(textwrap.__file__).read_text(encoding="utf-8")


def test_the_same_texts_give_the_same_tokenizers():
    for name in TRAINED:
        hashes = {tokenizer_hash(make_tokenizer(name, [SOURCE], 400)) for _ in range(2)}
        assert len(hashes) == 1, name


@pytest.mark.slow
def test_the_same_texts_give_the_same_tokenizers_in_another_process():
    code = (
        "from subquad.data.tokenizers import tokenizer_hash\n"
        "from subquad.data.vocabularies import TRAINED, make_tokenizer\n"
        f"text = open({textwrap.__file__!r}).read()\n"
        "print(*(tokenizer_hash(make_tokenizer(name, [text], 400)) for name in TRAINED))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [tokenizer_hash(make_tokenizer(name, [SOURCE], 400)) for name in TRAINED]


def test_a_unigram_model_has_the_size_asked_for():
    unigram = make_tokenizer("unigram", [SOURCE], 400)
    assert (type(unigram.model), unigram.get_vocab_size()) == (models.Unigram, 400)
    assert len(unigram.encode("return").tokens) < len("return"), "pieces, not bytes"
    assert vocab_size(make_tokenizer("bpe", ["ab"], 4096)) < 300, "few texts give fewer tokens"


def test_characters_are_the_tokens_and_an_unknown_one_is_named_with_its_place(tmp_path):
    tokenizer = characters(["hello\n", "wörld\U0001f389"])
    text = "wör\nllo\U0001f389"
    ids = encode_text(tokenizer, text)
    assert [tokenizer.id_to_token(id) for id in ids] == list(text)
    assert tokenizer.decode(ids) == text
    assert sorted(tokenizer.get_vocab()) == sorted(set("hello\nwörld\U0001f389"))
    assert tokenizer.encode(text).ids == ids
    fed = [part.tolist() for _, part in Encoder(tokenizer).encode([text.encode(), b"he"])]
    assert fed == [ids, encode_text(tokenizer, "he")]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert character_ids(load_tokenizer(tmp_path)) == tokenizer.get_vocab()
    assert character_ids(make_tokenizer("bpe", ["ab"], 257)) is None
    words = Tokenizer(models.WordLevel(vocab={"a": 0, "bc": 1}, unk_token="a"))
    assert character_ids(words) is None
    words.pre_tokenizer = tokenizer.pre_tokenizer
    assert character_ids(words) is None, "a token of two characters"
    assert_refused(
        (lambda: encode_text(characters(["abc\n"]), "abé"), ValueError, "has 'é' at character 2, not one of .*'s 4"),
        (
            lambda: list(Encoder(characters("a")).encode([b"a", b"xa"])),
            ValueError,
            "document 1 has 'x' at character 0,",
        ),
        (lambda: encode_text(characters([]), "a"), ValueError, "the text has 'a' at character 0, not one of .*'s 0"),
    )


def test_characters_are_those_of_both_parts_and_a_prompt_is_checked_before_training(tmp_path):
    for number in range(6):
        put(tmp_path, f"text/{number}.txt", f"Text number {number}: the same words, again and again.\n")
    config = DataConfig(path=str(tmp_path / "text"), cache=str(tmp_path / "cache"), held_out=0.3)
    made = prepare(config.replace(tokenizer="characters"))
    text = "".join(file.read_text() for file in (tmp_path / "text").iterdir())
    assert sorted(made.tokenizer.get_vocab()) == sorted(set(text))
    assert made.tokenizer.decode(made.held_out.tokens.tolist()).encode() == made.held_out_text()
    word = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "text": 1}))
    word.pre_tokenizer = pre_tokenizers.Whitespace()
    word.save(str(tmp_path / "tokenizer.json"))
    for tokenizer, prompt, message in (
        ("characters", "Import?", r"run.prompt='Import\?': the text has 'I' at character 0.*another prompt"),
        (str(tmp_path / "tokenizer.json"), " ", "run.prompt=' ' holds no token of this tokenizer"),
    ):
        data, run = config.replace(tokenizer=tokenizer), {"folder": str(tmp_path / "run"), "prompt": prompt}
        with pytest.raises(ValueError, match=message):
            train(TrainConfig.from_dict({"data": data.to_dict(), "run": run}))


def gpt2(folder, *, vocabulary=None, merges="#version: 0.2\nh e\nhe l\n", names=("encoder.json", "vocab.bpe")):
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel", SEPARATOR]
    put(
        folder, names[0], json.dumps({token: i for i, token in enumerate(tokens)}) if vocabulary is None else vocabulary
    )
    put(folder, names[1], merges)
    return folder


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_gpt2s_two_files(names, tmp_path):
    folder, packed = gpt2(tmp_path / "gpt2", names=names), tmp_path / "packed"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hello").tokens == ["hel", "l", "o"]
    assert tokenizer.decode(tokenizer.encode("größe").ids) == "größe"
    assert separator_id(tokenizer) == 258
    packed.mkdir()
    for name in names:
        (packed / f"{name}.xz").write_bytes(lzma.compress((folder / name).read_bytes()))
    assert tokenizer_hash(load_tokenizer(packed)) == tokenizer_hash(tokenizer)
    assert gpt2_files(tmp_path) is None


@pytest.mark.parametrize(("changes", "message"), [
    ({"merges": "h e\nhe\n"}, r"vocab\.bpe, line 2: a merge must be two tokens with a space between, got 'he'"),
    ({"merges": "#version: 0.2\nh q\n"}, r"vocab\.bpe, line 2: encoder\.json has no token 'hq'"),
    ({"vocabulary": '{"a": 0, "b": 2}'}, r"encoder\.json must map the tokens to the distinct numbers 0, 1, 2, \.\.\."),
    ({"vocabulary": "{"}, r"encoder\.json is not JSON: "),
    ({"vocabulary": b"\xff"}, r"encoder\.json is not UTF-8 text"),
    ({"vocabulary": '["a"]'}, r"encoder\.json must map the tokens to the distinct numbers"),
    ({"vocabulary": '{"a": 0}', "merges": ""}, r"encoder\.json has no token '!': a byte-level vocabulary must"),
])  # fmt: skip
def test_damaged_files_of_gpt2_are_named(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(gpt2(tmp_path / "gpt2", **changes))
