"""`subquad train --data.path X` alone: a recipe for the text and the minutes, over which every option wins."""

import json

import pytest

from subquad import attention
from subquad.cli import main
from subquad.cli.train import read_config
from subquad.recipes import recipes
from subquad.recipes.automatic import automatic
from subquad.training import TrainConfig
from subquad.training.tasks import check


@pytest.mark.parametrize(("megabytes", "minutes", "vocabulary", "length", "dropout"), [
    (0.3, 3, 512, 256, 0.25),  # read 25 times: 2 log2(5) = 4.6
    (0.3, 0.5, 512, 256, 0.0),
    (0.02, 5, 512, 256, 0.4),
    (1.1, 5, 2048, 512, 0.1),
    (5, 3, 4096, 512, 0.0),
    (5, 60, 4096, 512, 0.25),
    (4000, 600, 4096, 512, 0.0),
])  # fmt: skip
def test_the_recipe_follows_the_text_and_the_minutes(megabytes, minutes, vocabulary, length, dropout):
    settings = automatic(round(megabytes * 1e6), minutes)
    found = settings["data"]["vocab_size"], settings["batch"]["length"], settings["model"]["dropout"]
    assert found == (vocabulary, length, dropout)
    assert (settings["model"]["num_layers"], settings["model"]["init_std"]) == (3, 0.05)
    TrainConfig.from_dict(settings)


@pytest.mark.parametrize(("size", "minutes"), [(0, 5), (10, 0)])
def test_the_recipe_needs_a_text_and_time(size, minutes):
    with pytest.raises(ValueError, match=f"must be positive, got {size} and {minutes}"):
        automatic(size, minutes)


@pytest.fixture
def text(tmp_path):
    """A text of 300 kB."""
    (tmp_path / "text.txt").write_text("It was a bright cold day.\n" * 11_539)
    return tmp_path / "text.txt"


def test_without_a_recipe_one_is_chosen_and_options_win(text, tmp_path):
    folder = ("--run.folder", str(tmp_path / "new"))
    config = read_config(["--data.path", str(text), *folder])
    assert (config.data.vocab_size, config.run.weights, config.run.steps) == (512, "best", None)
    assert (config.model.attention, config.model.position, config.model.dropout) == ("llp", "rope", 0.3)
    options = ["--model.attention", "latte", "--model.dim=32", "--run.minutes", "1", "--data.pack", "documents"]
    config = read_config(["--data.path", str(text), *folder, *options])
    assert (config.model.attention, config.model.position, config.model.dim) == ("latte", "sinusoidal", 32)
    assert (config.run.minutes, config.model.dropout, config.run.weights) == (1.0, 0.05, "last")
    hybrid = read_config(["--data.path", str(text), *folder, "--model.attention", "[gla, window]"])
    assert (hybrid.model.num_layers, hybrid.model.position) == (4, "rope")
    for given in (["--recipe", "tiny"], ["--task", "probe"]):
        assert read_config([*given, *folder]).run.weights == "last"


def test_the_users_minutes_win_over_the_steps_of_a_recipe():
    assert read_config(["--recipe", "tiny"]).run.steps == 40
    config = read_config(["--recipe", "tiny", "--run.minutes=2"])
    assert (config.run.steps, config.run.minutes) == (None, 2.0)
    both = read_config(["--recipe", "stdlib-llp", "--run.minutes", "2", "--run.steps", "7"])
    assert (both.run.steps, both.run.minutes) == (7, 2.0)
    assert both.schedule.warmup == 0, "a tenth of seven steps, not the recipe's 40"
    assert read_config(["--recipe", "stdlib-llp"]).run.minutes == 6.0


SMALL = [
    "--model.dim=16",
    "--model.num_layers=1",
    "--model.num_heads=2",
    "--batch.length=64",
    "--batch.size=2",
    "--data.tokenizer=bytes",
    "--run.device=cpu",
    "--run.threads=1",
    "--run.sample_tokens=8",
    "--run.eval_windows=4",
    "--run.trackers=[]",
]


def test_the_same_command_resumes_the_run_though_the_text_seems_another(text, tmp_path, monkeypatch, capsys):
    """A run's folder wins over a recipe for the text as it is now; a short run needs no warm-up."""
    command = ["train", "--data.path", str(text), "--run.folder", str(tmp_path / "run"), *SMALL]
    assert main([*command, "--run.steps=3", f"--data.cache={tmp_path}"]) == 0
    monkeypatch.setattr("subquad.cli.train.text_size", lambda path: 1_000_000_000)
    before = (tmp_path / "run/model.safetensors").read_bytes()
    assert main(command) == 0
    assert (tmp_path / "run/model.safetensors").read_bytes() == before
    out = capsys.readouterr().out
    assert out.count("\ncold day. It was a bright cold day.") == 6, "samples continue the held-out text"
    for word in ("import ", "Python"):
        assert word not in out
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["baselines"]["held_out_bytes"] == report["held_out_bytes"] <= 7_501, "half of 5 %"


RECIPES = [None, *(name for name in recipes() if name.startswith("stdlib") or name == "tiny")]
MECHANISMS = [name for name in attention.names() if "causal" in attention.mechanism(name).forms] + ["perceiver_ar"]


@pytest.mark.parametrize(("recipe", "names"), [
    *((recipe, MECHANISMS[number :: len(RECIPES)]) for number, recipe in enumerate(RECIPES)),
    *(pytest.param(recipe, MECHANISMS, marks=pytest.mark.slow) for recipe in RECIPES),
])  # fmt: skip
def test_any_mechanism_works_in_any_recipe(recipe, names):
    for name in names:
        base = [] if recipe is None else ["--recipe", recipe]
        config = read_config([*base, "--model.attention", name, "--run.folder", "runs/none-such"])
        small = config.model.replace(dim=32, vocab_size=512)
        check(config.replace(model=small))
