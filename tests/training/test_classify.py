"""Training, measuring and loading a classifier, in Python and by the command line."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from subquad.attention import mechanism, names
from subquad.cli import main
from subquad.config import read_mapping
from subquad.data import DataConfig
from subquad.data.labelled import LabelledCorpus
from subquad.hf import SubquadForSequenceClassification
from subquad.recipes import recipe_path
from subquad.training import ClassifyConfig, TrainConfig, train
from subquad.training.errors import CheckpointError
from subquad.training.tasks import check, check_forms, prepare_task
from tests.training.metrics import records

pytestmark = pytest.mark.draws

VALUES = {
    "task": "classify",
    "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "window", "init_std": 0.1, "dropout": 0.1},
    "classify": {"examples": 50, "held_out": 21},
    "batch": {"length": 20, "size": 4, "accumulation": 2},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup": 2},
    "run": {
        "steps": 8,
        "log_every": 2,
        "eval_every": 4,
        "eval_windows": 10,
        "save_every": 4,
        "device": "cpu",
        "threads": 1,
        "precision": "float32",
    },
}


def make(folder, **groups) -> TrainConfig:
    values = {name: (VALUES[name] | groups.get(name, {})) if name != "task" else "classify" for name in VALUES}
    values["run"] |= {"folder": str(folder)}
    return TrainConfig.from_dict(values | {name: groups[name] for name in groups if name not in values})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that the command made."""
    folder = tmp_path_factory.mktemp("classify")
    config = make(folder / "run")
    config.to_file(folder / "tiny.yaml")
    assert main(["train", "--config", str(folder / "tiny.yaml")]) == 0
    return folder / "run"


# --- a run


