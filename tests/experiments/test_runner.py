"""The runner: each unit runs once, and continues what is in its folder only if the training is the same."""

import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.harness import runner
from experiments.harness.runner import Runner, work
from experiments.harness.source import library_hash
from tests.experiments.helpers import change, planned


@pytest.mark.parametrize(
    "settings",
    [{"schedule": {"warmup": 0}}, {"run": {"steps": 3}}, {"run": {"steps": 6}}, {"model": {"dim": 8}}],
    ids=["warm-up", "fewer steps", "more steps", "width"],
)
def test_another_training_starts_afresh(experiments, settings):
    folder = experiments / "trained"
    before = work(planned(folder, "smoke")[0])["rows"][0]
    change(folder, settings=settings)
    unit = planned(folder, "smoke")[0]
    (Path(unit.folder) / "left.txt").write_text("of the training before")
    after = work(unit)["rows"][0]
    assert not (Path(unit.folder) / "left.txt").exists()
    assert after["loss"] != before["loss"]
    assert after["steps"] == settings.get("run", {}).get("steps", 4)


def test_another_measurement_of_the_same_training_does_not_train(experiments):
    folder = experiments / "trained"
    before = work(planned(folder, "smoke")[0])["rows"][0]
    change(folder, scales={"smoke": {"seeds": [0, 1], "held": {"tokens": 32, "stride": 4}}})
    unit = planned(folder, "smoke")[0]
    metrics = Path(unit.folder) / "run" / "metrics.jsonl"
    kept = metrics.read_bytes()
    after = work(unit)["rows"][0]
    assert metrics.read_bytes() == kept
    assert (before["scored_tokens"], after["scored_tokens"]) == (63, 31)


def test_a_unit_that_continues_adds_the_time_of_its_earlier_starts(experiments):
    """Core-seconds are those of the process's threads at work: waiting costs none."""
    unit = planned(experiments / "measured")[0]
    found = work(unit)
    (Path(unit.folder) / "spent.txt").write_text("100.0\n")
    again = work(unit)
    assert 0 < found["core_seconds"] < 1
    assert 100 < again["core_seconds"] < 101 > again["seconds"]
    assert again["library"] == library_hash()


def test_each_unit_is_submitted_once_and_timed_ones_run_when_nothing_else_does(experiments, monkeypatch):
    arms = {"one": {"settings": {"value": 1}}, "two": {"settings": {"value": 2}, "timed": True}}
    change(experiments / "measured", alone=False, arms=arms)
    units, told, given, alone = planned(experiments / "measured", timed_threads=7), [], [], []

    def submit(run, unit):
        given.append((unit.name, Future()))
        threading.Timer(0.05, given[-1][1].set_result, [{"rows": [], "seconds": 0.0}]).start()
        return given[-1][1]

    def by_itself(unit):
        assert all(future.done() for _, future in given)
        alone.append((unit.name, unit.threads))
        return {"rows": [], "seconds": 0.0}

    monkeypatch.setattr(runner, "work", by_itself)
    with Runner(1) as running:
        running.pool = SimpleNamespace(submit=submit, shutdown=lambda **_: None)
        running.announce(units)
        assert len(list(running.run(units, told.append))) == 4
    assert sorted(name for name, _ in given) == ["one, seed 0", "one, seed 1"]
    assert alone == [("two, seed 0", 7), ("two, seed 1", 7)]
    assert told[-1].startswith("measured, 4 of 4: ")
    assert not any(unit.timed for unit in planned(experiments / "measured", "smoke"))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="processes are killed by a signal")
def test_a_killed_process_fails_its_unit_and_not_the_next_ones(experiments):
    folder = experiments / "measured"
    code = (folder / "experiment.py").read_text()
    with Runner(2) as runner:
        (folder / "experiment.py").write_text(
            f"import os\ndef run(unit):\n    os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        )
        change(folder, arms={"one": {"settings": {"value": 1}}})
        ((_, found),) = runner.run(planned(folder, "smoke"), lambda line: None)
        assert "a process was killed, perhaps for lack of memory" in found["failed"]
        (folder / "experiment.py").write_text(code)
        ((_, found),) = runner.run(planned(folder, "smoke"), lambda line: None)
        assert found["rows"]
