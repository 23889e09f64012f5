"""Training units: budgets, forks of a run, and FLOPs worked out by hand."""

from dataclasses import replace

import pytest

from experiments.harness import train as harness
from experiments.harness.recipe import merged
from subquad.models import DecoderConfig
from subquad.training import BatchConfig, TrainConfig, train
from tests.experiments.helpers import planned
from tests.training.helpers import stop_at_once


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
    for settings in (found["few-0"].settings, found["few-0"].reference):  # the head's share depends on the vocabulary
        settings["data"] |= {"tokenizer": "bpe", "vocab_size": 9000}
    few, full = (config.replace(model=config.model.replace(vocab_size=9000)) for config in (few, full))
    larger = harness.budget_steps(found["few-0"])["flops"]
    assert larger == round(4 * harness.step_flops(full) / harness.step_flops(few)) != steps["flops"]


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
    assert "step_seconds" not in rows[0]  # others may have run beside it
    alone = replace(units(experiments, "smoke")["full-0"], timed=True)
    assert harness.train_unit(alone)[0]["step_seconds"] > 0


def test_a_run_that_was_told_to_stop_is_no_result(experiments, monkeypatch):
    unit = units(experiments, "smoke")["full-0"]
    stop_at_once(monkeypatch)
    with pytest.raises(harness.InterruptedRunError, match="stopped after step 1 of 4"):
        harness.train_unit(unit)


def test_the_flops_of_a_step_are_counted_forward_and_backward():
    model = DecoderConfig(vocab_size=256, dim=16, num_layers=1, num_heads=2, attention="full", feedforward="gelu")
    products = 4 * 16 * 16 + 2 * 16 * 64 + 16 * 256  # multiply-adds a token: q, k, v, out; feed-forward; head
    scores = 16 * 16 * 2 * (8 + 8)  # 16 queries, 16 keys, 2 heads: a key's and a value's 8 channels
    window = 2 * (16 * products + scores) + 2 * (2 * 16 * products + 2.5 * scores)  # forward + backward
    config = TrainConfig(model=model, batch=BatchConfig(length=16, size=3, accumulation=2))
    assert harness.step_flops(config) == 3 * 2 * window == 4_472_832
