"""The runner: each unit runs once, and continues what is in its folder only if the training is the same."""

import os
import signal
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.harness.runner import Runner, work
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


def test_each_unit_is_submitted_once(experiments):
    units, told, given = planned(experiments / "measured"), [], []

    def submit(run, unit):
        given.append(unit.name)
        done = Future()
        done.set_result({"rows": [], "seconds": 0.0})
        return done

    with Runner(1) as runner:
        runner.pool = SimpleNamespace(submit=submit, shutdown=lambda **_: None)
        runner.announce(units)
        assert len(list(runner.run(units, told.append))) == 4
    assert sorted(given) == sorted(unit.name for unit in units)
    assert told[-1].startswith("measured, 4 of 4: ")


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
