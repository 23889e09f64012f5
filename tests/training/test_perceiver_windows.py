"""The windows of a run with Perceiver AR, which predicts their last tokens alone."""

import logging
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from subquad.cli import main
from subquad.hf import SubquadForCausalLM
from subquad.models import Decoder
from subquad.models.stacks import options_of
from subquad.testing import assert_exact
from subquad.training import train
from subquad.training.tasks import prepare_task

LENGTH, LATENTS = 32, 9


def labels_of(config):
    return options_of(config.model).window_labels(config.batch.length)


@pytest.fixture
def config(make_config):
    def make(changes=None, **options):
        changes = changes or {}
        given = {"perceiver_ar": {"latents": LATENTS, "history": "self", "history_tokens": 12, **options}}
        return make_config({"model.attention": "perceiver_ar", "model.options": given, **changes})

    return make


@pytest.fixture
def count_labels(monkeypatch):
    """Count how often each place of the text is a label in one epoch: what reaches the cross-entropy."""
    places = Counter()

    def loss_of_hidden(self, h_BMD, labels_BM, **kwargs):
        assert labels_BM.shape == h_BMD.shape[:2]
        places.update(labels_BM[labels_BM >= 0].tolist())
        return h_BMD.sum()

    monkeypatch.setattr(Decoder, "loss_of_hidden", loss_of_hidden)

    def count(task, model):
        for index in range(task.count):
            tokens = task.train[index]["input_ids"]
            here = torch.arange(index * task.train.stride, index * task.train.stride + len(tokens))
            assert tokens.tolist() == task.data.train.tokens[here.numpy()].tolist()
            model(tokens[None], labels=here[None], use_cache=False)
        return places

    return count


@torch.no_grad()
def test_over_one_epoch_the_labels_cover_the_text(config, count_labels):
    task = prepare_task(config(), None)
    model = task.make_model().eval()
    places, stride = count_labels(task, model), LATENTS - 1
    assert labels_of(config()) == task.train.stride == task.held_out.dataset.stride == stride
    assert set(places.values()) == {1}
    assert min(places) == LENGTH - stride
    assert len(task.data.train) - 1 - max(places) < stride
    assert len(places) == max(places) + 1 - min(places)


@torch.no_grad()
def test_with_varying_latents_each_token_is_a_label_at_least_once_an_epoch(config, count_labels):
    task = prepare_task(config(vary_latents=True), None)
    model = task.make_model().train()
    assert task.train.stride == (LATENTS + 1) // 2 - 1
    torch.manual_seed(0)
    places = count_labels(task, model)
    assert set(range(LENGTH - task.train.stride, max(places) + 1)) <= set(places)
    assert set(places.values()) > {1}


def test_other_models_have_the_windows_that_they_had(make_config):
    task = prepare_task(make_config(), None)
    assert task.train.stride == labels_of(make_config()) == LENGTH - 1
    assert task.count == (len(task.data.train) - 1) // (LENGTH - 1)


def test_the_log_says_how_many_tokens_are_predicted(config, caplog):
    with caplog.at_level(logging.INFO, "subquad.training"):
        prepare_task(config(), None)
    said = "predicts the last 8 tokens of each window of 32: 64 of the 256 tokens that a step reads; windows begin 8 "
    assert said in caplog.text


@pytest.mark.parametrize(("options", "match"), [
    ({"latents": 32}, "would have no history: batch.length=32 must be above its latents=32; give longer windows"),
    ({"latents": 256}, r"batch.length=32 must be above its latents=256; .* or fewer latents \(model.options"),
    ({"latents": 1}, "perceiver_ar needs at least 2 latents to train, got 1: the label of a window's last latent"),
    ({"latents": 2, "vary_latents": True}, "needs at least 3 latents to train with vary_latents, got 2"),
    ({"latent": 2}, "no key 'model.options.perceiver_ar.latent'; did you mean 'latents'"),
])  # fmt: skip
def test_windows_that_do_not_fit_are_refused_before_any_text_is_read(config, options, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        train(config({"data.path": str(tmp_path / "nowhere")}, **options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"latents": 31}, {"latents": 2}, {"latents": 3, "vary_latents": True}])
def test_the_most_and_the_fewest_latents_train(config, options):
    result = train(config({"run.steps": 4}, **options))
    assert result.steps == 4
    assert result.tokens == 4 * 32 * 8


def test_a_run_that_stops_and_goes_on_is_the_same_bit_for_bit(config, tmp_path):
    options = {"vary_latents": True, "prefix_dropout": 0.3}
    for folder, steps in (("whole", 10), ("parts", 5), ("parts", 10)):
        changes = {"run.folder": str(tmp_path / folder), "run.steps": steps, "schedule.kind": "constant"}
        assert train(config(changes, **options)).steps == steps
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    for name, weight in whole.items():
        assert_exact(parts[name], weight)
    assert isinstance(SubquadForCausalLM.from_pretrained(tmp_path / "parts"), SubquadForCausalLM)


def test_the_command_refuses_windows_without_a_history_as_an_argument(config, tmp_path, capsys):
    config(latents=32).to_file(tmp_path / "short.yaml")
    with pytest.raises(SystemExit) as exit_info:
        main(["train", "--config", str(tmp_path / "short.yaml")])
    assert exit_info.value.code == 2
    assert "batch.length=32 must be above its latents=32" in capsys.readouterr().err
