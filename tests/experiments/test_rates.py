"""Each arm chooses its learning rate first: by short runs, with a seed and on text that its result never uses."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness import measure
from experiments.harness import train as harness
from experiments.harness.command import main
from experiments.harness.rates import SEED, choose, searches_of, with_choice, with_settings
from experiments.harness.rates import searched as search
from experiments.harness.recipe import Recipe, merged
from experiments.harness.result import read_result
from experiments.harness.runner import work
from subquad.data import prepare
from subquad.training import TrainConfig
from subquad.training.progress import read_metrics
from tests.experiments.helpers import CODE, change, planned

RATES = [1e-4, 1e-2, 1e30]
SCALE = {"seeds": [0, 1], "held": {"tokens": 64}, "choose": {"lr": RATES}}


def searched(experiments, **scale):
    """Give `trained` one arm and rates."""
    settings = {"run": {"steps": 7}, "schedule": {"warmup": 3}}
    change(experiments / "trained", settings, arms={"full": {}}, scales={"cpu": merged(SCALE, scale)})
    return experiments / "trained"


def other_task(experiments, **settings):
    """Return the search of `trained` with another task, which reads no text."""
    folder = searched(experiments)
    change(folder, settings)
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("  data:\n    path: '@little'\n    tokenizer: bytes\n", ""))
    return searches_of(planned(folder))[0]


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.02, [0.01, 0.02, 0.04]),
        (0.01, [0.005, 0.01, 0.02, 0.04]),
        (0.003, [0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04]),
        (0.15, [0.01, 0.02, 0.04, 0.08, 0.16, 0.32]),
    ],
)
def test_the_series_goes_on_while_the_best_rate_is_at_its_end(best, tried):
    found = choose([0.01, 0.02, 0.04], lambda rate: abs(math.log(rate / best)))
    assert sorted(found) == tried
    assert next(iter(found)) == min(tried, key=lambda rate: abs(math.log(rate / best)))


def test_a_failed_rate_is_never_the_best_and_failures_end_the_series():
    assert next(iter(choose([1, 2, 3], lambda rate: math.inf if rate > 2 else 1 / rate))) == 2
    assert len(choose([1, 2, 3], lambda rate: math.inf)) == 3


def test_the_rate_of_matrices_keeps_its_ratio():
    settings = {"optimizer": {"name": "muon", "lr": 0.012, "matrix_lr": 0.004}}
    assert with_settings(settings, 0.006)["optimizer"] == {"name": "muon", "lr": 0.006, "matrix_lr": 0.002}
    assert with_settings({}, 0.006) == {"optimizer": {"lr": 0.006}}


def test_an_arm_is_searched_once_and_its_seeds_use_the_best_rate(experiments, capsys, monkeypatch):
    folder, read, nats = searched(experiments, choose={"lr": RATES, "tokens": 48}), [], measure.token_nats

    def spy(result, tokens, held):
        read.append(tokens.tolist())
        return nats(result, tokens, held)

    monkeypatch.setattr(harness, "token_nats", spy)
    monkeypatch.setattr(measure, "token_nats", spy)
    command = ("trained", "--folder", "experiments", "--processes", "1", "--work", "w")
    assert main(command) == 0
    told = capsys.readouterr().err
    assert f"1 of 1: full, seed {SEED}, " in told
    assert "2 of 2: full, seed 1, " in told
    rows = read_result(folder)["cpu"]["rows"]
    assert "| lr | lr_tried | seeds |" in (folder / "README.md").read_text()
    assert [(row["seed"], row["lr"], row["steps"]) for row in rows] == [(0, 1e-2, 7), (1, 1e-2, 7)]
    assert all(row["lr_tried"].startswith("0.0001: 5.") for row in rows)
    assert all(row["lr_tried"].endswith("; 1e+30: inf") for row in rows)
    own = {row["seed"]: TrainConfig.from_file(f"w/trained/cpu/full-{row['seed']}/run/config.yaml") for row in rows}
    assert {config.optimizer.lr for config in own.values()} == {1e-2}
    search = TrainConfig.from_file("w/trained/cpu/full-rates/rate-0.01/config.yaml")
    assert (search.run.seed, search.run.steps, search.schedule.warmup) == (SEED, 2, 1)
    assert not any("held_out_loss" in record for record in read_metrics(Path("w/trained/cpu/full-rates/rate-0.01")))
    held_out = prepare(own[0].data).held_out.tokens[:112].tolist()
    assert read == [held_out[64:]] * 2 + [held_out[:64]] * 2  # two rates without a failure, then two seeds

    assert main(command) == 0
    told = capsys.readouterr().err.splitlines()
    assert [text for text in told if ": data " not in text] == []  # nothing is searched or trained again
    before = {unit.identity for unit in planned(folder)}
    for changed in ({"lr": [1e-4, 1e-2, 0.1]}, {"tokens": 47}):
        searched(experiments, choose=changed)
        assert not before & {unit.identity for unit in planned(folder)}


def test_a_classifier_chooses_on_its_validation_part(experiments):
    unit = other_task(experiments, task="classify", classify={"examples": 40, "held_out": 8})
    rows = harness.search_unit(unit)
    assert [row["lr"] for row in rows][-1] == RATES[-1]  # it fails
    assert all(0 < row["loss"] < 5 for row in rows[:-1])
    # The toy task's validation part is its test part, so its search makes other sequences.
    assert TrainConfig.from_file(Path(unit.folder) / "rate-0.01" / "config.yaml").classify.seed == SEED
    plain = replace(planned(experiments / "trained")[0], rates=())
    (row,) = harness.train_unit(plain)
    assert len(row["accuracy_blocks"]) == 8
    assert row["accuracy"] == pytest.approx(sum(row["accuracy_blocks"]) / 8)
    assert (row["chance"], row["block_size"]) == (0.5, 1)


def test_an_arm_with_sines_chooses_their_size_first(experiments):
    """At the middle rate the larger size is best; at that size the first rate and then one beyond the series is."""
    best = {None: 0.5, 1.0: 0.0}
    asked = []

    def loss(rate, size):
        asked.append((rate, size))
        return best[size] + abs(math.log(rate / 0.006))

    rows = search([0.01, 0.02, 0.04], [None, 1.0], loss)
    assert asked == [(0.02, None), (0.02, 1.0), (0.01, 1.0), (0.04, 1.0), (0.005, 1.0), (0.0025, 1.0)]
    assert [row for row in rows if row["loss"] == min(row["loss"] for row in rows)] == [
        {"lr": 0.005, "position_scale": 1.0, "loss": abs(math.log(0.005 / 0.006))}
    ]
    folder = searched(experiments, choose={"lr": [0.01, 0.02, 0.04], "position_scale": [None, 1.0]})
    assert planned(folder)[0].sizes == ()  # it has no added sines
    change(folder, settings={"model": {"position": "sinusoidal"}})
    unit = planned(folder)[0]
    done = Path(searches_of([unit])[0].folder) / "unit.json"
    found = harness.search_unit(searches_of([unit])[0])
    assert {(row["lr"], row["position_scale"]) for row in found} >= {(0.02, None), (0.02, 1.0)}
    assert TrainConfig.from_file(done.parent / "rate-0.02-sines-1.0" / "config.yaml").model.position_scale == 1.0
    done.write_text(json.dumps({"rows": rows}))
    chosen, told = with_choice(unit)
    assert (chosen.settings["optimizer"]["lr"], chosen.settings["model"]["position_scale"]) == (0.005, 1.0)
    assert told["position_scale"] == "1"
    assert told["lr_tried"].startswith("0.0025: ")
    assert told["position_scale_tried"] == "own: 1.704; 1: 1.204"


def test_an_arm_that_no_rate_trains_has_no_result(experiments):
    unit = planned(searched(experiments))[0]
    done = Path(searches_of([unit])[0].folder) / "unit.json"
    done.parent.mkdir(parents=True)
    done.write_text('{"rows": [{"lr": 0.1, "loss": Infinity}]}')
    with pytest.raises(ValueError, match=r"full: no learning rate of 0\.1: inf trains"):
        with_choice(unit)


def test_what_cannot_be_searched_is_refused(experiments):
    (search,) = searches_of(planned(searched(experiments, held={"tokens": 10**9})))
    with pytest.raises(ValueError, match=r"must fit into its \d+ tokens, got 1000000000 and None"):
        harness.search_unit(search)
    with pytest.raises(ValueError, match="rates are for the tasks language and classify, got probe"):
        harness.search_unit(other_task(experiments, task="probe", batch={"length": 32}))
    for given, message in (
        ({"lr": [0.1, 0.2]}, r"choose\.lr must be at least 3 different positive numbers, got"),
        ({"lr": [0.1, 0.2, 0.1]}, r"choose\.lr must be at least 3 different positive numbers, got"),
        ({"lr": [0.1, 0.2, 0]}, r"choose\.lr must be at least 3 different positive numbers, got"),
        ({"lr": RATES, "position_scale": [1.0]}, r"choose\.position_scale must be at least 2 different"),
        ({"position_scale": [None, 1.0]}, "position_scale needs lr: a size is chosen at the middle rate"),
        ({"tokens": 9}, r"choose\.tokens must be a positive number beside lr, got 9"),
        ({"lr": RATES, "tokens": 0}, r"choose\.tokens must be a positive number beside lr, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Recipe.from_dict({"arms": {"a": {}}, "scales": {"cpu": {"choose": given}}})


def test_an_experiment_that_trains_itself_searches_itself(experiments):
    folder, code = (
        experiments / "measured",
        "\ndef search(unit):\n    return abs(unit.settings['optimizer']['lr'] - 2) + unit.seed",
    )
    change(folder, scales={"cpu": {"choose": {"lr": [1, 2, 3]}}})
    with pytest.raises(ValueError, match=r"scales\.cpu\.choose needs a function search\(unit\) in experiment\.py"):
        planned(folder)
    (folder / "experiment.py").write_text(CODE + code)
    before = searches_of(planned(folder))[0]
    assert [(row["lr"], row["loss"]) for row in work(before)["rows"]] == [(2, SEED), (1, SEED + 1), (3, SEED + 1)]
    rows = work(planned(folder)[0])["rows"]
    assert {(row["lr"], row["lr_tried"]) for row in rows} == {(2, "1: 1,001; 2: 1,000; 3: 1,001")}
    (folder / "experiment.py").write_text(CODE + code + " ** 2")
    assert searches_of(planned(folder))[0].identity != before.identity
