"""Classifiers: what a run measures and keeps, what is refused; and their first phase without labels."""

import dataclasses
import math
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from subquad import program
from subquad.attention import mechanism, names
from subquad.cli import main
from subquad.config import read_mapping
from subquad.data import labelled
from subquad.hf import SubquadEncoderForSequenceClassification
from subquad.hf.encoders import SubquadForPreTraining
from subquad.recipes import recipe_path
from subquad.training import TrainConfig, train
from subquad.training.errors import CheckpointError
from subquad.training.tasks import check, check_forms, prepare_task
from subquad.training.tasks_classify import begin_with, check_pretraining, first_phase
from tests.data.lra.layouts import write_release
from tests.training.configs import CLASSIFY, TOY, pretraining
from tests.training.helpers import (
    assert_same_run,
    failed,
    forget,
    read_json,
    records,
    steps_of,
    stop_at_once,
    train_by_command,
)

POOLED = TOY | {"pooling": "last"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config_in):
    """A run that the command made."""
    return train_by_command(config_in(tmp_path_factory.mktemp("classify"), CLASSIFY | {"classify": POOLED}))


def test_a_run_keeps_all_that_it_measured(trained):
    assert not (trained / "tokenizer.json").exists()
    evaluated = [line for line in records(trained) if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [2, 4]
    assert all((10 * line["eval_accuracy"]).is_integer() for line in evaluated)
    report, evaluation = (read_json(trained / f"{name}.json") for name in ("report", "evaluation"))
    assert report["accuracy"] == evaluation["accuracy"]
    assert math.isclose(16 * evaluation["accuracy"], round(16 * evaluation["accuracy"]))
    assert (evaluation["examples"], report["examples"], report["steps"]) == (16, 16, 4)  # of 21
    assert 0.5 <= evaluation["constant"] < 1
    config = TrainConfig.from_file(trained / "config.yaml")
    assert (config.task, config.model.vocab_size) == ("classify", 3)
    model = AutoModelForSequenceClassification.from_pretrained(trained)
    assert isinstance(model, SubquadEncoderForSequenceClassification)
    assert (model.config.id2label, model.config.pooling) == ({0: "marked zeros", 1: "marked ones"}, "last")
    assert model.num_parameters() == report["parameters"]


def test_eval_measures_what_the_run_reported(trained, tmp_path, capsys):
    file, reported = tmp_path / "e.json", read_json(trained / "evaluation.json")
    for folder in (trained, trained / "checkpoints" / "checkpoint-4"):
        options = ["--windows", "16", "--device", "cpu", "--batch_size", "4"]
        assert main(["eval", str(folder), "--json", str(file), *options]) == 0
        measured = read_json(file)
        assert measured["accuracy"] == reported["accuracy"]
        printed = capsys.readouterr().out
        for part in (f"{measured['accuracy']:.2%}", "by always predicting the most frequent label", "'marked ones'"):
            assert part in printed
    assert main(["eval", str(trained), "--windows", "7", "--batch_size", "3", "--json", str(file)]) == 0
    assert read_json(file)["examples"] == 7


def test_the_toy_is_learned(tmp_path):
    values = read_mapping(recipe_path("toy-classify"))
    values["run"] |= {"folder": str(tmp_path), "steps": 60, "eval_every": 60}
    values["run"] |= {"device": "cpu", "precision": "float32", "threads": 1}
    values["batch"] |= {"length": 16}
    values["schedule"] |= {"warmup": 5}
    result = train(TrainConfig.from_dict(values))
    assert records(tmp_path)[-1]["eval_accuracy"] > 0.8, "chance is one half"
    assert result.best_loss < math.log(2)


def test_commands_refuse_what_only_texts_have_and_a_folder_without_its_task(trained, tmp_path, capsys):
    for message, command, *options in (
        ("holds a classifier: length=7 is for texts; leave it out", "eval", "--length", "7"),
        ("holds a classifier: data.path='x.txt' is for texts; leave it out", "eval", "--data", "x.txt"),
        ("holds a classifier: dtype='float16' is for texts; leave it out", "eval", "--dtype", "float16"),
        ("windows must be at least 1, got 0", "eval", "--windows", "0"),
        ("holds a classifier, which labels sequences and predicts no text; measure", "generate", "--prompt", "x"),
    ):
        assert message in failed(capsys, command, trained, *options)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained / name, tmp_path / name)
    assert "has no config.yaml that names its test sequences" in failed(capsys, "eval", tmp_path)


