"""The first phase of a classifier: what it reads and learns, and that either phase is gone on with."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset

from subquad.attention import mechanism, names
from subquad.cli import main
from subquad.data import labelled
from subquad.hf import SubquadForPreTraining, SubquadForSequenceClassification
from subquad.training import PretrainConfig, TrainConfig, train
from subquad.training.errors import CheckpointError
from subquad.training.loop import StopSignal
from subquad.training.tasks import check, prepare_task
from subquad.training.tasks_classify import begin_with, check_pretraining, first_phase
from tests.training.metrics import records

VALUES = {
    "task": "classify",
    "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "full", "init_std": 0.1, "dropout": 0.1},
    "classify": {"examples": 40, "held_out": 12},
    "pretrain": {"kind": "denoise", "steps": 6},
    "batch": {"length": 20, "size": 4},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup": 2},
    "run": {
        "steps": 4,
        "log_every": 1,
        "eval_every": 2,
        "eval_windows": 10,
        "save_every": 2,
        "keep": 9,
        "device": "cpu",
        "threads": 1,
        "precision": "float32",
    },
}
BOTH_FORMS = [name for name in names() if len(mechanism(name).forms) == 2]


def make(folder="unused", **groups) -> TrainConfig:
    values = {name: VALUES[name] | groups.get(name, {}) for name in VALUES if name != "task"}
    values["run"] |= {"folder": str(folder)}
    return TrainConfig.from_dict({"task": groups.get("task", "classify"), "lora": groups.get("lora", {}), **values})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of both phases that was not stopped."""
    folder = tmp_path_factory.mktemp("pretrain") / "whole"
    train(make(folder))
    return folder


def same_bits(one, other):
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


# --- what the first phase is


def test_it_is_a_run_of_its_own(whole):
    first = whole / "pretrain"
    for name in ("config.yaml", "metrics.jsonl", "model.safetensors", "tensorboard", "checkpoints/checkpoint-6"):
        assert (first / name).exists()
    config = TrainConfig.from_file(first / "config.yaml")
    assert (config.task, config.run.steps, config.run.folder) == ("pretrain", 6, str(first))
    losses = [record for record in records(first) if "eval_loss" in record]
    assert [record["step"] for record in losses] == [2, 4, 6]
    assert all("eval_accuracy" not in record for record in losses)
    assert SubquadForPreTraining.from_pretrained(first).config.objective == "denoise"
    assert TrainConfig.from_file(whole / "config.yaml").task == "classify"
    assert TrainConfig.from_file(whole / "config.yaml").model.vocab_size == 3 + 1  # the mask token


def test_its_own_learning_rate_and_a_short_warm_up():
    config = first_phase(make(pretrain={"lr": 0.5, "steps": 100}, run={"steps": 50}, schedule={"warmup": 30}))
    assert (config.optimizer.lr, config.schedule.warmup, config.run.steps) == (0.5, 10, 100)
    assert first_phase(make()).optimizer.lr == 3e-3


@pytest.mark.parametrize("kind", ["denoise", "causal"])
def test_the_classifier_begins_with_the_encoder_that_was_learned(tmp_path, kind):
    config = make(tmp_path, pretrain={"kind": kind}, optimizer={"lr": 1e-12}, run={"steps": 3, "eval_every": 0})
    result = train(config.replace(pretrain=config.pretrain.replace(lr=3e-3)))
    learned = SubquadForPreTraining.from_pretrained(tmp_path / "pretrain").model.encoder.state_dict()
    found = result.model.model.encoder.state_dict()
    assert learned.keys() == found.keys()
    for name, weight in learned.items():
        assert (weight - found[name]).abs().max() < 1e-9 < weight.abs().max(), name
    causal = {block.attention.causal for block in result.model.model.encoder.layers}
    assert causal == {False}


