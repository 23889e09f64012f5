"""Language runs: packed documents, token shards, windows of Perceiver AR; and runs on a memory probe."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from subquad.config import read_mapping
from subquad.data import write_tokens
from subquad.data.probes import HELD_OUT, ProbeCorpus, probe_rows
from subquad.data.token_set import ShardError
from subquad.data.tokenizers import load_tokenizer
from subquad.data.vocabularies import characters
from subquad.evaluation.probes import overall, right_answers
from subquad.layers.criterion import CrossEntropy
from subquad.models.stacks import options_of
from subquad.recipes import recipe_path, recipes
from subquad.training import TrainConfig, train
from subquad.training.runs import is_probe, load_probe, load_run
from subquad.training.tasks import check, prepare_task
from tests.data.sets import flip
from tests.training.configs import MQAR, PROBE, perceiver
from tests.training.helpers import read_json, records, train_by_command


@pytest.mark.parametrize(("changes", "length", "size", "part"), [
    ({}, 2000, 2000, "training"), ({}, 400, 400, "held-out"), (perceiver(), 400, 401, "held-out")
])  # fmt: skip
def test_texts_shorter_than_a_window_are_refused(make_config, changes, length, size, part):
    message = rf"batch.length={length} takes windows of {size} tokens, but the {part} part of the text has \d+; give"
    with pytest.raises(ValueError, match=message):
        prepare_task(make_config(changes, {"batch.length": length}), None)


def test_a_bad_shard_stops_a_run_or_is_skipped(make_config, text, tmp_path, caplog):
    write_tokens(tmp_path / "shards", [str(text.parent / "texts")], load_tokenizer("bytes"), shard_tokens=200)
    flip(tmp_path / "shards" / "00001.tokens")
    changes = {"data.path": str(tmp_path / "shards"), "data.held_out": 0.1, "batch.size": 8}
    with pytest.raises(ShardError, match=r"shard 00001\.tokens of .*shards cannot be read"):
        train(make_config(changes, eval_every=0))
    assert train(make_config(changes, {"data.bad_shards": "skip"}, folder="skip", eval_every=0)).steps == 4
    assert "shard 00001.tokens of" in caplog.text


def test_the_tokenizer_of_a_run_and_of_its_checkpoints_knows_its_end_and_its_padding(
    make_config, text, tmp_path, caplog
):
    caplog.set_level("INFO")
    (tmp_path / "words").mkdir()
    words = characters(" ".join(map(chr, range(32, 127))) + "\n")
    words.add_special_tokens(["<pad>", "<|im_end|>"])
    words.save(str(tmp_path / "words" / "tokenizer.json"))
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<pad>"}')
    data = {"data.path": str(text.parent / "texts"), "data.tokenizer": str(tmp_path / "words"), "data.held_out": 0.3}
    run = train(make_config(data, prompt="l", steps=2, eval_every=0)).folder
    assert "documents are separated by '<|im_end|>', token 97" in caplog.text
    alone = Path(shutil.copytree(run / "checkpoints" / "checkpoint-2", tmp_path / "alone"))
    for folder in (run, alone):
        assert load_run(folder).end_tokens == {97}
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (97, 96)
        assert (model.config.eos_token_id, model.config.pad_token_id) == (97, 96)
        batch = tokenizer(["line", "a longer line"], padding=True, return_tensors="pt")
        assert model.generate(**batch, max_new_tokens=2).shape == (2, 13 + 2)
    step = run / "checkpoints" / "checkpoint-2"
    assert load_run(step).config == TrainConfig.from_file(run / "config.yaml"), "the settings are the run's"


LENGTH = 32


@torch.no_grad()
@pytest.mark.parametrize(("latents", "vary"), [(9, False), (9, True), (1, False), (31, False)])
def test_over_one_epoch_the_labels_cover_the_text(make_config, text, tmp_path, monkeypatch, latents, vary):
    """Counts how often each place of the text reaches the cross-entropy as a label."""
    places = Counter()

    def counted(_, passes, labels_BT, *args):
        (h_BMD,) = passes
        labels_BM = labels_BT[:, -h_BMD.shape[1] :]
        assert labels_BM.shape == h_BMD.shape[:2]
        places.update(labels_BM[labels_BM >= 0].tolist())
        return h_BMD.sum()

    monkeypatch.setattr(CrossEntropy, "forward", counted)
    (tmp_path / "short.py").write_text(text.read_text()[:500])
    config = make_config(perceiver(latents=latents, vary_latents=vary), {"data.path": str(tmp_path / "short.py")})
    task = prepare_task(config, None)
    stride = (latents + 1) // 2 if vary else latents
    assert options_of(config.model).window_labels(LENGTH) == task.train.stride == task.held_out.dataset.stride == stride
    torch.manual_seed(0)
    assert task.identity["labels"] == stride, "a run with other labels is not resumed"
    model = task.make_model().train(vary)
    for index in range(task.count):
        tokens = task.train[index]["input_ids"]
        here = torch.arange(index * stride, index * stride + LENGTH + 1)
        assert tokens.tolist() == task.data.train.tokens[here.numpy()].tolist()
        model(tokens[None], labels=here[None], use_cache=False, return_logits=False)
    assert set(range(LENGTH + 1 - stride, max(places) + 1)) <= set(places)
    assert len(task.data.train) - 1 - max(places) < stride
    if vary:
        assert set(places.values()) > {1}, "a token is a label at least once"
    else:
        assert (set(places.values()), min(places)) == ({1}, LENGTH + 1 - stride)
        assert len(places) == task.count * latents, "each latent has a label"


def test_windows_of_a_plain_model_overlap_by_one_token(make_config):
    task = prepare_task(make_config(), None)
    assert (task.train.stride, task.count) == (LENGTH - 1, (len(task.data.train) - 1) // (LENGTH - 1))


@pytest.mark.parametrize(("changes", "match"), [
    (perceiver(latents=32), "would have no history: batch.length=32 must be above its latents=32; give longer windows"),
    (perceiver(latents=256), r"batch.length=32 must be above its latents=256; .* or fewer latents \(model.options"),
    (perceiver(latent=2), "no key .*options.perceiver_ar.latent'; did you mean 'latents'"),
    (perceiver() | {"data.pack": "documents"}, "predicts only a window's last tokens and can't train on packed docu"),
])  # fmt: skip
def test_windows_that_do_not_fit_are_refused_before_any_text_is_read(make_config, tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        train(make_config(changes, {"data.path": "nowhere"}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"latents": 31}, {"latents": 1}, {"latents": 2, "vary_latents": True}])
def test_the_most_and_the_fewest_latents_train(make_config, options):
    result = train(make_config(perceiver(**options), steps=2))
    assert (result.steps, result.tokens) == (2, 2 * 32 * 8)


def held_out_rows(config):
    return probe_rows(config.probe, 20, 21, seed=(0, HELD_OUT))


def test_a_run_on_a_probe_is_measured_saved_and_loaded(make_config):
    run = train_by_command(make_config(PROBE, eval_windows=21))
    assert not (run / "tokenizer.json").exists()
    config = TrainConfig.from_file(run / "config.yaml")
    assert (config.task, config.model.vocab_size) == ("probe", 8)
    report, evaluation = (read_json(run / f"{name}.json") for name in ("report", "evaluation"))
    assert (report["chance"], report["sequences"], report["steps"]) == (0.5, 21, 4)

    rows = held_out_rows(config)
    score = overall(rows, right_answers(load_probe(run).decoder, rows))
    assert 0 < score.value < 1
    assert records(run)[-1]["eval_accuracy"] == evaluation["accuracy"] == score.value
    assert [line["step"] for line in records(run) if "eval_loss" in line] == [2, 4]

    assert AutoModelForCausalLM.from_pretrained(run).config.vocab_size == 8
    assert is_probe(run)
    assert is_probe(run / "checkpoints" / "checkpoint-4")
    with pytest.raises(ValueError, match="holds a model of the probe mqar, which predicts no text; measure"):
        load_run(run)


def test_a_perceiver_is_measured_on_its_latents(make_config):
    passkey = {"probe": {"name": "passkey", "digits": 3, "symbols": 4, "examples": 50, "held_out": 21}}
    result = train(make_config(PROBE, perceiver(latents=3), passkey, {"model.dropout": 0.0}, eval_windows=21))
    rows = held_out_rows(result.config)
    assert records(result.folder)[-1]["eval_accuracy"] == overall(rows, right_answers(result.decoder, rows)).value
    assert isinstance(result.corpus, ProbeCorpus)


def test_a_probe_is_learned(make_config):
    changes = {
        "model": {"dim": 32, "num_layers": 1, "num_heads": 2, "attention": "window", "init_std": 0.05},
        "probe": {"name": "copy", "symbols": 6, "examples": 10_000, "held_out": 21},
        "batch": {"length": 13, "size": 32},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.01},
        "schedule": {"warmup": 5},
    }
    result = train(make_config({"task": "probe"}, changes, steps=60, log_every=60, eval_every=60, save_every=60))
    assert records(result.folder)[-1]["eval_accuracy"] > 0.9, "chance is one sixth"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("probe-")])
def test_a_recipe_learns_what_it_says(tmp_path, name):
    values = read_mapping(recipe_path(name))
    values["run"] |= {"folder": str(tmp_path), "device": "cpu", "precision": "float32", "threads": 1}
    config = TrainConfig.from_dict(values)
    train(config)
    assert records(tmp_path)[-1]["eval_accuracy"] > max(0.7, 3 * config.probe.chance)


@pytest.mark.parametrize(("changes", "message"), [
    (perceiver(latents=14), "the last 14 tokens, but mqar asks from place 5 of 20 on: every step needs 15 latents"),
    (perceiver(latents=17, vary_latents=True), "the last 9 tokens, but mqar asks from place 5 of 20 on"),
    (perceiver(latents=20), "perceiver_ar would have no history"),
    ({"model.attention": "linformer"}, "attention 'linformer' has no causal form, which --task probe needs"),
])  # fmt: skip
def test_a_model_that_does_not_fit_the_probe_is_refused(make_config, changes, message):
    for refuse in (check, train):
        with pytest.raises(ValueError, match=message):
            refuse(make_config(PROBE, {"probe": MQAR, "model.dropout": 0.0}, changes))
