"""Language runs: packed documents, token shards, windows of Perceiver AR; and runs on a memory probe."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from subquad.cli import main
from subquad.config import read_mapping
from subquad.data import write_tokens
from subquad.data.probes import HELD_OUT, ProbeCorpus, probe_rows
from subquad.data.token_set import ShardError
from subquad.data.tokenizers import load_tokenizer
from subquad.evaluation.probes import overall, right_answers
from subquad.models import Decoder
from subquad.models.stacks import options_of
from subquad.recipes import recipe_path, recipes
from subquad.training import TrainConfig, train
from subquad.training.errors import CheckpointError
from subquad.training.loop import Loop
from subquad.training.runs import is_probe, load_probe, load_run
from subquad.training.tasks import check, prepare_task
from tests.data.sets import flip
from tests.training.conftest import MakeConfig
from tests.training.helpers import assert_same_run, assert_same_weights, records

NO_EVALUATION = {"run.eval_every": 0}


@pytest.mark.parametrize(("length", "part"), [(2000, "training"), (400, "held-out")])
def test_texts_shorter_than_a_window_are_refused(make_config: MakeConfig, length: int, part: str) -> None:
    message = rf"batch.length={length} is longer than the {part} part of the text, which has \d+ tokens; give more"
    with pytest.raises(ValueError, match=message):
        prepare_task(make_config({"batch.length": length}), None)


# --- packed documents and shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of token shards of documents of one to three dozen bytes."""
    home = tmp_path_factory.mktemp("shards")
    (home / "texts").mkdir()
    for i in range(60):
        (home / "texts" / f"{i:02d}.txt").write_text(f"line {i}\n" * (1 + i * 7 % 5))
    write_tokens(home / "shards", [str(home / "texts")], load_tokenizer("bytes"), shard_tokens=200)
    return home / "shards"


def packed(shards: Path) -> dict[str, Any]:
    return {"data.path": str(shards), "data.pack": "documents", "data.held_out": 0.1}