FORMS = {name: mechanism(name).forms for name in names()}
BIDIRECTIONAL_ONLY = [name for name, forms in FORMS.items() if forms == ("bidirectional",)] + ["perceiver"]
CAUSAL_ONLY = [name for name, forms in FORMS.items() if forms == ("causal",)] + ["perceiver_ar"]


def prepare(config):
    return prepare_task(config, None)


def test_a_model_without_the_form_of_its_task_is_sent_to_the_other_task():
    message = "attention {!r} has no {} form, which --task {} needs; its {} form is for --task {}"
    for name in BIDIRECTIONAL_ONLY:
        refused = message.format(name, "causal", "language", "bidirectional", "classify")
        with pytest.raises(ValueError, match=refused):
            check_forms(TrainConfig.from_dict({"model": {"attention": name, "position": "sinusoidal"}}))
    for name in CAUSAL_ONLY:
        refused = message.format(name, "bidirectional", "classify", "causal", "language")
        for refuse in (check, prepare):
            with pytest.raises(ValueError, match=refused):
                refuse(TrainConfig.from_dict({"task": "classify", "model": {"attention": name}}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, config_in):
    """A run of both phases that was not stopped."""
    return train(config_in(tmp_path_factory.mktemp("pretrain"), pretraining(), keep=9))


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of it where `make_config` has its run."""
    return shutil.copytree(whole.folder, tmp_path / "run")


def test_the_first_phase_is_a_run_of_its_own(whole):
    first = whole.folder / "pretrain"
    assert steps_of(first / "checkpoints") == [1, 2, 3, 4]
    config = TrainConfig.from_file(first / "config.yaml")
    assert (config.task, config.run.steps, config.run.folder) == ("pretrain", 4, str(first))
    evaluated = [record for record in records(first) if "eval_loss" in record]
    assert [record["step"] for record in evaluated] == [2, 4]
    assert all("eval_accuracy" not in record for record in evaluated)
    assert SubquadForPreTraining.from_pretrained(first).config.objective == "denoise"
    assert TrainConfig.from_file(whole.folder / "config.yaml").task == "classify"
    assert whole.config.model.vocab_size == 3 + 1, "with the mask token"


def test_the_first_phase_has_its_own_learning_rate_and_a_short_warm_up(make_config):
    config = first_phase(make_config(pretraining(lr=0.5, steps=100), {"schedule.warmup": 30}, steps=50))
    assert (config.optimizer.lr, config.schedule.warmup, config.run.steps) == (0.5, 10, 100)
    assert first_phase(make_config(pretraining())).optimizer.lr == 3e-3


@pytest.mark.parametrize("kind", ["denoise", "causal"])
def test_the_classifier_begins_with_the_encoder_that_was_learned(make_config, kind):
    result = train(make_config(pretraining(kind=kind, lr=3e-3), {"optimizer.lr": 1e-12}, eval_every=0))
    learned = SubquadForPreTraining.from_pretrained(result.folder / "pretrain").model.encoder.state_dict()
    found = result.model.model.encoder.state_dict()
    assert learned.keys() == found.keys()
    for name, weight in learned.items():
        assert (weight - found[name]).abs().max() < 1e-9 < weight.abs().max(), name
    assert {block.attention.causal for block in result.model.model.encoder.layers} == {False}


class Watched(list):
    """Sequences that remember which of them were read."""

    def __init__(self, items):
        super().__init__(items[i] for i in range(len(items)))
        self.read = set()

    def __getitem__(self, index):
        self.read.add(index)
        return super().__getitem__(index)


def test_the_first_phase_reads_only_the_training_sequences(make_config, monkeypatch):
    config = make_config(pretraining(steps=9))
    corpus = labelled.labelled_corpus(config.classify, 20)
    parts = {name: Watched(getattr(corpus, name)) for name in ("train", "held_out", "test")}
    watched = dataclasses.replace(corpus, **parts)
    monkeypatch.setattr("subquad.training.tasks_classify.labelled_corpus", lambda *args, **kwargs: watched)
    task = prepare(first_phase(config))
    assert (task.count, len(task.held_out)) == (36, 4)
    assert (task.held_out.indices, len(set(task.train.indices))) == ([9, 19, 29, 39], 36), "files may be sorted"
    assert set(task.train[0]) == {"input_ids", "attention_mask", "labels"}
    assert torch.equal(task.train[0]["labels"], task.train[0]["input_ids"])
    train(first_phase(config))
    assert parts["train"].read == set(range(40))
    assert not parts["held_out"].read | parts["test"].read
    train(make_config(CLASSIFY, folder="second"))
    assert parts["held_out"].read, "the second phase does read them"


def test_both_sequences_of_a_pair_are_learned_from(make_config, tmp_path):
    data = {"dataset": "retrieval", "path": str(write_release(tmp_path / "pairs", "retrieval")), "cache": str(tmp_path)}
    task = prepare(make_config(pretraining(), {"task": "pretrain", "classify": data}, eval_windows=2))
    assert (task.count, task.held_out.indices) == (22, [22, 23])
    for number in range(task.count):
        pair = task.data.train[number // 2]
        tokens = pair["pair_input_ids"] if number % 2 else pair["input_ids"]
        assert torch.equal(task.train[number]["input_ids"], tokens)


@pytest.mark.parametrize("stage", ["first", "between", "second", "second without the first"])
def test_either_phase_is_resumed_to_the_same_bits(copied, whole, make_config, stage):
    forget(copied, *((1, 2) if stage in ("first", "between") else (2,)))
    if stage == "first":
        forget(copied / "pretrain", 3, 4)
    if stage == "second without the first":
        shutil.rmtree(copied / "pretrain")
    train(make_config(pretraining(), resume="must"))
    assert_same_run(whole.folder, copied)
    assert (copied / "pretrain").exists() == (stage != "second without the first")


def test_a_stop_in_the_first_phase_says_how_to_resume(make_config, whole, tmp_path, capsys):
    folder, file = tmp_path / "run", tmp_path / "run.yaml"
    make_config(pretraining()).to_file(file)
    with pytest.MonkeyPatch.context() as patch:
        stop_at_once(patch)
        assert main(["train", "--config", str(file)]) == 130
    assert program.command("train", "--config", folder / "config.yaml") in capsys.readouterr().err
    assert not (folder / "model.safetensors").exists()
    assert steps_of(folder / "pretrain/checkpoints") == [1]
    train(TrainConfig.from_file(folder / "config.yaml"))
    assert_same_run(whole.folder, folder)


def test_minutes_are_for_the_second_phase(make_config, tmp_path):
    result = train(make_config(pretraining(), steps=None, minutes=1e-6))
    assert (result.interrupted, result.steps, result.folder) == (False, 1, tmp_path / "run")
    assert steps_of(tmp_path / "run/pretrain/checkpoints")[-1] == 4


@pytest.mark.parametrize(("changes", "message"), [
    ({"run.resume": "never"}, r"run\.resume is 'never'"),
    (pretraining(mask_fraction=0.4), "was made with other settings: "),
    (pretraining(steps=3), r"checkpoint-4 is at step 4 of the first phase, past pretrain\.steps=3; raise pretrain"),
])  # fmt: skip
def test_a_changed_first_phase_is_not_resumed(copied, make_config, changes, message):
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(CheckpointError, match=message):
        train(make_config(pretraining(), changes))


def test_the_first_phase_alone(make_config, capsys):
    run = train_by_command(make_config(pretraining(), {"task": "pretrain"}))
    assert "nats per predicted token, at step" in capsys.readouterr().out
    assert not (run / "pretrain").exists()
    assert "holds a pretrained encoder, which is the first phase" in failed(capsys, "eval", run)


def test_a_joint_denoising_loss_is_added_to_the_labels_own(make_config):
    joint = pretraining(kind="none", joint_weight=1.0, mask_fraction=0.3, random_fraction=0.33)
    both = train(make_config(joint, folder="both", eval_every=0))
    plain = train(make_config(pretraining(kind="none"), folder="plain", eval_every=0))
    assert isinstance(both.model, SubquadEncoderForSequenceClassification)
    assert records(both.folder)[0]["loss"] > 1 + records(plain.folder)[0]["loss"], "about ln 4 more"
    assert both.parameters == plain.parameters + 16, "the mask token's row"
    assert not (both.folder / "pretrain").exists()


@pytest.mark.parametrize("name", [name for name, forms in FORMS.items() if len(forms) == 2])
def test_the_causal_forms_weights_fit_the_other(make_config, name):
    model = {"model.attention": name, "model.position": "rope" if mechanism(name).rotates else "sinusoidal"}
    check_pretraining(make_config(pretraining(kind="causal"), model))


@pytest.mark.parametrize(("attention", "changes", "message"), [
    ("linformer", pretraining(kind="causal"), "pretrain.kind=causal: attention 'linformer' has no causal form"),
    ("luna", pretraining(kind="causal"), "the causal form of attention 'luna' doesn't have the weights of the bidirec"),
    ("perceiver", pretraining(), "pretrain.kind=denoise: attention 'perceiver' keeps no vector for each"),
    ("perceiver_io", pretraining(kind="causal"), "pretrain.kind=causal: perceiver_io reads whole sequences"),
    ("perceiver_io", pretraining(kind="none", joint_weight=1.0), "joint_weight=1.0: attention 'perceiver_io' has no"),
    ("perceiver_io", pretraining() | {"model.max_positions": 19}, "=19 positions, below batch.length=20; raise model"),
])  # fmt: skip
def test_an_impossible_first_phase_is_refused_before_any_work(make_config, attention, changes, message):
    position = "none" if "model.max_positions" in changes else "learned"
    model = {"model.attention": attention, "model.position": position, "model.options": {"luna": {"tied": False}}}
    for refuse in (check, prepare):
        with pytest.raises(ValueError, match=message):
            refuse(make_config(changes, model))


def test_a_class_token_is_not_learned_by_the_causal_form(make_config):
    config = make_config(pretraining(kind="causal"), {"classify": TOY | {"pooling": "class"}})
    check_pretraining(config)
    first, second = prepare(first_phase(config)).make_model(), prepare(config).make_model()
    weights = first.model.encoder.state_dict()
    assert "class_token" not in weights
    before = second.model.encoder.class_token.clone()
    made = begin_with(second, weights).model.encoder
    assert torch.equal(made.class_token, before)
    assert torch.equal(made.embedding.tokens.weight, weights["embedding.tokens.weight"])
    del weights["norm.weight"]
    with pytest.raises(ValueError, match=r"don't fit the classifier: norm\.weight"):
        begin_with(second, weights)


def test_one_sequence_is_too_few(make_config):
    with pytest.raises(ValueError, match="pretraining needs at least 2 examples, one of them held out, got 1"):
        prepare(make_config(pretraining(), {"task": "pretrain", "classify": {"examples": 1}}))
