"""`subquad eval` on texts, and with `--tasks` on tasks of lm-evaluation-harness."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from subquad.cli import main
from subquad.data.vocabularies import SEPARATOR, train_bpe
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.program import install
from subquad.testing import assert_in_budget
from tests.cli.folders import save_model


def measured(printed, folder, *arguments):
    """What eval prints, and the numbers that it writes."""
    file = Path(folder) / "measured.json"
    out = printed("eval", folder, *arguments, "--json", file)
    return out, json.loads(file.read_text())


# --- texts


def test_eval_repeats_the_evaluation_of_a_run_and_of_its_checkpoint(trained, printed):
    before = json.loads((trained / "evaluation.json").read_text())
    out, found = measured(printed, trained, "--windows", "6")  # as many as 3 steps of 2 windows trained on
    assert {**found, "seconds": 0} == {**before, "seconds": 0}
    assert "tokens of context" in out
    assert "16 to 31" in out
    assert measured(printed, trained / "checkpoints" / "checkpoint-3", "--windows", "6")[1]["loss"] == before["loss"]


def test_eval_reads_the_whole_of_another_text(trained, tmp_path, printed):
    (tmp_path / "other.txt").write_text("another text, é\n" * 9, encoding="utf-8")
    text = ["--data", tmp_path / "other.txt", "--data.cache", tmp_path, "--length", "16"]
    found = measured(printed, trained, *text, "--stride", "4")[1]
    assert (found["text_bytes"], found["words"], found["tokens"]) == (17 * 9, 27, 17 * 9 - 1)
    assert (found["length"], found["stride"]) == (16, 4)
    found = measured(printed, trained, *text, "--windows", "2")[1]
    assert (found["tokens"], found["text_bytes"]) == (32, 33)


def test_eval_measures_weights_in_fewer_bits(trained, printed):
    precisions = ["", "--dtype float32", "--dtype float16", "--quantize int8", "--quantize int8 --dtype bfloat16"]
    losses = [measured(printed, trained, "--windows", "2", *asked.split())[1]["loss"] for asked in precisions]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 4
    assert_in_budget(*torch.tensor([losses[2:], [losses[4]] * 3, [losses[0]] * 3]), torch.bfloat16)


def test_eval_warns_of_crlf_line_ends_in_tokens_of_the_cache_too(trained, tmp_path, caplog, printed):
    (tmp_path / "dos").write_bytes(b"def main():\r\n    return 0\r\n" * 60)
    for _ in range(2):
        caplog.clear()
        printed("eval", trained, "--data", tmp_path / "dos", "--data.cache", tmp_path, "--windows", "1")
        assert "has CRLF line ends (120 carriage returns)" in caplog.text


def test_eval_needs_a_text_in_the_models_tokens(trained, tmp_path, capsys, refused):
    folder = tmp_path / "changed"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(trained / name, folder)
    message = refused("eval", folder)
    assert f"{folder} has no config.yaml that names its text; give a text by --data.path" in message
    settings = yaml.safe_load((trained / "config.yaml").read_text())
    settings["data"] |= {"tokenizer": "bpe", "vocab_size": 260}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main(["eval", str(folder)]) == 1
    assert "it gives another tokenizer; give a text by --data.path" in capsys.readouterr().err


# --- tasks

PATH = ["--task_path", str(Path(__file__).parents[1] / "evaluation" / "tasks")]
OURS = ["--tasks", "local_texts,local_choices", *PATH, "--length", "64"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "ours", attention="linear", tokenizer="bytes", position="sinusoidal")
    bpe = train_bpe(["the ferry left at noon and the fog hid it"] * 2, 280)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=SEPARATOR, eos_token=SEPARATOR)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=128, **sizes)).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    (folder / "classifier").mkdir()
    (folder / "classifier" / "config.json").write_text(json.dumps({"model_type": SubquadClassifierConfig.model_type}))
    return folder


def test_tasks_are_measured_in_the_models_window(folders, printed, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    options = ["--limit", "2", "--num_fewshot", "1", "--batch_size", "3", "--device", "cpu"]
    out, found = measured(printed, folders / "ours", *OURS, *options)
    assert found["samples"]["local_texts"] == {"original": 4, "effective": 2}
    assert found["samples"]["local_choices"] == {"original": 5, "effective": 2}
    assert found["num_fewshot"]["local_choices"] == 1
    assert (found["config"]["batch_size"], found["config"]["length"]) == (3, 64)
    assert f"{found['results']['local_texts']['bits_per_byte,none']:.4f}" in out
    assert out.startswith("|")  # nothing else is printed before the table
    assert "local_choices" in out
    assert "4 examples, 8 requests in" in out
    assert "in a window of 64 tokens; truncated requests: 6" in out
    _, found = measured(printed, folders / "gpt2", *OURS[:4], "--limit", "2")
    assert (found["config"]["model"], found["config"]["length"]) == ("GPT2LMHeadModel", 128)
    assert (found["config"]["prefix_token"], found["cut"]) == (0, 0)
    out = printed("eval", folders / "ours", "--tasks", "local_words", *PATH, "--limit", "1")
    assert "in a window of 1,024 tokens" in out  # the default without a training configuration


@pytest.mark.parametrize(("folder", "arguments", "message"), [
    ("ours", ["--limit", "3"], "--limit is for tasks: name them with --tasks"),
    ("ours", [*OURS, "--stride", "3"], "--stride is for a text and can't be combined with --tasks"),
    ("ours", ["--tasks", " ,"], "--tasks must name at least one task, such as a,b,c, got ' ,'"),
    ("gpt2", [*OURS, "--quantize", "int8"], "holds a transformers model: quantize='int8' is for subquad's; leave it"),
    ("classifier", OURS, "holds a classifier: --tasks is for language models; leave it out"),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_the_model_is_asked(folders, refused, folder, arguments, message):
    assert message in refused("eval", folders / folder, *arguments)


def test_without_the_extra_the_command_says_what_to_install(folders, capsys, monkeypatch):
    for module in ("lm_eval", "lm_eval.evaluator"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "subquad.evaluation.harness", raising=False)
    assert main(["eval", str(folders / "ours"), *OURS]) == 1
    line = install("subquad[eval]")
    assert f"evaluating tasks needs lm_eval, which is not installed: {line}" in capsys.readouterr().err
