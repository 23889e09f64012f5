"""Recipes: scales, arms, seeds, budgets, and the errors in them."""

import pytest

from experiments.harness.recipe import Recipe, merged, read_recipe

BASE = {"arms": {"a": {}, "b": {"settings": {"x": 1}}}, "scales": {"cpu": {}}}


def recipe(**scale):
    return Recipe.from_dict({**BASE, "scales": {"cpu": scale}})


def test_later_mappings_override_earlier_ones():
    first, second = {"a": {"b": 1, "c": [1, 2]}, "d": 3}, {"a": {"c": [4]}, "e": {"f": 5}}
    assert merged(first, second) == {"a": {"b": 1, "c": [4]}, "d": 3, "e": {"f": 5}}
    assert first == {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merged({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


def test_a_scale_has_all_arms_some_of_them_or_its_own():
    for arms, names in ((None, ["a", "b"]), (["b"], ["b"]), ({"c": {}}, ["c"]), ([], [])):
        assert list(recipe(arms=arms).arms_of("cpu")) == names


def test_errors_in_a_scale():
    for scale, message in (
        ({"seeds": []}, r"scales\.cpu\.seeds must have at least one seed"),
        ({"arms": ["c"]}, "unknown arm 'c'; .*valid: a, b"),
        ({"reference": "c"}, "scales.cpu has no arm 'c'; .*valid: a, b"),
        ({"arm_settings": {"c": {}}}, "scales.cpu has no arm 'c'"),
        ({"budgets": ["steps", "steps"]}, "must be one or more distinct budgets"),
        ({"budgets": []}, "must be one or more distinct budgets"),
        ({"budgets": ["steps", "flops"]}, "need a reference, one of a, b"),
        ({"budgets": ["hours"]}, "must be one of its choices, got 'hours'"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe(**scale)


def test_an_unknown_scale_is_answered_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"unknown scale 'big'; .*valid: cpu, gpu, paper, smoke"):
        Recipe.from_dict({**BASE, "scales": {"big": {}}})
    with pytest.raises(ValueError, match=r"no scale 'gpu'; .*valid: cpu"):
        recipe().scale("gpu")


def test_errors_name_the_file(tmp_path):
    (tmp_path / "recipe.yaml").write_text("kinds: train\n")
    with pytest.raises(ValueError, match=r"recipe\.yaml: Recipe has no key 'kinds'; did you mean 'kind'"):
        read_recipe(tmp_path)
    (tmp_path / "recipe.yaml").write_text("alone: 3\n")
    with pytest.raises(TypeError, match=r"recipe\.yaml: alone must be bool"):
        read_recipe(tmp_path)
