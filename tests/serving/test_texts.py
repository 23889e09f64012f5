"""The chat templates that a model's folder may hold."""

import json

import pytest

from subquad.data import load_tokenizer
from subquad.serving.texts import Template, Texts, read_template


def write(folder, settings=None, jinja=None):
    folder.mkdir(parents=True, exist_ok=True)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


def test_a_folder_without_a_template_has_none(tmp_path):
    assert read_template(tmp_path) is None
    assert read_template(write(tmp_path, {"eos_token": "</s>"})) is None
    with pytest.raises(ValueError, match=r"tokenizer_config.json must hold a mapping, got list"):
        read_template(write(tmp_path, []))


def test_the_template_of_the_tokenizers_settings(tmp_path):
    settings = {"chat_template": "{{ x }}", "eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None}
    wanted = Template("{{ x }}", {"bos_token": "<s>", "eos_token": "</s>"})
    assert read_template(write(tmp_path / "a", settings)) == wanted
    settings["chat_template"] = [{"name": "tools", "template": "t"}, {"name": "default", "template": "{{ x }}"}]
    assert read_template(write(tmp_path / "b", settings)) == wanted


def test_a_file_of_its_own_wins_and_a_checkpoint_has_that_of_its_run(tmp_path):
    write(tmp_path, {"chat_template": "a", "eos_token": "</s>"}, jinja="b")
    assert read_template(tmp_path) == Template("b", {"eos_token": "</s>"})
    checkpoint = tmp_path / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    assert read_template(checkpoint) == Template("b", {"eos_token": "</s>"})


def test_settings_that_are_not_json_are_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not JSON: Expecting property name"):
        read_template(tmp_path)


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="the prompt must hold at least one token, got an empty text"):
        Texts(load_tokenizer("bytes")).encode("")


def test_a_template_that_fails_is_told():
    texts = Texts(load_tokenizer("bytes"), Template("{{ messages[0].content + 1 }}", {}))
    with pytest.raises(ValueError, match="the model's chat template refuses these messages: "):
        texts.chat([{"role": "user", "content": "a"}])
