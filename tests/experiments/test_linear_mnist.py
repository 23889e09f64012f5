"""linear_mnist: scale paper is the package's recipe, and rates are chosen on images that no result uses."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.harness.recipe import merged, read_recipe
from experiments.harness.units import code, units_of
from subquad.data.images import ImageSet
from subquad.recipes import recipe_path
from subquad.training import TrainConfig

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "linear_mnist"
linear_mnist = code(FOLDER)


def units(scale, work="work"):
    found = units_of(FOLDER, read_recipe(FOLDER), scale, work=Path(work), data={"mnist": "hf:made/up"})
    return {unit.arm: unit for unit in found if unit.seed == 0}


def test_scale_paper_trains_as_the_recipe_of_the_package():
    recipe = TrainConfig.from_file(recipe_path("mnist-linear-paper"))
    for arm in ("linear", "full"):
        config = linear_mnist.config_of(units("paper")[arm])
        assert config.model == recipe.model.replace(attention=arm)
        assert config.image == recipe.image.replace(path="hf:made/up", samples=0)  # it draws on its own
        assert config.optimizer == recipe.optimizer
        assert config.batch.size == recipe.batch.size
        assert (config.run.steps, config.schedule.kind, config.schedule.warmup) == (937_500, "constant", 0)


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_rates_are_chosen_on_images_that_the_result_never_uses(scale):
    unit = units(scale)["linear"]
    test = ImageSet(np.zeros((10_000, 1, 1, 1), np.uint8), None, ())
    count, completed = unit.settings["image"]["test_images"], unit.settings["completions"]
    used = {*linear_mnist.places(test, count).tolist(), *linear_mnist.places(test, completed).tolist()}
    assert len(used) >= count
    assert not used & {*linear_mnist.places(test, count, between=True).tolist()}


def test_a_search_trains_a_third_of_the_steps_and_a_rate_that_fails_is_infinitely_bad(tmp_path):
    unit = replace(units("smoke")["full"], folder=str(tmp_path))

    def searched(rate):
        return linear_mnist.search(
            replace(unit, settings=merged(unit.settings, {"run": {"steps": 7}, "optimizer": {"lr": rate}}))
        )

    assert 0 < searched(0.004) < 9
    assert TrainConfig.from_file(tmp_path / "rate-0.004" / "config.yaml").run.steps == 2
    assert searched(1e30) == math.inf
