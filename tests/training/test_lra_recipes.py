"""The recipes of Long Range Arena: the settings of the Latte paper, and every mechanism by one flag."""

import math

import pytest

from subquad.attention import mechanism, names
from subquad.cli import main
from subquad.cli.train import read_config
from subquad.recipes import recipe_path
from subquad.training import PretrainConfig, TrainConfig
from subquad.training.tasks import check

PAPER = {
    "listops": (128, 1e-3, 64, 0.01, 0.1, 50, 96_000, 40),
    "text": (256, 1e-3, 32, 0.05, 0.1, 32, 25_000, 256),
    "retrieval": (128, 1e-4, 32, 0.01, 0.1, 20, 147_086, 40),
    "image": (512, 1e-3, 32, 0.05, 0.1, 200, 45_000, 512),
    "pathfinder32": (256, 1e-3, 64, 0.03, 0.2, 200, 160_000, 256),
    "pathfinder64": (256, 1e-3, 64, 0.03, 0.2, 200, 160_000, 256),
    "pathfinder128": (256, 1e-3, 64, 0.03, 0.2, 200, 160_000, 256),
}
"""Width, learning rate, batch, weight decay, dropout, epochs (table 4), training examples, latents."""
LENGTHS = {
    "listops": 2000,
    "text": 4000,
    "retrieval": 4000,
    "image": 1024,
    "pathfinder32": 1024,
    "pathfinder64": 4096,
    "pathfinder128": 16384,
}
BIDIRECTIONAL = [name for name in names() if "bidirectional" in mechanism(name).forms] + ["perceiver", "perceiver_io"]
SMALL = ("lra-listops-short", "lra-image-small")
CAUSAL_ONLY = [name for name in names() if mechanism(name).forms == ("causal",)]


def comment(recipe):
    """What stands before a recipe's values, in one line."""
    lines = recipe_path(recipe).read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))


@pytest.mark.parametrize("task", PAPER)
def test_the_papers_settings(task):
    config = TrainConfig.from_file(recipe_path(f"lra-{task}"))
    dim, lr, batch, decay, dropout, epochs, examples, latents = PAPER[task]
    model, optimizer = config.model, config.optimizer
    assert (model.num_layers, model.num_heads, model.dim, model.dropout) == (6, 4, dim, dropout)
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay, config.batch.size) == ("adamw", lr, decay, batch)
    assert config.run.steps == math.ceil(epochs * examples / batch)
    assert (model.attention, model.options["latte"]["num_latents"], model.position) == ("latte", latents, "sinusoidal")
    assert (model.norm, model.feedforward, model.ff_mult, model.bias) == ("layer", "gelu", 4.0, True)
    assert (config.classify.dataset, config.batch.length) == (task, LENGTHS[task])
    assert config.pretrain.kind == "none"
    assert f"{config.run.steps:,} steps" in comment(f"lra-{task}")


@pytest.mark.parametrize("task", PAPER)
def test_ours_are_apart(task):
    config = TrainConfig.from_file(recipe_path(f"lra-{task}-plus"))
    assert (config.model.position, config.pretrain.kind) == ("rope", "denoise")
    assert (config.classify.dataset, config.batch.length) == (task, LENGTHS[task])
    assert "not a paper's" in comment(f"lra-{task}-plus")


@pytest.mark.parametrize("recipe", [*(f"lra-{task}" for task in PAPER), "lra-listops-plus", *SMALL])
def test_every_mechanism_by_one_flag(recipe):
    config = TrainConfig.from_file(recipe_path(recipe))
    for name in (*BIDIRECTIONAL, *CAUSAL_ONLY):
        changes = {"attention": name, "dim": 32, "num_layers": 1}  # quick to build; the options stay
        if config.model.position == "rope" and (name not in names() or not mechanism(name).rotates):
            changes["position"] = "sinusoidal"
        causal = config.classify.replace(causal=name in CAUSAL_ONLY)
        pretrain = PretrainConfig() if name == "perceiver" else config.pretrain
        check(config.replace(model=config.model.replace(**changes), classify=causal, pretrain=pretrain))


def test_what_is_read_needs_a_path(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--recipe", "lra-text"])
    assert stopped.value.code == 2
    assert "dataset=text is read, not made: give its path, a folder, a file or hf:NAME" in capsys.readouterr().err


def test_the_switch_is_a_flag():
    flags = ["--recipe", "lra-text", "--model.attention", "elita", "--classify.causal", "true"]
    config = read_config(flags)
    assert (config.model.attention, config.model.options["elita"]["horizon"]) == ("elita", 4096)
    check(config)
