"""Units in processes: each once, what is in a folder is gone on with only where it is of the same training."""

import os
import signal
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.harness.command import main
from experiments.harness.recipe import merged, read_recipe
from experiments.harness.result import read_result
from experiments.harness.runner import Runner, work
from experiments.harness.units import Unit, units_of


def planned(folder: Path, scale: str = "cpu") -> list[Unit]:
    return units_of(folder, read_recipe(folder), scale, work=folder.parent.parent / "work", data={})


def change(folder: Path, **values: Any) -> None:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(merged(yaml.safe_load(file.read_text()), values), sort_keys=False))


@pytest.mark.parametrize(
    "settings",
    [{"schedule": {"warmup": 0}}, {"run": {"steps": 3}}, {"run": {"steps": 6}}, {"model": {"dim": 8}}],
    ids=["warm-up", "fewer steps", "more steps", "width"],
)
def test_another_training_begins_anew(experiments: Path, settings: dict[str, Any]) -> None:
    folder = experiments / "trained"
    change(folder, scales={"smoke": {"seeds": [0]}})
    before = work(planned(folder, "smoke")[0])["rows"][0]
    change(folder, settings=settings)
    unit = planned(folder, "smoke")[0]
    (Path(unit.folder) / "left.txt").write_text("of the training before")
    after = work(unit)["rows"][0]
    assert not (Path(unit.folder) / "left.txt").exists()
    assert after["loss"] != before["loss"]
    assert after["steps"] == settings.get("run", {}).get("steps", 4)


def test_another_measurement_of_the_same_training_does_not_train(experiments: Path) -> None:
    folder = experiments / "trained"
    before = work(planned(folder, "smoke")[0])["rows"][0]
    change(folder, scales={"smoke": {"held": {"tokens": 32}}})
    unit = planned(folder, "smoke")[0]
    weights = Path(unit.folder) / "run" / "metrics.jsonl"
    kept = weights.read_bytes()
    after = work(unit)["rows"][0]
    assert weights.read_bytes() == kept
    assert (before["scored_tokens"], after["scored_tokens"]) == (63, 31)


def test_code_that_measures_is_part_of_what_a_unit_is(experiments: Path) -> None:
    folder = experiments / "measured"
    before = planned(folder)[0].identity
    code = (folder / "experiment.py").read_text()
    (folder / "experiment.py").write_text(code.replace("len(rows) > 2", "len(rows) > 3") + '\n"""A comment."""\n')
    assert planned(folder)[0].identity == before
    (folder / "experiment.py").write_text("FACTOR = 3\n" + code.replace("value * tokens", "value * FACTOR * tokens"))
    changed = planned(folder)[0].identity
    assert changed != before
    (folder / "experiment.py").write_text("FACTOR = 4\n" + code.replace("value * tokens", "value * FACTOR * tokens"))
    assert planned(folder)[0].identity not in (before, changed)


def test_labels_are_those_of_the_recipe_of_today(experiments: Path) -> None:
    folder = experiments / "measured"
    assert main(["--folder", "experiments", "measured", "--processes", "1"]) == 0
    change(folder, arms={"one": {"labels": {"kind": "new"}}})
    assert main(["--folder", "experiments", "measured", "--processes", "1"]) == 0
    assert read_result(folder)["cpu"]["rows"][0]["kind"] == "new"


class Pool:
    """Runs nothing, and counts what it is given."""

    def __init__(self) -> None:
        self.given: Counter[str] = Counter()

    def submit(self, run: Any, unit: Unit) -> Future[dict[str, Any]]:
        self.given[unit.name] += 1
        done: Future[dict[str, Any]] = Future()
        done.set_result({"rows": [], "seconds": 0.0})
        return done

    def shutdown(self, **options: bool) -> None:
        pass


def test_a_unit_is_given_to_a_process_once(experiments: Path) -> None:
    units, told = planned(experiments / "measured"), list[str]()
    with Runner(1) as runner:
        runner.pool = pool = Pool()  # type: ignore[assignment]
        runner.announce(units)
        assert len(list(runner.run(units, told.append))) == 4
    assert set(pool.given.values()) == {1}
    assert told[-1].startswith("measured, 4 of 4: ")


@pytest.mark.skipif(os.name != "posix", reason="processes are killed by a signal")
def test_a_killed_process_fails_its_units_and_not_the_next_ones(experiments: Path) -> None:
    folder = experiments / "measured"
    killing = f"import os\ndef run(unit):\n    os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    code = (folder / "experiment.py").read_text()
    with Runner(2) as runner:
        (folder / "experiment.py").write_text(killing)
        units = planned(folder, "smoke")
        found = [found for _, found in runner.run(units, lambda line: None)]
        assert all("a process was killed, perhaps for lack of memory" in one["failed"] for one in found)
        (folder / "experiment.py").write_text(code)
        assert all("rows" in one for _, one in runner.run(planned(folder, "smoke"), lambda line: None))


def test_training_on_the_held_out_text_is_refused(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = experiments.parent / "text.txt"
    text.write_text("some words\n" * 50)
    change(
        experiments / "trained", settings={"data": {"path": "@tinyshakespeare", "held_out_path": "@tinyshakespeare"}}
    )
    with pytest.raises(SystemExit):
        main(["--folder", "experiments", "trained", "--data", f"tinyshakespeare={text}"])
    assert "data.held_out_path equals data.path" in capsys.readouterr().err