def test_a_step_is_the_mean_over_all_its_labels(
    make_config: MakeConfig, shards: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Windows hold different numbers of labels: a mean of means over the accumulation would be another step."""
    seen: list[tuple[int, int]] = []
    loss = Loop.loss

    def logged(self: Loop, batch: dict[str, Tensor], labels: Any) -> Tensor:
        seen.append((int((batch["labels"] != -100).sum()), int(labels)))
        return loss(self, batch, labels)

    monkeypatch.setattr(Loop, "loss", logged)
    with caplog.at_level(logging.INFO):
        train(make_config({**packed(shards), "run.steps": 2, **NO_EVALUATION}))
    assert len([1 for record in caplog.records if "windows of whole documents, " in record.message]) == 2
    assert len(seen) == 4
    for (first, all_first), (second, all_second) in zip(seen[::2], seen[1::2], strict=True):
        assert first != second, "the test needs batches with different numbers of labels"
        assert all_first == all_second == first + second


def test_a_resumed_run_has_the_same_packing_bit_for_bit(make_config: MakeConfig, shards: Path, tmp_path: Path) -> None:
    train(make_config({**packed(shards), "run.folder": str(tmp_path / "whole")}))
    train(make_config({**packed(shards), "run.steps": 2}))
    with pytest.raises(CheckpointError, match=r"data\.pack was 'documents', is None"):
        train(make_config({**packed(shards), "data.pack": "stream"}))
    train(make_config(packed(shards)))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_bad_shard_stops_a_run_or_is_skipped(
    make_config: MakeConfig, shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = shutil.copytree(shards, tmp_path / "damaged")
    flip(damaged / "00001.tokens")
    changes = {**packed(damaged), "data.pack": "stream", "batch.size": 8, **NO_EVALUATION}
    with pytest.raises(ShardError, match=r"shard 00001\.tokens of .*damaged cannot be read"):
        train(make_config(changes))
    skipping = {"data.bad_shards": "skip", "run.folder": str(tmp_path / "skip")}
    assert train(make_config({**changes, **skipping})).steps == 4
    assert "shard 00001.tokens of" in caplog.text


# --- Perceiver AR predicts only the last tokens of a window

LENGTH, LATENTS = 32, 9


def perceiver(**options: Any) -> dict[str, Any]:
    given = {"latents": LATENTS, "history": "self", "history_tokens": 12, **options}
    return {"model.attention": "perceiver_ar", "model.options": {"perceiver_ar": given}}


@pytest.fixture
def count_labels(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], Counter[int]]:
    """Count how often each place of the text is a label in one epoch: what reaches the cross-entropy."""
    places: Counter[int] = Counter()

    def loss_of_hidden(self: Decoder, h_BMD: Tensor, labels_BM: Tensor, **kwargs: Any) -> Tensor:
        assert labels_BM.shape == h_BMD.shape[:2]
        places.update(labels_BM[labels_BM >= 0].tolist())
        return h_BMD.sum()

    monkeypatch.setattr(Decoder, "loss_of_hidden", loss_of_hidden)

    def count(task: Any, model: Any) -> Counter[int]:
        for index in range(task.count):
            tokens = task.train[index]["input_ids"]
            here = torch.arange(index * task.train.stride, index * task.train.stride + len(tokens))
            assert tokens.tolist() == task.data.train.tokens[here.numpy()].tolist()
            model(tokens[None], labels=here[None], use_cache=False)
        return places

    return count


@torch.no_grad()
@pytest.mark.parametrize("vary", [False, True])
def test_over_one_epoch_the_labels_cover_the_text(
    make_config: MakeConfig, text: Path, tmp_path: Path, count_labels: Any, vary: bool
) -> None:
    (tmp_path / "short.py").write_text(text.read_text()[:500])
    config = make_config({**perceiver(vary_latents=vary), "data.path": str(tmp_path / "short.py")})
    task = prepare_task(config, None)
    model = task.make_model().train(vary)
    stride = (LATENTS + 1) // 2 - 1 if vary else LATENTS - 1
    assert options_of(config.model).window_labels(LENGTH) == task.train.stride == task.held_out.dataset.stride == stride
    torch.manual_seed(0)
    places = count_labels(task, model)
    assert set(range(LENGTH - stride, max(places) + 1)) <= set(places)
    assert len(task.data.train) - 1 - max(places) < stride
    if vary:
        assert set(places.values()) > {1}, "a token is a label at least once"
    else:
        assert (set(places.values()), min(places)) == ({1}, LENGTH - stride)


def test_windows_of_other_models_overlap_by_one_token(make_config: MakeConfig) -> None:
    task = prepare_task(make_config(), None)
    assert task.train.stride == LENGTH - 1
    assert task.count == (len(task.data.train) - 1) // (LENGTH - 1)


def test_the_log_says_how_many_tokens_are_predicted(make_config: MakeConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "subquad.training"):
        prepare_task(make_config(perceiver()), None)
    said = "predicts the last 8 tokens of each window of 32: 64 of the 256 tokens that a step reads; windows start 8 "
    assert said in caplog.text


@pytest.mark.parametrize(("options", "match"), [
    ({"latents": 32}, "would have no history: batch.length=32 must be above its latents=32; give longer windows"),
    ({"latents": 256}, r"batch.length=32 must be above its latents=256; .* or fewer latents \(model.options"),
    ({"latents": 1}, "perceiver_ar needs at least 2 latents to train, got 1: what a window's last latent predicts"),
    ({"latents": 2, "vary_latents": True}, "needs at least 3 latents to train with vary_latents, got 2"),
    ({"latent": 2}, "no key .*options.perceiver_ar.latent'; did you mean 'latents'"),
])  # fmt: skip
def test_windows_that_do_not_fit_are_refused_before_any_text_is_read(
    make_config: MakeConfig, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    config = make_config({**perceiver(**options), "data.path": str(tmp_path / "nowhere")})
    for refuse in (check, train):
        with pytest.raises(ValueError, match=match):
            refuse(config)
    assert not (tmp_path / "run").exists()


def test_perceiver_ar_takes_no_packed_documents(make_config: MakeConfig, shards: Path) -> None:
    with pytest.raises(ValueError, match="predicts only a window's last tokens and can't train on packed documents"):
        train(make_config({**perceiver(), **packed(shards)}))


@pytest.mark.parametrize("options", [{"latents": 31}, {"latents": 2}, {"latents": 3, "vary_latents": True}])
def test_the_most_and_the_fewest_latents_train(make_config: MakeConfig, options: dict[str, Any]) -> None:
    result = train(make_config({**perceiver(**options), "run.steps": 2}))
    assert (result.steps, result.tokens) == (2, 2 * 32 * 8)


def test_a_resumed_perceiver_draws_the_same_numbers(make_config: MakeConfig, tmp_path: Path) -> None:
    changes = perceiver(vary_latents=True, prefix_dropout=0.3)
    for folder, steps in (("whole", 4), ("run", 2), ("run", 4)):
        train(make_config({**changes, "run.folder": str(tmp_path / folder), "run.steps": steps}))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


# --- memory probes

PROBE = {
    "task": "probe",
    "probe": {"name": "mqar", "pairs": 2, "symbols": 4, "examples": 50, "held_out": 21},
    "batch.length": 20,
    "model.attention": "window",
    "model.init_std": 0.1,
    "run.eval_windows": 21,
}


def held_out_rows(config: TrainConfig) -> Any:
    return probe_rows(config.probe, 20, 21, seed=(0, HELD_OUT))


def test_a_run_on_a_probe_is_measured_saved_loaded_and_resumed(make_config: MakeConfig, tmp_path: Path) -> None:
    make_config(PROBE).to_file(tmp_path / "tiny.yaml")
    assert main(["train", "--config", str(tmp_path / "tiny.yaml")]) == 0
    probe = tmp_path / "run"
    assert not (probe / "tokenizer.json").exists()
    config = TrainConfig.from_file(probe / "config.yaml")
    assert (config.task, config.model.vocab_size) == ("probe", 8)
    report, evaluation = (json.loads((probe / f"{name}.json").read_text()) for name in ("report", "evaluation"))
    assert (report["chance"], report["sequences"], report["steps"]) == (0.5, 21, 4)

    rows = held_out_rows(config)
    score = overall(rows, right_answers(load_probe(probe).decoder, rows))
    assert 0 < score.value < 1
    assert records(probe)[-1]["eval_accuracy"] == evaluation["accuracy"] == score.value
    assert [line["step"] for line in records(probe) if "eval_loss" in line] == [2, 4]

    assert AutoModelForCausalLM.from_pretrained(probe).config.vocab_size == 8
    assert is_probe(probe)
    assert is_probe(probe / "checkpoints" / "checkpoint-4")
    with pytest.raises(ValueError, match="holds a model of the probe mqar, which predicts no text; `subquad probe`"):
        load_run(probe)

    for change in ({"probe": PROBE["probe"] | {"seed": 1}}, {"batch.length": 21}):
        with pytest.raises(CheckpointError, match="was made with other settings: "):
            train(make_config({**PROBE, **change}))
    shutil.copytree(probe, tmp_path / "whole")
    shutil.rmtree(probe / "checkpoints" / "checkpoint-4")
    (probe / "model.safetensors").unlink()
    train(make_config({**PROBE, "run.resume": "must"}))
    assert_same_run(tmp_path / "whole", probe)


def test_a_perceiver_is_measured_on_its_latents(make_config: MakeConfig, tmp_path: Path) -> None:
    passkey = {"name": "passkey", "digits": 3, "symbols": 4, "examples": 50, "held_out": 21}
    result = train(make_config({**PROBE, **perceiver(latents=6), "model.dropout": 0.0, "probe": passkey}))
    rows = held_out_rows(result.config)
    assert records(result.folder)[-1]["eval_accuracy"] == overall(rows, right_answers(result.model.model, rows)).value
    assert isinstance(result.corpus, ProbeCorpus)


def test_a_probe_is_learned(make_config: MakeConfig) -> None:
    changes = {
        "model.dim": 32,
        "model.dropout": 0.0,
        "model.init_std": 0.05,
        "probe": {"name": "copy", "symbols": 6, "examples": 10_000, "held_out": 21},
        "batch": {"length": 13, "size": 32},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.01},
        "schedule": {"warmup": 5},
        "run.steps": 60,
        "run.log_every": 60,
        "run.eval_every": 60,
        "run.save_every": 60,
    }
    result = train(make_config({**PROBE, **changes}))
    assert records(result.folder)[-1]["eval_accuracy"] > 0.9, "chance is one sixth"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("probe-")])
def test_a_recipe_learns_what_it_says(tmp_path: Path, name: str) -> None:
    values = read_mapping(recipe_path(name))
    values["run"] |= {"folder": str(tmp_path), "device": "cpu", "precision": "float32", "threads": 1}
    config = TrainConfig.from_dict(values)
    train(config)
    assert records(tmp_path)[-1]["eval_accuracy"] > max(0.7, 3 * config.probe.chance)


@pytest.mark.parametrize(("changes", "message"), [
    (perceiver(latents=15), "the last 15 tokens, but mqar asks from place 5 of 20 on: every step needs 16 latents"),
    (perceiver(latents=17, vary_latents=True), "the last 9 tokens, but mqar asks from place 5 of 20 on"),
    (perceiver(latents=20), "perceiver_ar would have no history"),
    ({"model.attention": "linformer"}, "attention 'linformer' has no causal form, which --task probe needs"),
])  # fmt: skip
def test_a_model_that_does_not_fit_the_probe_is_refused(
    make_config: MakeConfig, changes: dict[str, Any], message: str
) -> None:
    for refuse in (check, train):
        with pytest.raises(ValueError, match=message):
            refuse(make_config({**PROBE, "model.dropout": 0.0, **changes}))
