"""Prompts, chats and the chat templates that a model's folder may hold."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from subquad.data import load_tokenizer
from subquad.data.vocabularies import train_bpe
from subquad.serving.texts import Template, Texts, TokenText, read_template
from subquad.training.runs import load_run
from tests.cli.folders import save_model

SETTINGS = {"chat_template": "{{ x }}", "eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None}
NAMED = [{"name": "tools", "template": "t"}, {"name": "default", "template": "{{ x }}"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(("settings", "jinja", "expected"), [
    (None, None, None),
    ({"eos_token": "</s>"}, None, None),
    (SETTINGS, None, Template("{{ x }}", TOKENS)),
    ({**SETTINGS, "chat_template": NAMED}, None, Template("{{ x }}", TOKENS)),
    ({"chat_template": "a", "eos_token": "</s>"}, "b", Template("b", {"eos_token": "</s>"})),
])  # fmt: skip
def test_a_template_is_read_from_its_file_or_the_settings_of_the_run(tmp_path, settings, jinja, expected):
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    checkpoint = tmp_path / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    assert read_template(tmp_path) == read_template(checkpoint) == expected


@pytest.mark.parametrize(("settings", "match"), [
    ("{", r"tokenizer_config.json is not JSON: Expecting property name"),
    ("[]", r"tokenizer_config.json must hold a mapping, got list"),
    ('{"chat_template": "a", "eos_token": 3}', "tokenizer_config.json: eos_token must be a text, got 3"),
])  # fmt: skip
def test_damaged_settings_are_named(tmp_path, settings, match):
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(ValueError, match=match):
        read_template(tmp_path)


def test_the_texts_of_a_folder_know_its_template_and_all_its_end_tokens(tmp_path):
    folder = save_model(tmp_path, eos_token_id=[3, 4])
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "a", "eos_token": "w5"}')
    texts = Texts.of(load_run(folder))
    assert (texts.end_tokens, texts.template) == ({3, 4, 5}, Template("a", {"eos_token": "w5"}))


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="the prompt must hold at least one token, got an empty text"):
        Texts(load_tokenizer("bytes")).encode("")


def byte_fallback():
    """The tokens of a Llama: blanks spelled as characters, and bytes of their own for what has no token."""
    vocabulary = {"<unk>": 0, "<s>": 1, "<0xC3>": 2, "<0x41>": 3, "\u2581a": 4, "b": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.mark.parametrize(("tokenizer", "expected"), [
    (byte_fallback(), ["<unk>", "<s>", ("bytes:\\xc3", b"\xc3"), "A", " a", "b", ("token_id:6", None)]),
    (load_tokenizer("bytes"), [*map(chr, range(128)), *((f"bytes:\\x{b:02x}", bytes([b])) for b in range(128, 256))]),
])  # fmt: skip
def test_a_token_has_the_text_that_it_adds_inside_a_text_or_bytes(tokenizer, expected):
    texts = Texts(tokenizer)
    expected = [(text, text.encode()) if isinstance(text, str) else text for text in expected]
    assert [texts.token(token) for token in range(len(expected))] == [TokenText(*text) for text in expected]


def test_the_bytes_of_tokens_join_to_the_text():
    text = "Sp\u00e4ter kam Regen, \u20ac 5"
    tokenizer = train_bpe([text[:12]] * 3, 280)
    tokens = tokenizer.encode(text).ids
    found = [Texts(tokenizer).token(token) for token in tokens]
    assert b"".join(token.utf8 for token in found).decode() == text
    assert any(token.text.startswith("bytes:") for token in found)
    assert " kam" in [token.text for token in found]
