"""Units: which run, in which order, and what changes their identity."""

from experiments.harness.train import train_config
from tests.experiments.helpers import change, planned


def test_seeds_come_one_after_another_each_with_all_arms(experiments):
    folder = experiments / "measured"
    assert [unit.name for unit in planned(folder)] == ["one, seed 0", "two, seed 0", "one, seed 1", "two, seed 1"]
    change(folder, arms={"one": {"seeds": [0, 1, 2]}, "two": {}})
    names = [unit.name for unit in planned(folder, "smoke")]
    assert names == ["one, seed 0", "two, seed 0", "one, seed 1", "one, seed 2"]


def test_the_arm_overrides_the_scale_and_the_experiment(experiments):
    folder = experiments / "measured"
    change(
        folder,
        settings={"factor": 2, "a": 0, "b": 0, "c": 0, "d": 0},
        arms={"one": {"settings": {"c": 2, "d": 2}}},
        scales={"cpu": {"settings": {"b": 1, "c": 1, "d": 1}, "arm_settings": {"one": {"d": 3}}}},
    )
    assert planned(folder)[0].settings == {"factor": 2, "a": 0, "b": 1, "c": 2, "d": 3}


def test_identity_depends_on_what_is_computed_not_on_threads_or_paths(experiments):
    folder = experiments / "trained"
    units = planned(folder)
    assert [unit.identity for unit in units] == [unit.identity for unit in planned(folder, threads=2)]
    assert len({unit.identity for unit in units}) == len(units)
    assert train_config(units[0]).data.path.endswith("*.py")
    change(folder, settings={"batch": {"length": 15}})
    assert planned(folder)[0].identity != units[0].identity


def test_identity_depends_on_measuring_code_not_on_judging_code(experiments):
    folder = experiments / "measured"
    file, before = folder / "experiment.py", planned(folder)[0].identity
    code = file.read_text()
    file.write_text(code.replace("len(rows) > 2", "len(rows) > 3") + '\n"""A comment."""\n')
    assert planned(folder)[0].identity == before
    changed = []
    for factor in (3, 4):
        file.write_text(f"FACTOR = {factor}\n" + code.replace("value * tokens", "value * FACTOR * tokens"))
        changed.append(planned(folder)[0].identity)
    assert len({before, *changed}) == 3