class Forbidden(Dataset):
    """Sequences that nobody may read."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        raise AssertionError("a sequence to measure on was read in pretraining")


class Seen(Dataset):
    """Sequences that remember which of them were read."""

    def __init__(self, items):
        self.items, self.numbers = items, set()

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.numbers.add(index)
        return self.items[index]


def test_it_reads_the_training_sequences_alone(tmp_path, monkeypatch):
    corpus = labelled.labelled_corpus(make().classify, 20)
    seen = Seen(corpus.train)
    closed = dataclasses.replace(corpus, train=seen, held_out=Forbidden(), test=Forbidden())
    monkeypatch.setattr("subquad.training.tasks_classify.labelled_corpus", lambda *args, **kwargs: closed)
    config = first_phase(make(tmp_path, pretrain={"steps": 18}))  # 36 sequences to learn from, 4 to measure on
    task = prepare_task(config, None)
    assert (task.count, len(task.held_out)) == (36, 4)
    assert (task.held_out.indices, len(set(task.train.indices))) == ([9, 19, 29, 39], 36)  # files may be sorted
    assert set(task.train[0]) == {"input_ids", "attention_mask", "labels"}
    assert torch.equal(task.train[0]["labels"], task.train[0]["input_ids"])
    train(config)
    assert seen.numbers == set(range(40))
    with pytest.raises(AssertionError, match="was read in pretraining"):
        train(make(tmp_path / "both", run={"eval_every": 1}))  # the second phase does read them


def test_both_sequences_of_a_pair_are_learned_from(monkeypatch):
    corpus = labelled.labelled_corpus(make().classify, 20)

    class Pairs(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            one, other = corpus.train[index], corpus.train[index + 10]
            return {**one, "pair_input_ids": other["input_ids"], "pair_attention_mask": other["attention_mask"]}

    pairs = dataclasses.replace(corpus, train=Pairs(), pairs=True)
    monkeypatch.setattr("subquad.training.tasks_classify.labelled_corpus", lambda *args, **kwargs: pairs)
    task = prepare_task(make(task="pretrain", classify={"dataset": "retrieval", "path": "x"}), None)
    assert (task.count, len(task.held_out)) == (18, 2)
    for number, (pair, tower) in enumerate((i, t) for i in range(9) for t in range(2)):
        assert torch.equal(task.train[number]["input_ids"], corpus.train[pair + 10 * tower]["input_ids"])


# --- going on


@pytest.mark.parametrize("stage", ["first", "between", "second", "second without the first"])
def test_a_run_that_goes_on_ends_with_the_same_bits(whole, tmp_path, stage):
    parted = tmp_path / "run"
    shutil.copytree(whole, parted)
    (parted / "model.safetensors").unlink()
    shutil.rmtree(parted / "checkpoints/checkpoint-4")
    if stage in ("first", "between"):
        shutil.rmtree(parted / "checkpoints/checkpoint-2")
    if stage == "first":
        for step in (4, 6):
            shutil.rmtree(parted / f"pretrain/checkpoints/checkpoint-{step}")
    if stage == "second without the first":
        shutil.rmtree(parted / "pretrain")
    assert train(make(parted, run={"resume": "must"})).steps == 4
    same_bits(parted, whole)
    assert records(parted) == records(whole)
    assert (parted / "pretrain").exists() == (stage != "second without the first")


def test_a_stop_in_the_first_phase_says_how_to_go_on(whole, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    make(folder).to_file(tmp_path / "run.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "received", True, raising=False)
        patch.setattr(StopSignal, "__init__", lambda self: setattr(self, "_old", {}))
        assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 130
    assert f"go on with:\n  subquad train --config {folder / 'config.yaml'}" in capsys.readouterr().err
    assert not (folder / "model.safetensors").exists()
    assert (folder / "pretrain/checkpoints/checkpoint-1").exists()
    assert main(["train", "--config", str(folder / "config.yaml")]) == 0
    same_bits(folder, whole)


def test_time_is_for_both_phases(tmp_path):
    result = train(make(tmp_path, run={"max_minutes": 1e-6}))
    assert (result.interrupted, result.steps, result.folder) == (True, 0, tmp_path)
    assert (tmp_path / "pretrain/checkpoints/checkpoint-1").exists()


def test_never_refuses_the_first_phases_checkpoints_too(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(CheckpointError, match=r"run\.resume is 'never'"):
        train(make(tmp_path / "run", run={"resume": "never"}))
    with pytest.raises(CheckpointError, match=r"run\.resume is 'must' but .*checkpoints holds no checkpoint"):
        train(make(tmp_path / "empty", run={"resume": "must"}))


@pytest.mark.parametrize(("second", "change"), [
    (True, {"pretrain": {"steps": 7}}),
    (True, {"pretrain": {"kind": "none"}}),
    (True, {"pretrain": {"joint_weight": 0.5}}),
    (True, {"classify": {"causal": True}}),
    (False, {"pretrain": {"mask_fraction": 0.4}}),
    (False, {"pretrain": {"lr": 1e-4}}),
    (False, {"classify": {"pooling": "class"}}),
    (False, {"classify": {"seed": 1}}),
])  # fmt: skip
def test_a_changed_run_is_not_gone_on_with(whole, tmp_path, second, change):
    shutil.copytree(whole, tmp_path / "run")
    if not second:
        shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(CheckpointError, match="was made by other settings: "):
        train(make(tmp_path / "run", **change))


def test_what_was_trained_with_a_setting_is_not_gone_on_with_without_it(tmp_path):
    quick = {"schedule": {"warmup": 0}, "run": {"steps": 1, "eval_every": 0}}
    train(make(tmp_path, pretrain={"kind": "causal", "steps": 1}, **quick))  # no mask token: the same vocabulary
    with pytest.raises(CheckpointError, match=r"pretrain\.kind was 'causal', is None"):
        train(make(tmp_path, pretrain={"kind": "none"}, schedule={"warmup": 0}, run={"steps": 2}))


def test_a_first_phase_that_went_further_is_said_by_its_own_setting(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-6 is at step 6 of the first phase, past pretrain\.steps=5; raise pretrain"
    ):
        train(make(tmp_path / "run", pretrain={"steps": 5}))


# --- the command line


def test_the_flag_is_short_for_its_kind(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    make(tmp_path / "run", pretrain={"kind": "none"}, run={"eval_every": 0}).to_file(file)
    assert main(["train", "--config", str(file), "--pretrain", "causal"]) == 0
    printed = capsys.readouterr()
    assert "first phase: causal, 6 steps" in printed.err
    assert "by logistic regression on a bag of its tokens" in printed.out
    assert json.loads((tmp_path / "run/evaluation.json").read_text())["bag_of_tokens"] is not None
    assert TrainConfig.from_file(tmp_path / "run/config.yaml").pretrain.kind == "causal"
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--pretrain KIND" in capsys.readouterr().out


def test_the_first_phase_alone(tmp_path, capsys):
    make(tmp_path / "run", task="pretrain").to_file(tmp_path / "run.yaml")
    assert main(["train", "--config", str(tmp_path / "run.yaml"), "--run.steps", "3"]) == 0
    assert "nats a predicted token, at step" in capsys.readouterr().out
    assert not (tmp_path / "run/pretrain").exists()
    with pytest.raises(SystemExit):
        main(["eval", str(tmp_path / "run")])
    assert "holds an encoder in pretraining, no finished model" in capsys.readouterr().err


def test_joint_denoising_and_augmentation_train(tmp_path):
    joint = {"kind": "none", "joint_weight": 1.0, "mask_fraction": 0.3, "random_fraction": 0.33}
    result = train(make(tmp_path / "joint", pretrain=joint, run={"eval_every": 0}))
    plain = train(make(tmp_path / "plain", pretrain={"kind": "none"}, run={"eval_every": 0}))
    assert isinstance(result.model, SubquadForSequenceClassification)
    assert records(tmp_path / "joint")[0]["loss"] > 1 + records(tmp_path / "plain")[0]["loss"]  # ln 4 more, about
    assert result.parameters == plain.parameters + 16  # the mask token's row
    assert not (tmp_path / "joint/pretrain").exists()


# --- mistakes


@pytest.mark.parametrize("name", BOTH_FORMS)
def test_the_causal_forms_weights_fit_the_other(name):
    position = "rope" if mechanism(name).rotates else "sinusoidal"
    check_pretraining(make(model={"attention": name, "position": position}, pretrain={"kind": "causal"}))


@pytest.mark.parametrize(("name", "options", "pretrain", "message"), [
    ("linformer", {}, {"kind": "causal"}, "pretrain.kind=causal: attention 'linformer' has no causal form"),
    ("luna", {"tied": False}, {"kind": "causal"}, "the causal form of attention 'luna' has not the weights of its"),
    ("perceiver", {}, {"kind": "denoise"}, "pretrain.kind=denoise: attention 'perceiver' keeps no vector for each"),
    ("perceiver_io", {}, {"kind": "causal"}, "pretrain.kind=causal: perceiver_io reads whole sequences"),
    ("perceiver_io", {}, {"kind": "none", "joint_weight": 1.0}, "pretrain.joint_weight=1.0: attention 'perceiver_io'"),
])  # fmt: skip
def test_what_cannot_be_learned_is_refused_before_any_work(name, options, pretrain, message):
    config = make(model={"attention": name, "options": {name: options}, "position": "learned"}, pretrain=pretrain)
    with pytest.raises(ValueError, match=message):
        check(config)
    with pytest.raises(ValueError, match=message):
        prepare_task(config, None)


def test_a_class_token_is_not_learned_by_the_causal_form():
    config = make(classify={"pooling": "class"}, pretrain={"kind": "causal"})
    check_pretraining(config)
    first, second = prepare_task(first_phase(config), None).make_model(), prepare_task(config, None).make_model()
    weights = first.model.encoder.state_dict()
    assert "class_token" not in weights
    before = second.model.encoder.class_token.clone()
    made = begin_with(second, weights).model.encoder
    assert torch.equal(made.class_token, before)
    assert torch.equal(made.embedding.tokens.weight, weights["embedding.tokens.weight"])
    del weights["norm.weight"]
    with pytest.raises(ValueError, match=r"do not fit the classifier: norm\.weight"):
        begin_with(second, weights)


def test_a_perceiver_has_a_query_for_every_position():
    model = {"attention": "perceiver_io", "position": "none", "max_positions": 19}
    with pytest.raises(ValueError, match=r"model\.max_positions=19 positions, below batch\.length=20; raise model"):
        check(make(model=model))
    check(make(model=model | {"max_positions": 20}))


def test_one_sequence_is_too_few():
    with pytest.raises(ValueError, match="pretraining needs at least 2 examples, one of them to be measured on, got 1"):
        prepare_task(make(task="pretrain", classify={"examples": 1}), None)


@pytest.mark.parametrize(("values", "message"), [
    ({"steps": 0}, "pretrain.steps must be at least 1, got 0"),
    ({"lr": 0.0}, "pretrain.lr must be a positive number, got 0.0"),
    ({"mask_fraction": 0.0}, "pretrain.mask_fraction must be above 0 and below 1, got 0.0"),
    ({"mask_fraction": 1.0}, "pretrain.mask_fraction must be above 0 and below 1, got 1.0"),
    ({"random_fraction": 1.5}, "pretrain.random_fraction must lie between 0 and 1, got 1.5"),
    ({"joint_weight": -1.0}, "pretrain.joint_weight must be at least 0, got -1.0"),
])  # fmt: skip
def test_wrong_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**values)


def test_a_task_without_a_first_phase_does_not_take_its_settings():
    with pytest.raises(ValueError, match=r"pretrain\.kind='denoise' has no effect with task=language; leave it out"):
        TrainConfig.from_dict({"pretrain": {"kind": "denoise"}})
    with pytest.raises(
        ValueError, match=r"task=pretrain needs to know what is learned: pretrain\.kind must be denoise or"
    ):
        TrainConfig.from_dict({"task": "pretrain"})
    with pytest.raises(
        ValueError, match=r"lora\.rank adapts a trained model, which needs no first phase and no second"
    ):
        make(lora={"rank": 2, "base": "runs/base"})
