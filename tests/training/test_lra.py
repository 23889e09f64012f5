"""Long Range Arena: every task trains with every mechanism by one command; the recipes have the paper's settings."""

import itertools
import math
from typing import Any

import pytest

from subquad.attention import mechanism, names
from subquad.cli import main
from subquad.recipes import recipe_path
from subquad.training import PretrainConfig, TrainConfig
from subquad.training.progress import read_metrics
from subquad.training.tasks import check
from tests.data.lra.layouts import write_release
from tests.models import small
from tests.training.helpers import read_json

BIDIRECTIONAL = [name for name in names() if "bidirectional" in mechanism(name).forms] + ["perceiver", "perceiver_io"]
CAUSAL_ONLY = [name for name in names() if mechanism(name).forms == ("causal",)]
TASKS = {"listops": 4, "text": 8, "retrieval": 12, "image": 4, "pathfinder32": 2, "pathfinder128": 2}
"""Tasks, and the test examples in their small files."""
LENGTH = 16
"""Tokens that are read of a sequence: the first ones; the rest is cut."""
OPTIONS = small.OPTIONS | {name: {"latents": 4} for name in ("perceiver", "perceiver_io")}
OPTIONS |= {"linformer": {"max_tokens": 16, "projected": 4}, "strided": {"stride": 4}}


@pytest.fixture(scope="module")
def release(tmp_path_factory, config_in):
    """A configuration for each task, over small files in the layouts of the release."""
    folder = tmp_path_factory.mktemp("lra")
    model = {"dim": 8, "num_layers": 1, "num_heads": 2, "position": "learned", "options": OPTIONS}
    files = {task: folder / f"{task}.yaml" for task in TASKS}
    for task, file in files.items():
        data = {"dataset": task, "path": str(write_release(folder / task, task)), "cache": str(folder / "cache")}
        changes = {"task": "classify", "model": model, "classify": data, "batch": {"length": LENGTH, "size": 4}}
        config_in(folder, changes, steps=2, eval_every=0).to_file(file)
    return files


def trained(file, folder, name, *flags):
    """Train two steps by the command and return what it has measured of its model."""
    arguments = ["train", "--config", str(file), "--run.folder", str(folder), "--model.attention", name, *flags]
    assert main(arguments) == 0
    assert len([record for record in read_metrics(folder) if "loss" in record]) == 2
    return read_json(folder / "evaluation.json")


ONCE = ("perceiver_io", "latte", "full", "llp", "linformer", "luna")
QUICK = [*zip(ONCE, TASKS, ["false"] * len(TASKS), strict=True), ("llp", "retrieval", "true")]
CAUSAL_TOO = [*itertools.product(CAUSAL_ONLY, ["listops"], ["true"]), ("llp", "image", "true")]
ALL = [*itertools.product(BIDIRECTIONAL, TASKS, ["false"]), *CAUSAL_TOO]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK]


@pytest.mark.parametrize(("name", "task", "causal"), [*QUICK, *SLOW])
def test_a_task_trains(name, task, causal, release, tmp_path):
    measured = trained(release[task], tmp_path, name, "--classify.causal", causal)
    assert measured["examples"] == min(TASKS[task], 8)  # no more than two steps of four train on
    for key in ("accuracy", "constant", "bag_of_tokens"):
        assert 0 <= measured[key] <= 1


def test_cut_images_are_not_mirrored(release, tmp_path, capsys):
    flags = ["--config", str(release["image"]), "--run.folder", str(tmp_path), "--classify.augment", "true"]
    assert main(["train", *flags]) == 1
    message = "classify.augment=true needs whole images of 64 pixels, got batch.length=16"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("task", "length"), [("listops", "16"), ("retrieval", "16"), ("image", "64")])
def test_augmented_sequences_train(task, length, release, tmp_path):
    flags = ["--classify.augment", "true", "--batch.length", length, "--model.max_positions", "64"]
    trained(release[task], tmp_path / task, "latte", *flags)