def test_a_run_keeps_all_that_it_measured(trained):
    for name in ("config.yaml", "metrics.jsonl", "model.safetensors", "curves.png", "evaluation.json", "report.json"):
        assert (trained / name).stat().st_size > 0
    assert not (trained / "tokenizer.json").exists()
    evaluated = [line for line in records(trained) if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [4, 8]
    for line in evaluated:
        assert (10 * line["eval_accuracy"]).is_integer()
    report = json.loads((trained / "report.json").read_text())
    evaluation = json.loads((trained / "evaluation.json").read_text())
    assert report["accuracy"] == evaluation["accuracy"]
    assert math.isclose(21 * evaluation["accuracy"], round(21 * evaluation["accuracy"]))
    assert evaluation["examples"] == report["examples"] == 21
    assert 0.5 <= evaluation["constant"] < 1
    assert report["steps"] == 8
    config = TrainConfig.from_file(trained / "config.yaml")
    assert (config.task, config.model.vocab_size) == ("classify", 3)


def test_the_folder_is_a_transformers_model(trained):
    model = AutoModelForSequenceClassification.from_pretrained(trained)
    assert isinstance(model, SubquadForSequenceClassification)
    assert model.config.id2label == {0: "marked zeros", 1: "marked ones"}
    assert model.num_parameters() == json.loads((trained / "report.json").read_text())["parameters"]


def test_the_result_has_the_model_and_the_sequences(tmp_path):
    result = train(make(tmp_path, run={"steps": 3, "save_every": 3, "eval_every": 0}))
    assert isinstance(result.model, SubquadForSequenceClassification)
    assert isinstance(result.corpus, LabelledCorpus)
    assert (result.steps, result.tokens, result.best_loss) == (3, 3 * 4 * 2 * 20, None)


def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(make(whole))
    shutil.copytree(whole, parted)
    shutil.rmtree(parted / "checkpoints" / "checkpoint-8")
    (parted / "model.safetensors").unlink()
    assert train(make(parted, run={"resume": "must"})).steps == 8
    left, right = load_file(whole / "model.safetensors"), load_file(parted / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert records(parted) == records(whole)


@pytest.mark.parametrize("change", [
    {"classify": {"seed": 1}},
    {"classify": {"pooling": "last"}},
    {"classify": {"examples": 51}},
    {"batch": {"length": 21}},
    {"model": {"dim": 32}},
])  # fmt: skip
def test_a_changed_run_is_not_gone_on_with(trained, tmp_path, change):
    shutil.copytree(trained, tmp_path / "run")
    with pytest.raises(CheckpointError, match="was made by other settings: "):
        train(make(tmp_path / "run", **change))


def test_the_toy_is_learned(tmp_path):
    values = read_mapping(recipe_path("toy-classify"))
    values["run"] |= {"folder": str(tmp_path), "device": "cpu", "precision": "float32", "threads": 1, "steps": 90}
    values["batch"] |= {"length": 24}
    result = train(TrainConfig.from_dict(values))
    accuracies = [line["eval_accuracy"] for line in records(tmp_path) if "eval_accuracy" in line]
    assert accuracies[-1] > 0.8  # chance is one half
    assert result.best_loss < math.log(2)


# --- the command line


def test_eval_measures_what_the_run_reported(trained, tmp_path, capsys):
    arguments = ["--json", str(tmp_path / "e.json"), "--device", "cpu", "--batch_size", "4"]
    assert main(["eval", str(trained), *arguments]) == 0
    printed = capsys.readouterr().out
    measured = json.loads((tmp_path / "e.json").read_text())
    reported = json.loads((trained / "evaluation.json").read_text())
    assert {**measured, "seconds": 0} == {**reported, "seconds": 0}
    assert f"{measured['accuracy']:.2%}" in printed
    assert main(["eval", str(trained), "--windows", "7", "--batch_size", "3", "--json", str(tmp_path / "e.json")]) == 0
    assert json.loads((tmp_path / "e.json").read_text())["examples"] == 7


def test_a_checkpoint_can_be_measured(trained, tmp_path):
    folder = trained / "checkpoints" / "checkpoint-8"
    assert main(["eval", str(folder), "--json", str(tmp_path / "e.json"), "--device", "cpu"]) == 0
    measured = json.loads((tmp_path / "e.json").read_text())
    assert measured["accuracy"] == json.loads((trained / "evaluation.json").read_text())["accuracy"]


def test_the_printed_table_has_the_numbers(tmp_path, capsys):
    make(tmp_path / "run", run={"steps": 3, "eval_every": 0}).to_file(tmp_path / "tiny.yaml")
    assert main(["train", "--config", str(tmp_path / "tiny.yaml")]) == 0
    out = capsys.readouterr().out
    for part in ("accuracy", "by always giving the most frequent label", "'marked ones'", "parameters, steps"):
        assert part in out


@pytest.mark.parametrize(("position", "name"), [("learned", "perceiver"), ("none", "perceiver_io")])
def test_perceivers_train_by_the_command_line(tmp_path, name, position):
    make(tmp_path / "run", run={"steps": 3, "eval_every": 0}).to_file(tmp_path / "tiny.yaml")
    more = ["--model.attention", name, f"--model.options.{name}.fourier_bands", "2", "--model.position", position]
    assert main(["train", "--config", str(tmp_path / "tiny.yaml"), *more]) == 0
    assert main(["eval", str(tmp_path / "run"), "--windows", "2"]) == 0


@pytest.mark.parametrize("pooling", ["last", "class"])
def test_pooling_is_a_flag(tmp_path, pooling):
    make(tmp_path / "run", run={"steps": 3, "eval_every": 0}).to_file(tmp_path / "tiny.yaml")
    assert main(["train", "--config", str(tmp_path / "tiny.yaml"), "--classify.pooling", pooling]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert model.config.pooling == pooling


# --- mistakes


def failed(capsys, *arguments: str) -> str:
    """The message of a command that ends with status 2, without a traceback."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err.splitlines()[-2]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--length", "7"], "holds a classifier: length=7 is for texts; leave it out"),
    (["--stride", "7"], "holds a classifier: stride=7 is for texts; leave it out"),
    (["--data", "x.txt"], "holds a classifier: data.path='x.txt' is for texts; leave it out"),
    (["--windows", "0"], "windows must be at least 1, got 0"),
])  # fmt: skip
def test_eval_refuses_what_only_texts_have(trained, capsys, arguments, message):
    assert message in failed(capsys, "eval", str(trained), *arguments)


def test_a_folder_without_its_task_cannot_be_measured(trained, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained / name, tmp_path / name)
    assert "has no config.yaml that names the sequences" in failed(capsys, "eval", str(tmp_path))


def test_a_classifier_continues_no_prompt(trained, capsys):
    message = failed(capsys, "generate", str(trained), "--prompt", "x")
    assert "holds a classifier: it labels whole sequences and predicts no text; `subquad eval` measures it" in message


@pytest.mark.parametrize("name", [n for n in names() if mechanism(n).forms == ("bidirectional",)] + ["perceiver"])
def test_a_model_that_sees_the_future_is_sent_to_the_other_task(capsys, name):
    message = failed(capsys, "train", "--model.attention", name, "--model.position", "sinusoidal")
    assert f"attention {name!r} has no causal form, which --task language needs" in message
    assert "its bidirectional form is for --task classify" in message


@pytest.mark.parametrize("name", [n for n in names() if mechanism(n).forms == ("causal",)] + ["perceiver_ar"])
def test_a_model_that_sees_the_past_alone_is_sent_to_the_other_task(name):
    config = TrainConfig.from_dict({"task": "classify", "model": {"attention": name}})
    with pytest.raises(ValueError, match=f"attention {name!r} has no bidirectional form, which --task classify needs"):
        check(config)
    with pytest.raises(ValueError, match="its causal form is for --task language"):
        prepare_task(config, None)


@pytest.mark.parametrize("task", ["language", "classify"])
def test_an_unknown_name_is_answered_with_mechanisms_and_stacks(task):
    config = TrainConfig.from_dict({"task": task, "model": {"attention": "preceiver"}})
    with pytest.raises(ValueError, match=r"unknown attention 'preceiver'; did you mean 'perceiver'\? valid: .*full"):
        check_forms(config)


@pytest.mark.parametrize(("values", "message"), [
    ({"task": "classify", "data": {"path": "x"}}, "data.path='x' has no effect with task=classify; leave it out"),
    ({"classify": {"seed": 1}}, "classify.seed=1 has no effect with task=language; leave it out"),
    ({"task": "classify", "model": {"loops": 2}}, "an encoder has neither loops nor a look-up head"),
    ({"task": "classify", "classify": {"held_out": 0}}, "classify.held_out must be at least 1, got 0"),
    ({"task": "classify", "classify": {"examples": 0}}, "classify.examples must be at least 1, got 0"),
    ({"task": "classify", "classify": {"seed": -1}}, "classify.seed must be at least 0, got -1"),
    ({"task": "classify", "classify": {"pooling": "max"}}, "classify.pooling must be one of its choices, got 'max'"),
    ({"task": "label"}, "task must be one of its choices, got 'label'; valid: classify, image, language"),
])  # fmt: skip
def test_wrong_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


def test_the_defaults_of_the_other_task_and_the_cache_may_be_there():
    given = DataConfig(cache="here").to_dict()
    assert TrainConfig.from_dict({"task": "classify", "data": given}).classify == ClassifyConfig()


def test_sequences_too_short_for_the_task_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the toy task needs sequences of at least 15 tokens, got length=14"):
        train(make(tmp_path, batch={"length": 14}))
