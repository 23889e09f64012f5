"""Training units: budgets, and that a fork is the run that it stands for."""

from pathlib import Path

import pytest

from experiments.harness.recipe import merged, read_recipe
from experiments.harness.train import (
    InterruptedRunError,
    budget_steps,
    predicted_tokens,
    step_flops,
    train_config,
    train_unit,
)
from experiments.harness.units import Unit, units_of
from subquad.training import train


def units(experiments: Path, scale: str) -> dict[str, Unit]:
    folder = experiments / "trained"
    found = units_of(folder, read_recipe(folder), scale, work=experiments.parent / "work", data={})
    return {f"{unit.arm}-{unit.seed}": unit for unit in found}


def test_budgets_are_equal_in_what_they_name(experiments: Path) -> None:
    found = units(experiments, "cpu")
    assert budget_steps(found["full-0"]) == {"steps": 4, "tokens": 4, "flops": 4}
    few, full = (train_config(found[name]) for name in ("few-0", "full-0"))
    steps = budget_steps(found["few-0"])
    assert predicted_tokens(full) == 2 * 15
    assert predicted_tokens(few) == 2 * 4
    assert steps["tokens"] == 15  # 4 steps of 30 tokens, in steps of 8
    assert steps["flops"] == round(4 * step_flops(full) / step_flops(few)) > 4


def test_a_fork_is_the_run_of_that_many_steps(experiments: Path) -> None:
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


def test_a_unit_of_several_budgets_goes_on_where_it_was(experiments: Path) -> None:
    unit = units(experiments, "cpu")["few-0"]
    before = train_unit(unit)
    again = train_unit(unit)  # its trunk has gone on beyond the smaller budgets
    assert [row["loss"] for row in again] == [row["loss"] for row in before]
    assert [row["steps"] for row in again] == [row["steps"] for row in before]


def test_arms_of_equal_steps_are_measured_on_the_same_tokens(experiments: Path) -> None:
    rows = [train_unit(unit)[0] for name, unit in units(experiments, "smoke").items() if name.endswith("-0")]
    assert [row["scored_tokens"] for row in rows] == [63, 63]
    assert [row["steps"] for row in rows] == [4, 4]
    assert rows[0]["predicted_tokens"] == 4 * 30
    assert rows[0]["step_seconds"] > 0


def test_a_run_that_was_told_to_stop_is_no_result(experiments: Path) -> None:
    unit = units(experiments, "smoke")["full-0"]
    unit.settings["run"]["max_minutes"] = 1e-9
    with pytest.raises(InterruptedRunError, match="stopped after step 1 of 4"):
        train_unit(unit)
