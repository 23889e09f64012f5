"""Units: what runs, and what they are known again by."""

from pathlib import Path

import yaml

from experiments.harness.recipe import read_recipe
from experiments.harness.units import Unit, units_of


def planned(folder: Path, scale: str = "cpu", **more: object) -> list[Unit]:
    return units_of(folder, read_recipe(folder), scale, work=Path("work"), data={}, **more)  # type: ignore[arg-type]


def change(folder: Path, **values: object) -> None:
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, **values}))


def test_seeds_come_one_after_another_each_with_all_arms(experiments: Path) -> None:
    folder = experiments / "measured"
    assert [unit.name for unit in planned(folder)] == ["one, seed 0", "two, seed 0", "one, seed 1", "two, seed 1"]
    change(folder, arms={"one": {"seeds": [0, 1, 2]}, "two": {}})
    assert [unit.name for unit in planned(folder, "smoke")] == [
        "one, seed 0", "two, seed 0", "one, seed 1", "one, seed 2"
    ]  # fmt: skip


def test_the_arm_says_more_than_the_scale_and_the_experiment(experiments: Path) -> None:
    folder = experiments / "measured"
    change(
        folder,
        settings={"a": 0, "b": 0, "c": 0, "d": 0},
        arms={"one": {"settings": {"c": 2, "d": 2}}},
        scales={"cpu": {"settings": {"b": 1, "c": 1, "d": 1}, "arm_settings": {"one": {"d": 3}}}},
    )
    assert planned(folder)[0].settings == {"a": 0, "b": 1, "c": 2, "d": 3}


def test_a_unit_is_known_by_what_it_computes_not_by_where(experiments: Path) -> None:
    folder = experiments / "trained"
    one, other = planned(folder), planned(folder, threads=2)
    assert [unit.identity for unit in one] == [unit.identity for unit in other]
    assert len({unit.identity for unit in one}) == len(one)
    assert one[0].settings["data"]["path"].endswith("*.py")
    before = one[0].identity
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["settings"]["batch"]["length"] = 15
    change(folder, settings=recipe["settings"])
    assert planned(folder)[0].identity != before
