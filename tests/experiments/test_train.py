"""Training units: budgets, forks of a run, and figures of the measuring code that were worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from experiments.harness.recipe import Held, merged, read_recipe
from experiments.harness.train import (
    InterruptedRunError,
    _text,
    budget_steps,
    predicted_tokens,
    step_flops,
    train_config,
    train_unit,
)
from experiments.harness.units import units_of
from subquad.data import DataConfig, prepare
from subquad.models import Decoder, DecoderConfig
from subquad.training import BatchConfig, TrainConfig, train


def units(experiments, scale):
    folder = experiments / "trained"
    found = units_of(folder, read_recipe(folder), scale, work=experiments.parent / "work", data={})
    return {f"{unit.arm}-{unit.seed}": unit for unit in found}


def test_budgets_are_equal_in_what_they_name(experiments):
    found = units(experiments, "cpu")
    assert budget_steps(found["full-0"]) == {"steps": 4, "tokens": 4, "flops": 4}
    few, full = (train_config(found[name]) for name in ("few-0", "full-0"))
    steps = budget_steps(found["few-0"])
    assert predicted_tokens(full) == 2 * 15
    assert predicted_tokens(few) == 2 * 4
    assert steps["tokens"] == 15  # 4 steps of 30 tokens, in steps of 8
    assert steps["flops"] == round(4 * step_flops(full) / step_flops(few)) > 4


def test_a_fork_is_the_run_of_that_many_steps(experiments):
    unit = units(experiments, "cpu")["few-0"]
    rows = {row["budget"]: row for row in train_unit(unit)}
    assert set(rows) == {"steps", "tokens", "flops"}
    steps = rows["tokens"]["steps"]
    schedule = {"schedule": {"kind": "wsd", "decay_fraction": 0.2}}
    folder = str(experiments.parent / "straight")
    straight = train(train_config(unit, merged(unit.settings, schedule), steps=steps, save_every=steps, folder=folder))
    forked = train(train_config(unit, steps=steps, folder=f"{unit.folder}/run-{steps}"))
    for (name, one), other in zip(straight.model.state_dict().items(), forked.model.state_dict().values(), strict=True):
        assert one.equal(other), name
    assert rows["steps"]["loss"] != rows["tokens"]["loss"]


def test_a_unit_of_several_budgets_goes_on_where_it_was(experiments):
    unit = units(experiments, "cpu")["few-0"]
    before = train_unit(unit)
    again = train_unit(unit)  # its trunk has gone on beyond the smaller budgets
    assert [row["loss"] for row in again] == [row["loss"] for row in before]
    assert [row["steps"] for row in again] == [row["steps"] for row in before]


def test_arms_of_equal_steps_are_measured_on_the_same_tokens(experiments):
    rows = [train_unit(unit)[0] for name, unit in units(experiments, "smoke").items() if name.endswith("-0")]
    assert [row["scored_tokens"] for row in rows] == [63, 63]
    assert [row["steps"] for row in rows] == [4, 4]
    assert rows[0]["predicted_tokens"] == 4 * 30
    assert rows[0]["step_seconds"] > 0


def test_a_run_that_was_told_to_stop_is_no_result(experiments):
    unit = units(experiments, "smoke")["full-0"]
    unit.settings["run"]["max_minutes"] = 1e-9
    with pytest.raises(InterruptedRunError, match="stopped after step 1 of 4"):
        train_unit(unit)


def test_the_flops_of_a_step_are_counted_forward_and_backward():
    model = DecoderConfig(vocab_size=256, dim=16, num_layers=1, num_heads=2, attention="full", feedforward="gelu")
    products = 4 * 16 * 16 + 2 * 16 * 64 + 16 * 256  # multiply-adds a token: q, k, v, out; feed-forward; head
    scores = 16 * 16 * 2 * (8 + 8)  # 16 queries, 16 keys, 2 heads: a key's and a value's 8 channels
    window = 2 * (16 * products + scores) + 2 * (2 * 16 * products + 2.5 * scores)  # forward + backward
    config = TrainConfig(model=model, batch=BatchConfig(length=16, size=3, accumulation=2))
    assert step_flops(config) == 3 * 2 * window == 4_472_832


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measure a bytes model that gives `probabilities` to the next byte, whatever came before.

    Trained text holds the letter a alone; `held_out` is the text to measure.
    """
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))

    def measure(held_out, probabilities, held):
        for name, text in (("train", "a" * 400), ("held_out", held_out)):
            (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
        data = DataConfig(
            path=str(tmp_path / "train.txt"), held_out_path=str(tmp_path / "held_out.txt"), tokenizer="bytes"
        )
        model = DecoderConfig(vocab_size=256, dim=4, num_layers=1, num_heads=1, tie_embeddings=False, attention="full")
        decoder = Decoder(model).eval()
        rest = (1 - sum(probabilities.values())) / (256 - len(probabilities))
        logits_V = torch.tensor([probabilities.get(byte, rest) for byte in range(256)]).log()
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.zero_()  # each layer adds nothing to its input
            decoder.embedding.tokens.weight.fill_(1.0)
            decoder.norm.weight.fill_(1.0)
            decoder.head.weight.copy_(logits_V[:, None] / 4)
        config = TrainConfig(model=model, data=data, batch=BatchConfig(length=16, size=2))
        return _text(SimpleNamespace(config=config, model=SimpleNamespace(model=decoder), corpus=prepare(data)), held)

    return measure


def test_held_out_text_is_measured_in_bits_a_byte(measured):
    """The bytes of an e acute have probability 1/2 and 1/4: 1 + 2 bits, 1.5 a byte. An a would take 3 bits."""
    text, probabilities = "a" + 60 * "é", {0xC3: 1 / 2, 0xA9: 1 / 4, ord("a"): 1 / 8}
    part = measured(text, probabilities, Held(tokens=81, stride=4))
    assert part["scored_tokens"] == 80
    assert part["loss"] == pytest.approx(1.5 * math.log(2), rel=1e-5)
    assert part["bits_per_byte"] == pytest.approx(1.5, rel=1e-5)
    whole = measured(text, probabilities, Held(stride=4))  # a code length: 8 bits for the first of 121 bytes
    assert whole["scored_tokens"] == 120
    assert whole["bits_per_byte"] == pytest.approx((8 + 60 * 3) / 121, rel=1e-5)


def test_skipped_tokens_are_not_measured(measured):
    probabilities = {ord("x"): 1 / 256, ord("b"): 1 / 2, ord("a"): 1 / 4}
    row = measured("x" * 32 + "b" * 64, probabilities, Held(stride=1, skip=32))
    assert row["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert measured("x" * 32 + "b" * 64, probabilities, Held(stride=1))["loss"] > 3 * math.log(2)
