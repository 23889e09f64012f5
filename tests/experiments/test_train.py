"""Training units: budgets, forks of a run, and measurements worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from experiments.harness import train as harness
from experiments.harness.recipe import Held, merged
from subquad.data import DataConfig, prepare
from subquad.models import Decoder, DecoderConfig
from subquad.training import BatchConfig, TrainConfig, train
from tests.experiments.helpers import planned


def units(experiments, scale):
    return {f"{unit.arm}-{unit.seed}": unit for unit in planned(experiments / "trained", scale)}


def test_budgets_are_equal_in_what_they_name(experiments):
    found = units(experiments, "cpu")
    assert harness.budget_steps(found["full-0"]) == {"steps": 4, "tokens": 4, "flops": 4}
    few, full = (harness.train_config(found[name]) for name in ("few-0", "full-0"))
    steps = harness.budget_steps(found["few-0"])
    assert harness.predicted_tokens(full) == 2 * 15
    assert harness.predicted_tokens(few) == 2 * 4
    assert steps["tokens"] == 15  # 4 steps of 30 tokens, in steps of 8
    assert steps["flops"] == round(4 * harness.step_flops(full) / harness.step_flops(few)) > 4


def test_a_fork_is_the_run_of_that_many_steps_and_a_unit_of_several_budgets_continues(experiments):
    unit = units(experiments, "cpu")["few-0"]
    before = harness.train_unit(unit)
    rows = {row["budget"]: row for row in before}
    assert set(rows) == {"steps", "tokens", "flops"}
    assert rows["steps"]["loss"] != rows["tokens"]["loss"]
    steps, folder = rows["tokens"]["steps"], str(experiments.parent / "straight")
    settings = merged(unit.settings, {"schedule": {"kind": "wsd", "decay_fraction": 0.2}})
    straight = train(harness.train_config(unit, settings, steps=steps, save_every=steps, folder=folder))
    forked = train(harness.train_config(unit, steps=steps, folder=f"{unit.folder}/run-{steps}"))
    for (name, one), other in zip(straight.model.state_dict().items(), forked.model.state_dict().values(), strict=True):
        assert one.equal(other), name
    again = harness.train_unit(unit)  # its trunk is beyond the smaller budgets
    assert [(row["loss"], row["steps"]) for row in again] == [(row["loss"], row["steps"]) for row in before]


def test_arms_of_equal_steps_are_measured_on_the_same_tokens(experiments):
    rows = [harness.train_unit(unit)[0] for name, unit in units(experiments, "smoke").items() if name.endswith("-0")]
    assert [(row["scored_tokens"], row["steps"]) for row in rows] == [(63, 4), (63, 4)]
    assert rows[0]["predicted_tokens"] == 4 * 30
    assert rows[0]["step_seconds"] > 0


def test_a_run_that_was_told_to_stop_is_no_result(experiments):
    unit = units(experiments, "smoke")["full-0"]
    unit.settings["run"]["max_minutes"] = 1e-9
    with pytest.raises(harness.InterruptedRunError, match="stopped after step 1 of 4"):
        harness.train_unit(unit)


def test_the_flops_of_a_step_are_counted_forward_and_backward():
    model = DecoderConfig(vocab_size=256, dim=16, num_layers=1, num_heads=2, attention="full", feedforward="gelu")
    products = 4 * 16 * 16 + 2 * 16 * 64 + 16 * 256  # multiply-adds a token: q, k, v, out; feed-forward; head
    scores = 16 * 16 * 2 * (8 + 8)  # 16 queries, 16 keys, 2 heads: a key's and a value's 8 channels
    window = 2 * (16 * products + scores) + 2 * (2 * 16 * products + 2.5 * scores)  # forward + backward
    config = TrainConfig(model=model, batch=BatchConfig(length=16, size=3, accumulation=2))
    assert harness.step_flops(config) == 3 * 2 * window == 4_472_832


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measure a byte model with fixed `probabilities` of the next byte; its training text holds only the letter a."""
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))

    def measure(held_out, probabilities, held):
        for name, text in (("train", "a" * 400), ("held_out", held_out)):
            (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
        files = {"path": str(tmp_path / "train.txt"), "held_out_path": str(tmp_path / "held_out.txt")}
        data = DataConfig(**files, tokenizer="bytes")
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
        result = SimpleNamespace(config=config, model=SimpleNamespace(model=decoder), corpus=prepare(data))
        return harness._text(result, held)

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