PAPER = {
    "listops": (128, 1e-3, 64, 0.01, 0.1, 50, 96_000, 40, 2000),
    "text": (256, 1e-3, 32, 0.05, 0.1, 32, 25_000, 256, 4000),
    "retrieval": (128, 1e-4, 32, 0.01, 0.1, 20, 147_086, 40, 4000),
    "image": (512, 1e-3, 32, 0.05, 0.1, 200, 45_000, 512, 1024),
    "pathfinder32": (256, 1e-3, 64, 0.03, 0.2, 200, 160_000, 256, 1024),
    "pathfinder64": (256, 1e-3, 64, 0.03, 0.2, 200, 160_000, 256, 4096),
    "pathfinder128": (256, 1e-3, 64, 0.03, 0.2, 200, 160_000, 256, 16384),
}
"""Width, learning rate, batch, weight decay, dropout, epochs (table 4), training examples, latents, tokens."""


@pytest.mark.parametrize("task", PAPER)
def test_the_recipes_have_the_papers_settings_and_our_own_are_separate(task):
    config = TrainConfig.from_file(recipe_path(f"lra-{task}"))
    dim, lr, batch, decay, dropout, epochs, examples, latents, length = PAPER[task]
    model, optimizer = config.model, config.optimizer
    assert (model.num_layers, model.num_heads, model.dim, model.dropout) == (6, 4, dim, dropout)
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay, config.batch.size) == ("adamw", lr, decay, batch)
    assert config.run.steps == math.ceil(epochs * examples / batch)
    assert (model.attention, model.options["latte"]["num_latents"], model.position) == ("latte", latents, "sinusoidal")
    assert (model.norm, model.feedforward, model.ff_mult, model.bias) == ("layer", "gelu", 4.0, True)
    assert (config.classify.dataset, config.batch.length, config.pretrain.kind) == (task, length, "none")
    plus = TrainConfig.from_file(recipe_path(f"lra-{task}-plus"))
    assert (plus.model.position, plus.pretrain.kind) == ("rope", "denoise")
    assert (plus.classify.dataset, plus.batch.length) == (task, length)


def test_the_llp_papers_recipe_has_its_table_and_the_benchmarks_training():
    config = TrainConfig.from_file(recipe_path("lra-image-llp"))
    model, optimizer = config.model, config.optimizer
    assert (model.num_layers, model.num_heads, model.dim, model.ff_mult * model.dim) == (3, 4, 64, 128)
    assert (model.attention, model.position, config.classify.dataset) == ("llp", "rope", "image")
    assert (optimizer.lr, config.batch.size, config.run.steps) == (5e-4, 256, 200 * 45_000 // 256)
    assert (model.dropout, model.attention_dropout) == (0.3, 0.2)


OTHERS = (*(f"lra-{task}" for task in PAPER if task != "pathfinder128"), "lra-listops-short", "lra-image-small")
LATER = [pytest.param(recipe, marks=pytest.mark.slow) for recipe in OTHERS]


@pytest.mark.parametrize("recipe", ["lra-pathfinder128", "lra-listops-plus", *LATER])
def test_every_mechanism_by_one_flag(recipe):
    config = TrainConfig.from_file(recipe_path(recipe))
    for name in (*BIDIRECTIONAL, *CAUSAL_ONLY):
        changes: dict[str, Any] = {"attention": name, "dim": 32, "num_layers": 1}  # quick to build; the options stay
        if config.model.position == "rope" and (name not in names() or not mechanism(name).rotates):
            changes["position"] = "sinusoidal"
        causal = config.classify.replace(causal=name in CAUSAL_ONLY)
        pretrain = PretrainConfig() if name == "perceiver" else config.pretrain
        check(config.replace(model=config.model.replace(**changes), classify=causal, pretrain=pretrain))
