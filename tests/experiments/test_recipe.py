"""Recipes: scales, arms, seeds, budgets; what is wrong in one is said."""

from pathlib import Path
from typing import Any

import pytest

from experiments.harness.recipe import Recipe, merged, read_recipe

BASE: dict[str, Any] = {"arms": {"a": {}, "b": {"settings": {"x": 1}}}, "scales": {"cpu": {}}}


def recipe(**scale: Any) -> Recipe:
    return Recipe.from_dict({**BASE, "scales": {"cpu": scale}})


def test_later_mappings_win_where_they_say_something() -> None:
    first, second = {"a": {"b": 1, "c": [1, 2]}, "d": 3}, {"a": {"c": [4]}, "e": {"f": 5}}
    assert merged(first, second) == {"a": {"b": 1, "c": [4]}, "d": 3, "e": {"f": 5}}
    assert first == {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merged({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


def test_a_scale_has_the_experiments_arms_some_of_them_or_its_own() -> None:
    assert list(recipe().arms_of("cpu")) == ["a", "b"]
    assert list(recipe(arms=["b"]).arms_of("cpu")) == ["b"]
    assert list(recipe(arms={"c": {}}).arms_of("cpu")) == ["c"]
    assert not recipe(arms=[]).arms_of("cpu")


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({"seeds": []}, r"scales\.cpu\.seeds must have at least one seed"),
        ({"arms": ["c"]}, "unknown arm 'c'; .*valid: a, b"),
        ({"reference": "c"}, "scales.cpu has no arm 'c'; .*valid: a, b"),
        ({"arm_settings": {"c": {}}}, "scales.cpu has no arm 'c'"),
        ({"budgets": ["steps", "steps"]}, "must be one or more distinct budgets"),
        ({"budgets": []}, "must be one or more distinct budgets"),
        ({"budgets": ["steps", "flops"]}, "need a reference, one of a, b"),
        ({"budgets": ["hours"]}, "must be one of its choices, got 'hours'"),
    ],
)
def test_a_wrong_scale_says_what_is_wrong(scale: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**scale)


def test_an_unknown_scale_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown scale 'big'; .*valid: cpu, gpu, paper, smoke"):
        Recipe.from_dict({**BASE, "scales": {"big": {}}})
    with pytest.raises(ValueError, match=r"no scale 'gpu'; .*valid: cpu"):
        recipe().scale("gpu")


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("kinds: train\n")
    with pytest.raises(ValueError, match=r"recipe\.yaml: Recipe has no key 'kinds'; did you mean 'kind'"):
        read_recipe(tmp_path)
    (tmp_path / "recipe.yaml").write_text("alone: 3\n")
    with pytest.raises(TypeError, match=r"recipe\.yaml: alone must be bool"):
        read_recipe(tmp_path)
