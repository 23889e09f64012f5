"""Training on a probe: by the same path as on text, to the same bits after a resume, and it learns."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from subquad.cli import train as command
from subquad.config import read_mapping
from subquad.data.probes import HELD_OUT, ProbeCorpus, probe_rows
from subquad.evaluation.probes import overall, right_answers
from subquad.recipes import recipe_path, recipes
from subquad.training import TrainConfig, train
from subquad.training.errors import CheckpointError
from subquad.training.runs import is_probe, load_probe, load_run
from subquad.training.tasks import check
from tests.training.metrics import records

pytestmark = pytest.mark.draws

VALUES = {
    "task": "probe",
    "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "window", "init_std": 0.1, "dropout": 0.1},
    "probe": {"name": "mqar", "pairs": 2, "symbols": 4, "examples": 50, "held_out": 21},
    "batch": {"length": 20, "size": 4, "accumulation": 2},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup": 2},
    "run": {
        "steps": 8,
        "log_every": 2,
        "eval_every": 4,
        "eval_windows": 21,
        "save_every": 4,
        "device": "cpu",
        "threads": 1,
        "precision": "float32",
    },
}


def make(folder, **groups) -> TrainConfig:
    values = {name: VALUES[name] if name == "task" else VALUES[name] | groups.get(name, {}) for name in VALUES}
    values["run"] |= {"folder": str(folder)}
    return TrainConfig.from_dict(values | {name: groups[name] for name in groups if name not in values})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that the command made."""
    folder = tmp_path_factory.mktemp("probe")
    make(folder / "run").to_file(folder / "tiny.yaml")
    assert command.run(["--config", str(folder / "tiny.yaml")]) == 0
    return folder / "run"


def test_a_run_keeps_all_that_it_measured(trained):
    for name in ("config.yaml", "metrics.jsonl", "model.safetensors", "curves.png", "evaluation.json", "report.json"):
        assert (trained / name).stat().st_size > 0
    assert not (trained / "tokenizer.json").exists()
    config = TrainConfig.from_file(trained / "config.yaml")
    assert (config.task, config.model.vocab_size) == ("probe", 8)
    report = json.loads((trained / "report.json").read_text())
    assert (report["chance"], report["sequences"], report["steps"]) == (0.5, 21, 8)


def test_three_ways_to_measure_the_held_out_sequences_agree(trained):
    loaded = load_probe(trained)
    rows = probe_rows(loaded.config.probe, 20, 21, seed=(0, HELD_OUT))
    score = overall(rows, right_answers(loaded.decoder, rows))
    assert 0 < score.value < 1
    assert json.loads((trained / "evaluation.json").read_text())["accuracy"] == score.value
    assert [line["step"] for line in records(trained) if "eval_loss" in line] == [4, 8]
    assert records(trained)[-1]["eval_accuracy"] == score.value


def test_a_perceiver_trains_and_its_accuracy_is_that_of_its_latents(tmp_path):
    options = {"perceiver_ar": {"latents": 6}}
    probe = {"name": "passkey", "digits": 3, "symbols": 4}
    result = train(make(tmp_path, model={"attention": "perceiver_ar", "options": options, "dropout": 0.0}, probe=probe))
    rows = probe_rows(result.config.probe, 20, 21, seed=(0, HELD_OUT))
    assert records(tmp_path)[-1]["eval_accuracy"] == overall(rows, right_answers(result.model.model, rows)).value
    assert isinstance(result.corpus, ProbeCorpus)


def test_the_folder_is_a_transformers_model_that_knows_no_text(trained):
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert model.config.vocab_size == 8
    assert is_probe(trained)
    assert is_probe(trained / "checkpoints" / "checkpoint-8")
    with pytest.raises(ValueError, match="holds a model of the probe mqar, which knows no text; `subquad probe` meas"):
        load_run(trained)


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


@pytest.mark.parametrize("change", [{"probe": {"seed": 1}}, {"probe": {"pairs": 1}}, {"batch": {"length": 21}}])
def test_a_changed_run_is_not_gone_on_with(trained, tmp_path, change):
    shutil.copytree(trained, tmp_path / "run")
    with pytest.raises(CheckpointError, match="was made by other settings: "):
        train(make(tmp_path / "run", **change))


def test_a_probe_is_learned(tmp_path):
    groups = {
        "model": {"dim": 32, "dropout": 0.0, "init_std": 0.05},
        "probe": {"name": "copy", "symbols": 6, "examples": 10_000},
        "batch": {"length": 13, "size": 32, "accumulation": 1},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.01},
        "schedule": {"warmup": 5},
        "run": {"steps": 60, "eval_every": 60, "save_every": 60},
    }
    train(make(tmp_path, **groups))
    assert records(tmp_path)[-1]["eval_accuracy"] > 0.9  # chance is one sixth


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("probe-")])
def test_a_recipe_learns_what_it_says(tmp_path, name):
    values = read_mapping(recipe_path(name))
    values["run"] |= {"folder": str(tmp_path), "device": "cpu", "precision": "float32", "threads": 1}
    config = TrainConfig.from_dict(values)
    train(config)
    assert records(tmp_path)[-1]["eval_accuracy"] > max(0.7, 3 * config.probe.chance)


@pytest.mark.parametrize(("values", "message"), [
    ({"task": "probe", "data": {"path": "x"}}, "data.path='x' has no effect with task=probe; leave it out"),
    ({"task": "probe", "classify": {"seed": 1}}, "classify.seed=1 has no effect with task=probe; leave it out"),
    ({"probe": {"seed": 1}}, "probe.seed=1 has no effect with task=language; leave it out"),
    ({"task": "classify", "probe": {"pairs": 4}}, "probe.pairs=4 has no effect with task=classify; leave it out"),
    ({"task": "probe", "probe": {"name": "passcode"}}, "probe.name must be one of its choices, got 'passcode'"),
    ({"task": "probe", "batch": {"length": 24}}, "mqar with pairs=8 needs sequences of at least 25 tokens"),
    ({"task": "probe", "probe": {"symbols": 7}}, "the vocabulary is too small: mqar needs a key for each"),
])  # fmt: skip
def test_wrong_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


@pytest.mark.parametrize(("latents", "more", "message"), [
    (15, {}, "with its last 15 tokens at least, and mqar asks from place 5 of 20 on: 16 latents are needed"),
    (17, {"vary_latents": True}, r"with its last \d+ tokens at least, and mqar asks from place 5 of 20 on"),
    (20, {}, "perceiver_ar would have no history"),
])  # fmt: skip
def test_a_perceiver_whose_latents_do_not_reach_is_refused(tmp_path, latents, more, message):
    options = {"perceiver_ar": {"latents": latents, **more}}
    config = make(tmp_path, model={"attention": "perceiver_ar", "options": options, "dropout": 0.0})
    with pytest.raises(ValueError, match=message):
        check(config)
    with pytest.raises(ValueError, match=message):
        train(config)


def test_a_bidirectional_mechanism_is_refused(tmp_path):
    with pytest.raises(ValueError, match="attention 'linformer' has no causal form, which --task probe needs"):
        check(make(tmp_path, model={"attention": "linformer"}))
