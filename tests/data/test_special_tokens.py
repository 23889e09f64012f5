"""Special tokens by any name: read from transformers' files, kept with the tokens, and used to end texts."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.data import DataConfig, load_tokenizer, prepare, write_tokens
from subquad.data.special_tokens import (
    end_tokens,
    log_separator,
    read_special_tokens,
    separator_id,
    special_ids,
    tokenizer_config,
)
from subquad.data.tokenizers import tokenizer_hash

END = "<|im_end|>"
TOKENS = {"w": 0, "[UNK]": 1, END: 2, "</s>": 3}


@pytest.fixture
def folder(tmp_path):
    """The folder of a tokenizer whose end token has an unusual name, and one of the usual ones another meaning."""
    tokenizer = Tokenizer(models.WordLevel(TOKENS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([END])
    (tmp_path / "theirs").mkdir()
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))
    return tmp_path / "theirs"


def named(folder, **tokens):
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return load_tokenizer(folder)


def test_names_come_from_both_files_and_must_be_texts(folder):
    (folder / "special_tokens_map.json").write_text('{"eos_token": "x", "pad_token": {"content": "w"}, "more": [1]}')
    named(folder, eos_token={"content": END}, bos_token=None)
    assert read_special_tokens(folder) == {"eos_token": END, "pad_token": "w"}
    with pytest.raises(ValueError, match=r"tokenizer_config.json: eos_token must be a text, got 3"):
        named(folder, eos_token=3)


def test_an_end_token_of_any_name_separates_documents_and_stays_with_the_tokens(folder, tmp_path, caplog):
    usual = load_tokenizer(folder)
    tokenizer = named(folder, eos_token=END, unk_token="not there")
    assert (separator_id(usual), separator_id(tokenizer)) == (3, 2)
    assert tokenizer_hash(tokenizer) != tokenizer_hash(usual) == tokenizer_hash(named(folder, eos_token="</s>"))
    named(folder, eos_token=END)
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(9):
        (texts / f"{i}.txt").write_text("w w w")
    corpus = prepare(DataConfig(path=str(texts), tokenizer=str(folder), cache=str(tmp_path / "cache"), held_out=0.3))
    assert corpus.train.tokens[:8].tolist() == [0, 0, 0, 2] * 2
    tokens = write_tokens(tmp_path / "shards", [str(texts)], corpus.tokenizer, shard_tokens=8)
    assert tokens.tokens[:8].tolist() == [0, 0, 0, 2] * 2
    for again in (corpus.tokenizer, load_tokenizer(tmp_path / "shards")):
        assert separator_id(again) == 2
        assert tokenizer_config(again).items() >= {"eos_token": END, "pad_token": END}.items()
    caplog.set_level("INFO")
    log_separator(corpus.tokenizer)
    log_separator(load_tokenizer("bytes"))
    assert "documents are separated by '<|im_end|>', token 2" in caplog.text
    assert "documents are not separated: the tokenizer has no end token" in caplog.text


def test_texts_end_at_every_end_token_that_the_files_name(folder):
    tokenizer = named(folder, eos_token=END)
    assert end_tokens(tokenizer, folder) == {2}
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert end_tokens(tokenizer, folder) == {2, 5, 6, 7}
    assert end_tokens(load_tokenizer("bytes"), folder) == {5, 6, 7}
    for wrong in ("true", '"</s>"', "[1, 2.0]"):
        (folder / "config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(
            ValueError, match=r"config.json: eos_token_id must be a whole number or a list of them, got"
        ):
            end_tokens(tokenizer, folder)


def test_a_stop_string_that_is_one_special_token_has_its_id(folder):
    assert special_ids(load_tokenizer(folder), [END, f"{END} ", "w", "</s>"]) == {2}, "the others are shown as text"
