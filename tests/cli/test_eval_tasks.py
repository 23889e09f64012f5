"""`subquad eval --tasks`, on folders of ours and of transformers."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from subquad.cli import main
from subquad.data.tokenizers import bytes_tokenizer
from subquad.data.vocabularies import SEPARATOR, train_bpe
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.hf.encoders import SubquadClassifierConfig

TASKS = str(Path(__file__).parents[1] / "evaluation" / "tasks")
OURS = ["--tasks", "local_texts,local_choices", "--task_path", TASKS, "--length", "64"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "dim": 16, "num_layers": 1, "num_heads": 2, "position": "sinusoidal"}
    SubquadForCausalLM(SubquadConfig(**shape, attention="linear")).save_pretrained(folder / "ours")
    bytes_tokenizer().save(str(folder / "ours" / "tokenizer.json"))
    options = {"perceiver_ar": {"latents": 5, "history": "self", "history_tokens": 6}}
    SubquadForCausalLM(SubquadConfig(**shape, attention="perceiver_ar", options=options)).save_pretrained(folder / "ar")
    bytes_tokenizer().save(str(folder / "ar" / "tokenizer.json"))
    bpe = train_bpe(["the ferry left at noon and the fog hid it"] * 2, 280)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=SEPARATOR, eos_token=SEPARATOR)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=128, **sizes)).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    (folder / "classifier").mkdir()
    (folder / "classifier" / "config.json").write_text(json.dumps({"model_type": SubquadClassifierConfig.model_type}))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def test_tasks_are_measured_and_written(folders, tmp_path, capsys):
    file = tmp_path / "tasks.json"
    arguments = ["--limit", "2", "--num_fewshot", "1", "--batch_size", "3", "--json", str(file), "--device", "cpu"]
    assert main(["eval", str(folders / "ours"), *OURS, *arguments]) == 0
    out = capsys.readouterr().out
    values = json.loads(file.read_text())
    assert values["samples"] == {
        "local_texts": {"original": 4, "effective": 2},
        "local_choices": {"original": 5, "effective": 2},
    }
    assert values["num_fewshot"]["local_choices"] == 1
    assert (values["config"]["batch_size"], values["config"]["length"]) == (3, 64)
    assert f"{values['results']['local_texts']['bits_per_byte,none']:.4f}" in out
    assert out.startswith("|")  # nothing else is printed before the table
    assert "local_choices" in out
    assert "4 examples, 8 requests in" in out
    assert "in a window of 64 tokens; cut to fit: 6" in out


def test_a_model_of_transformers_says_its_window_itself(folders, tmp_path, capsys):
    file = tmp_path / "tasks.json"
    assert main(["eval", str(folders / "gpt2"), *OURS[:4], "--json", str(file)]) == 0
    values = json.loads(file.read_text())
    assert (values["config"]["model"], values["config"]["length"]) == ("GPT2LMHeadModel", 128)
    assert (values["config"]["prefix_token"], values["cut"]) == (0, 0)


def test_a_folder_without_a_configuration_of_training_is_read_in_the_usual_window(folders, capsys):
    assert main(["eval", str(folders / "ours"), "--tasks", "local_words", "--task_path", TASKS, "--limit", "1"]) == 0
    assert "in a window of 1,024 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("folder", "arguments", "message"), [
    ("ours", ["--limit", "3"], "--limit is for tasks: name them by --tasks"),
    ("ours", ["--prefix_token", "0"], "--prefix_token is for tasks: name them by --tasks"),
    ("ours", [*OURS, "--stride", "3"], "--stride is for a text and does not go with --tasks"),
    ("ours", [*OURS, "--data", "x.txt"], "--data.path is for a text and does not go with --tasks"),
    ("ours", ["--tasks", " ,"], "--tasks must name at least one task, as a,b,c, got ' ,'"),
    ("ours", [*OURS, "--limit", "0"], "limit must be at least 1, got 0"),
    ("ours", [*OURS, "--task_path", "nowhere"], "task_path must be a folder with the YAML files of tasks"),
    ("ar", OURS, "perceiver_ar predicts its last 5 tokens alone; `subquad eval` without --tasks measures it"),
    ("gpt2", [*OURS, "--length", "129"], "length must be at most 128, the positions that the model has, got 129"),
    ("classifier", OURS, "holds a classifier: --tasks is for language models; leave it out"),
    ("nowhere", OURS, "there is no folder"),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_the_model_is_asked(folders, capsys, folder, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        main(["eval", str(folders / folder), *arguments])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_without_the_extra_the_command_says_what_to_install(folders, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    monkeypatch.delitem(sys.modules, "subquad.evaluation.harness", raising=False)
    assert main(["eval", str(folders / "ours"), *OURS]) == 1
    assert "not installed: pip install subquad[eval]" in capsys.readouterr().err
