"""`python -m experiments.lora_mnist` on a few made-up images: trainings, results, continuing, errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from experiments.linear_mnist.experiment import toy_images
from experiments.lora_mnist import arms, report, running
from experiments.lora_mnist.command import run
from experiments.lora_mnist.config import ARMS, NET_PARAMETERS, PER_RANK, MnistConfig
from experiments.lora_mnist.experiment import toy_digits
from experiments.lora_mnist.running import Results
from subquad.data.images import ImageSet
from subquad.testing import assert_exact

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"epochs": 1, "base_epochs": 2, "batch": 40, "look_every": 1, "warmup": 2, "band": [0, 100], "ranks": [1, 3]}
SMALL |= {"processes": 1}
OPTIONS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return toy_digits(tmp_path_factory.mktemp("digits") / "digits.npz", 0, train=200, test=60)


def config(images, **changes):
    return MnistConfig(path=str(images), **SMALL, **changes)


def test_factors_train_exactly_1050_numbers_a_rank_and_nothing_else_moves(images):
    digits = arms.read_digits(config(images))
    for rank in (1, 2, 64):
        for product in (False, True):
            start = arms.fresh_net(0)
            weights = [layer.weight for layer in start.layers] + [layer.bias for layer in start.layers]
            net = arms.with_factors(start, rank, 0, product=product)
            assert (net(arms.scaled(digits.test["plain"].x_ND)).std(0) > 0).all()  # it does not begin constant
            before = [weight.detach().clone() for weight in weights]
            trains = [p for p in net.parameters() if p.requires_grad]
            assert sum(p.numel() for p in trains) == 1050 * rank == PER_RANK * rank
            factors = [p.detach().clone() for p in trains]
            arms.fit(net, digits.train["plain"], epochs=1, batch=40, rate=1e-2, seed=0)
            for weight, old in zip(weights, before, strict=True):
                assert_exact(weight, old)
            assert all(not torch.equal(p, old) for p, old in zip(trains, factors, strict=True))
            assert all(bool(weight.any()) != product for weight in weights[:3])
    assert NET_PARAMETERS == 55_050


def test_the_factors_are_no_copies_of_the_first_weights(images, monkeypatch):
    seen = []
    monkeypatch.setattr(arms, "with_factors", lambda net, rank, seed, **_: seen.append(seed) or net)
    small = config(images)
    arms.train_cell(arms.Cell("scratch", "", "plain", 1), small, arms.read_digits(small), {}, 0)
    monkeypatch.undo()
    net = arms.fresh_net(0)
    first = set(net.layers[0].weight.flatten().tolist())
    factors = arms.with_factors(net, 1, seen[0]).layers[0].lora_A["default"].weight
    assert sum(x in first for x in factors.flatten().tolist()) < 10  # with the net's seed: all 784


def test_the_variants_of_the_images(images):
    digits = arms.read_digits(config(images, levels=3))
    plain = digits.test["plain"].x_ND.view(-1, 28, 28)
    assert sorted(digits.test["quantised"].x_ND.unique().tolist()) == [0, 127, 255]
    assert_exact(digits.test["inverted"].x_ND, 255 - plain.flatten(1))
    for turn, turned in (("left", plain[0].T.flip(0)), ("right", plain[0].flip(0).T)):
        found = arms.read_digits(config(images, turn=turn)).test["rotated"].x_ND.view(-1, 28, 28)
        assert_exact(found[0], turned)
    assert all(split.y_N is digits.test["plain"].y_N for split in digits.test.values())


def test_grey_levels_are_evenly_spread():
    every = ImageSet(np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1), np.zeros(1, dtype=np.int64), ("0",))
    values, counts = arms._variants(every, MnistConfig(levels=4))["quantised"].x_ND.unique(return_counts=True)
    assert (values.tolist(), counts.tolist()) == ([0, 85, 170, 255], [64] * 4)


def test_the_rate_rises_then_falls_and_batches_are_the_same_for_all_arms(images):
    split = arms.read_digits(config(images)).train["plain"]
    rates, seen = [], []

    def fit(net):
        seen.clear()
        net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
        assert arms.fit(net, split, epochs=2, batch=40, rate=1.0, seed=3, warmup=3) == 10
        return torch.cat(seen)

    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    one = fit(arms.fresh_net(0))
    hook.remove()
    assert rates == [0.25, 0.5, 0.75, *(left / 7 for left in range(7, 0, -1))]
    assert_exact(fit(arms.with_factors(arms.fresh_net(1), 2, 1)), one)


def test_the_command_continues_an_experiment_and_prints_its_tables(images, tmp_path, capsys, monkeypatch):
    out, page, picture = tmp_path / "out.json", tmp_path / "page.md", tmp_path / "picture.png"
    command = ["--path", str(images), "--out", str(out), *OPTIONS]
    monkeypatch.setattr(running, "TIMED_STEPS", 5)
    assert run([*command, "--seeds", "1"]) == 0
    first = json.loads(out.read_text())
    cells = arms.cells(config(images))
    assert len(cells) == 2 * 3 * 3 + 2 * 4 * 2
    assert set(first["seeds"]["0"]["accuracy"]) >= {cell.name for cell in cells}
    assert first["seeds"]["0"]["stopped_step"] == 1
    steps = first["steps"].values()
    assert [step["trainable"] for step in steps] == [55_050, 1050, 3150]
    assert first["steps"]["1"]["trained_bytes"] == 2 * 4 * 1050  # parameters and momentum, in float32
    assert all(step["p20"] <= step["median"] <= step["p80"] and step["step_peak_bytes"] > 0 for step in steps)
    capsys.readouterr()
    again = [*command, "--seeds", "2", "--markdown", str(page), "--plot", str(picture)]
    assert run(again) == 0
    printed = capsys.readouterr()
    second = json.loads(out.read_text())
    assert second["seeds"]["0"] == first["seeds"]["0"]
    assert set(second["seeds"]) == {"0", "1"}
    assert "34 of 34 trainings" in printed.err
    assert "Fine-tuned from the base stopped in the band" in printed.out
    assert "85.58" in printed.out
    assert "From scratch, training only the factors: B A alone" in page.read_text()
    assert "| r = 3 |" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(again) == 0  # nothing is left to do
    assert json.loads(out.read_text()) == second
    for changes, message in (
        (["--warmup", "1"], "has results of other settings or images"),
        (["--plot", str(tmp_path / "x.xyz")], "--plot must name a .png or .svg file"),
        (["--markdown", str(tmp_path / "none" / "x.md")], "there is no folder"),
        (["--out", str(tmp_path)], "--out must be a file"),
        (["--tune"], "--out has no effect with --tune"),
    ):
        with pytest.raises(SystemExit):
            run([*command, *changes])
        assert message in capsys.readouterr().err


def test_rates_are_chosen_without_the_test_images(images, capsys, monkeypatch):
    seen = []
    real = arms.accuracy
    monkeypatch.setattr(arms, "accuracy", lambda net, split: seen.append(split) or real(net, split))
    monkeypatch.setattr(running, "TUNE_RATES", (1e-3, 1e-2))
    assert run(["--path", str(images), "--tune", "--tune_held_out", "50", *OPTIONS]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "rates:"
    assert [line.split(":")[0].strip() for line in out.splitlines()[1:]] == list(ARMS)
    assert {len(split.y_N) for split in seen} == {50}


def test_the_committed_tables_are_those_of_the_committed_results(tmp_path):
    results = json.loads((ROOT / "benchmarks" / "results" / "lora_mnist.json").read_text())
    report.show(results, MnistConfig.from_dict(results["config"]), str(tmp_path / "tables.md"))
    notes = " ".join(report._notes(results, MnistConfig(seeds=1)))
    assert "after 255 steps of 2,340." in notes  # only of this seed
    assert len(report.values_of(results, "full/stopped/rotated", MnistConfig(seeds=1))) == 1
    assert " of 104 trainings ended with a constant answer" in notes
    told = (ROOT / "experiments" / "lora_mnist" / "tables.md").read_text().partition("*The base, ")
    assert "".join(told[1:]) == (tmp_path / "tables.md").read_text().lstrip()


def test_impossible_settings_are_refused():
    for values, message in (
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"ranks": [1, 1]}, r"ranks must be distinct and at least 1, got \[1, 1\]"),
        ({"levels": 1}, "levels must be between 2 and 256, got 1"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"band": [5, 3]}, r"band must be two percentages, the lower one first, got \[5, 3\]"),
        ({"rates": {"base": 1.0}}, r"rates.full must be above 0, got None"),
        ({"rates": dict.fromkeys((*ARMS, "other"), 1.0)}, "rates has no arm 'other'"),
    ):
        with pytest.raises(ValueError, match=message):
            MnistConfig(**values)


def test_other_images_bands_and_results_are_refused(images, tmp_path, monkeypatch):
    digits, small = arms.read_digits(config(images)), toy_images(tmp_path / "x.npz")
    (broken := tmp_path / "broken.json").write_text("[]")
    narrow = config(images).replace(band=[50.01, 50.02])
    monkeypatch.setattr(arms, "PER_RANK", 1049)
    for work, message in (
        (lambda: arms.read_digits(MnistConfig()), "--path is missing: give a folder"),
        (lambda: arms.read_digits(MnistConfig(path=str(small))), "must be 28 x 28, grey, of 10 classes, got 5 x 5 x 1"),
        (lambda: arms.held_out(digits, 200), "tune_held_out must be below the 200 training images, got 200"),
        (lambda: arms.train_base(narrow, digits, 0), r"none of 10 .* is in band=\[50.01, 50.02\] \(nearest: "),
        (lambda: Results.open(config(images), str(broken), ""), "broken.json is damaged: .* a mapping, got list"),
        (
            lambda: arms.with_factors(arms.fresh_net(0), 2, 0),
            r"must train 1049 \* 2 = 2098 parameters, got 2100",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            work()
