"""Every shipped recipe parses strictly and trains."""

from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.config import read_mapping
from subquad.models.build import build_model
from subquad.recipes import recipe_path, recipes
from subquad.training import TrainConfig, train
from tests.data.lra.layouts import write_release
from tests.data.pictures import write_idx

RECURRENT = ("retnet", "gla", "hgrn2", "mamba2", "mlstm", "delta_net", "gated_delta_net", "kda")
FAMILIES = {"stdlib": ("full", "window", "llp", "linear", "latte", *RECURRENT), "mnist": ("full", "linear")}
"""Recipes that differ in the mechanism alone."""
QUICK = [
    pytest.param(name, marks=[pytest.mark.slow] if name.removeprefix("stdlib-") in RECURRENT else [])
    for name in recipes()
]


def test_an_unknown_recipe_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'stdlib-lpp'; did you mean 'stdlib-llp'"):
        recipe_path("stdlib-lpp")


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_has_its_own_folder(name: str) -> None:
    assert TrainConfig.from_file(recipe_path(name)).run.folder == f"runs/{name}"


def small_lra(classify: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Small files in the data's layout instead of what a recipe reads or makes, and few steps of the first phase."""
    for option in ("examples", "held_out", "listops"):
        classify.pop(option, None)
    if classify["dataset"].startswith("pathfinder"):
        classify.pop("augment", None)  # only whole images can be turned, and these are cut
    release = write_release(folder / "release", classify["dataset"])
    return {
        "classify": {"path": str(release), "cache": str(folder / "cache")},
        "batch": {"length": 64, "size": 2},
        "pretrain": {"steps": 2},
    }


@pytest.mark.parametrize("name", QUICK)
def test_a_recipe_trains_two_steps_at_reduced_size(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.py").write_text(f"def function_{number}(a, b):\n    return a * {number} + b\n" * 4)
    values = read_mapping(recipe_path(name))
    small: dict[str, dict[str, Any]] = {
        "model": {"dim": 32, "num_layers": 1, "num_heads": 2},
        "data": {"path": str(text), "held_out_path": None, "vocab_size": 300, "held_out": 0.3},
        "batch": {"length": 48, "size": 2},
        "schedule": {"warmup": 1},
        "run": {
            "folder": str(tmp_path / "run"),
            "steps": 2,
            "eval_windows": 2,
            "device": "cpu",
            "threads": 1,
            "trackers": [],
            "prompt": "a",
        },
    }
    small["data"]["cache"] = str(tmp_path / "cache")
    if values["model"]["attention"] == "perceiver_ar":
        small["model"]["options"] = {"perceiver_ar": {"latents": 32}}  # its own do not fit into the window
    if values.get("task", "language") != "language":
        del small["data"]
    if name.startswith("lra-"):
        small |= small_lra(values["classify"], tmp_path)
    if values.get("task") == "image":
        channels = min(16, values["image"].get("position_channels", 0))
        small |= {"image": {"path": str(write_idx(tmp_path / "digits")), "position_channels": channels}}
        small["batch"] = {"length": 16, "size": 2}
    for group, changes in small.items():
        values[group] = {**values.get(group, {}), **changes}
    result = train(TrainConfig.from_dict(values))
    assert result.steps == 2
    assert result.best_loss is not None
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.parametrize("family", FAMILIES)
def test_recipes_of_a_family_differ_in_the_mechanism_alone(family: str) -> None:
    common = set()
    for name in FAMILIES[family]:
        values = TrainConfig.from_file(recipe_path(f"{family}-{name}")).to_dict()
        assert values["model"].pop("attention") == name
        assert values["run"].pop("folder") == f"runs/{family}-{name}"
        if family == "stdlib":
            rotary, added = ("full", "window", "llp"), ("linear", "latte")
            positions = "rope" if name in rotary else "sinusoidal" if name in added else "none"
            assert values["model"].pop("position") == positions
            normed = name in (*rotary, "linear")  # the others have no such norm
            assert values["model"]["options"].get(name, {}).get("qk_norm", False) == normed
            for apart in ("options", "ff_mult"):
                values["model"].pop(apart)
        common.add(str(values))
    assert len(common) == 1


def test_models_of_the_stdlib_recipes_have_parameters_within_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, *_, **__: self)  # slow on the meta device
    counts = {}
    for name in FAMILIES["stdlib"]:
        with torch.device("meta"):
            model = build_model(TrainConfig.from_file(recipe_path(f"stdlib-{name}")).model)
        counts[name] = sum(weights.numel() for weights in model.parameters())
    assert max(counts.values()) < 1.1 * counts["linear"], counts
    assert min(counts.values()) > 0.99 * counts["linear"], counts


@pytest.mark.parametrize(("name", "vocab_size", "parameters"), [
    ("openwebtext-latte", 50_257, 90_313_105), ("enwik8-latte", 205, 38_609_389),
    ("shakespeare-perceiver-ar", 65, 207_425 + 4 * 64**2 - 4 * 320), ("redpajama-elita", 5000, 10_221_504),
])  # fmt: skip
def test_recipes_have_their_papers_parameters(
    name: str, vocab_size: int, parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The post's model lacks output projections and has biases in its networks; ELiTA's README says "10M+"."""
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, *_, **__: self)  # slow on the meta device
    config = TrainConfig.from_file(recipe_path(name)).model
    with torch.device("meta"):
        assert build_model(config.replace(vocab_size=vocab_size)).num_parameters() == parameters
