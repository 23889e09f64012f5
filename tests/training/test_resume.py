"""A run that is killed and goes on ends with the same bits as one that was left alone."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from subquad.training import TrainConfig, checkpoint, train
from subquad.training.errors import CheckpointError, FormatVersionError
from subquad.training.loop import Loop
from subquad.training.reading import NumberedWindows, RunOrder
from subquad.training.saving import Checkpoints, load_rng, save_rng
from tests.training.metrics import records

KILLED = Path(__file__).with_name("killed.py")


def assert_same_model(one: Path, other: Path) -> None:
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def kill(runs: list[tuple[Path, str]]) -> list[str]:
    """Train each configuration in a process that SIGKILLs itself at the place; the newest complete checkpoint then."""
    result = subprocess.run(
        [sys.executable, str(KILLED), *(str(word) for run in runs for word in run)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    ends = [line.split() for line in result.stdout.splitlines()]
    assert [end[0] for end in ends] == ["SIGKILL"] * len(runs), result.stderr
    return [end[1] for end in ends]


SAVES = [3, 4, 6, 8, 9, 10]  # 4 and 8 for their best loss
FILES = ["model.safetensors", "optimizer.pt", "manifest.json"]


def draw_places(seed: int) -> tuple[list[str], list[str]]:
    """Where to kill a run of ten steps of two forward passes: in a step, in a file, before a rename, in any order.

    Also the newest complete checkpoint after each: what is drawn depends on where the last process ended.
    """
    draw = random.Random(seed)
    kinds = ["step", f"half:{FILES[seed]}", "rename"]
    draw.shuffle(kinds)
    places, newest, start = [], [], 0
    for kind in kinds:
        left = [step for step in SAVES if step > start]
        if kind == "step":
            count = draw.randint(1, 2 * (10 - start))
            saved = [step for step in left if step <= start + (count - 1) // 2]
        else:
            count = draw.randint(1, min(2, len(left)))
            saved = left[: count - 1]
        start = saved[-1] if saved else start
        places.append(f"{kind}:{count}")
        newest.append(f"checkpoint-{start}" if start else "none")
    return places, newest


@pytest.mark.slow
def test_sigkill_in_steps_and_inside_saves_changes_no_bit(make_config, tmp_path: Path) -> None:
    train(make_config({"run.folder": str(tmp_path / "left alone")}))
    runs, expected, configs = [], [], []
    for seed in range(len(FILES)):
        configs.append(make_config({"run.folder": str(tmp_path / f"killed {seed}")}))
        configs[-1].to_file(tmp_path / f"{seed}.yaml")
        places, newest = draw_places(seed)
        runs += [(tmp_path / f"{seed}.yaml", place) for place in places]
        expected += newest
    assert kill(runs) == expected, runs
    for config in configs:
        assert train(config).steps == 10
        folder = Path(config.run.folder)
        assert_same_model(tmp_path / "left alone", folder)
        assert records(tmp_path / "left alone") == records(folder)
        assert not list((folder / "checkpoints").glob(".*"))


def test_a_run_that_stops_in_the_middle_of_an_epoch_sees_every_window_in_the_same_order(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    item = NumberedWindows.__getitem__

    def log_item(self: NumberedWindows, index: int) -> dict[str, torch.Tensor]:
        seen.append(index)
        return item(self, index)

    monkeypatch.setattr(NumberedWindows, "__getitem__", log_item)
    train(make_config({"run.folder": str(tmp_path / "whole")}))
    whole, windows = list(seen), len(set(seen))
    assert len(whole) == 80
    assert 80 % windows
    assert sorted(whole[:windows]) == list(range(windows))
    seen.clear()

    calls = [0]
    compute = Loop.training_pass

    def stop_in_step_6(self: Loop, *args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == 11:
            raise RuntimeError("stopped")
        compute(self, *args, **kwargs)

    monkeypatch.setattr(Loop, "training_pass", stop_in_step_6)
    with pytest.raises(RuntimeError, match="stopped"):
        train(make_config())
    monkeypatch.setattr(Loop, "training_pass", compute)
    seen.clear()
    train(make_config())  # from checkpoint-4: 4 x 8 windows are behind it
    assert seen == whole[32:]
    assert_same_model(tmp_path / "whole", tmp_path / "run")


def test_run_order_is_an_epoch_after_the_other_and_a_longer_run_begins_with_a_shorter_one() -> None:
    order = list(RunOrder(7, 3, 18))
    assert len(order) == len(RunOrder(7, 3, 18)) == 18
    assert sorted(order[:7]) == sorted(order[7:14]) == list(range(7))
    assert order[:7] != order[7:14]
    assert list(RunOrder(7, 3, 40))[:18] == order
    assert list(RunOrder(7, 4, 18)) != order


def test_random_generators_come_back(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]

    draw()
    np.random.randn()  # leaves a cached second value
    save_rng(tmp_path / "rng.safetensors")
    expected = draw()
    load_rng(tmp_path / "rng.safetensors")
    assert draw() == expected
    (tmp_path / "rng.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_rng(tmp_path / "rng.safetensors")
    with pytest.raises(CheckpointError, match="as many processes as made the checkpoint"):
        load_rng(tmp_path / "absent.safetensors")


@pytest.fixture
def run_at_4(make_config, tmp_path: Path) -> TrainConfig:
    """A finished run of four steps with the checkpoints 3 and 4, and a configuration of six."""
    train(make_config({"run.steps": 4, "schedule.kind": "constant"}))
    return make_config({"run.steps": 6, "schedule.kind": "constant"})


def test_going_on_skips_what_is_damaged_and_says_why(
    run_at_4: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run" / "checkpoints"
    assert [step for step, _ in checkpoint.listing(root)] == [3, 4]
    weights = root / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    (root / ".saving-checkpoint-5").mkdir()
    with caplog.at_level(logging.INFO, logger="subquad"):  # which a command may have made less talkative
        assert train(run_at_4).steps == 6
    assert "skipped checkpoint-4" in caplog.text
    assert "going on from" in caplog.text
    assert "checkpoint-3" in caplog.text
    assert "deleted .saving-checkpoint-5" in caplog.text


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state_0.safetensors", "trainer_state.json"])
def test_a_missing_file_is_never_silent(run_at_4: TrainConfig, tmp_path: Path, name: str) -> None:
    root = tmp_path / "run" / "checkpoints"
    shutil.rmtree(root / "checkpoint-3")
    (root / "checkpoint-4" / name).unlink()
    with pytest.raises(CheckpointError, match=f"no checkpoint in .* is complete.*lacks its file {name}"):
        train(run_at_4)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_the_trainer_itself_refuses_a_checkpoint_without_its_files(tmp_path: Path, name: str) -> None:
    checkpoints = Checkpoints.__new__(Checkpoints)
    for other in {"optimizer.pt", "scheduler.pt", "trainer_state.json"} - {name}:
        (tmp_path / other).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"lacks {name}; resuming without it would change the run"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize(("made", "goes_on"), [("bf16", "float32"), ("float32", "bf16")])
def test_a_run_does_not_go_on_in_another_precision_that_auto_chose(
    make_config, monkeypatch: pytest.MonkeyPatch, made: str, goes_on: str
) -> None:
    changes = {"run.precision": "auto", "schedule.kind": "constant", "run.eval_every": 0}
    for steps, precision in ((3, made), (4, goes_on)):
        monkeypatch.setattr("subquad.training.run._multiplies_bf16", lambda cpu, p=precision: p == "bf16")
        config = make_config({**changes, "run.steps": steps})
        if steps == 3:
            train(config)
    with pytest.raises(CheckpointError, match=f"other settings: run.precision was '{made}', is '{goes_on}'"):
        train(config)
    assert train(make_config({**changes, "run.steps": 4, "run.precision": made})).steps == 4


def test_an_older_format_is_refused_by_name(run_at_4: TrainConfig, tmp_path: Path) -> None:
    manifest = tmp_path / "run" / "checkpoints" / "checkpoint-4" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 0}))
    with pytest.raises(FormatVersionError, match="has checkpoint format version 0; this release reads version 1"):
        train(run_at_4)


def test_whoever_may_read_new_files_may_read_all_of_a_run(make_config, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        train(make_config({"run.steps": 3}))
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"model.safetensors", "manifest.json", "optimizer.pt"} <= {path.name for path in files}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {p.name: "0o640" for p in files}


def test_nothing_pickled_is_saved(run_at_4: TrainConfig, tmp_path: Path) -> None:
    names = {path.name for path in (tmp_path / "run" / "checkpoints" / "checkpoint-4").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.pt",
        "rng_state_0.safetensors",
        "scheduler.pt",
        "trainer_state.json",
    }
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.load(tmp_path / "run" / "checkpoints" / "checkpoint-4" / name, weights_only=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run.seed": 1}, "other settings: run.seed was 0, is 1"),
        ({"optimizer.lr": 0.5}, r"other settings: optimizer\.lr was 0\.003, is 0\.5; restore them"),
        ({"model.num_layers": 1}, r"other settings: model\.num_layers was 2, is 1; restore"),
        ({"data.held_out": 0.3}, "other settings: data was"),
        ({"run.steps": 3}, "is at step 4, past run.steps=3"),
        ({"run.resume": "never"}, "run.resume is 'never'; choose another run.folder"),
    ],
)
def test_a_run_does_not_go_on_as_another(make_config, run_at_4: TrainConfig, changes: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        train(make_config({"schedule.kind": "constant", "run.steps": 6, **changes}))


def test_resume_can_be_forbidden_and_demanded(make_config) -> None:
    with pytest.raises(CheckpointError, match=r"run\.resume is 'must' but .* holds no checkpoint"):
        train(make_config({"run.resume": "must"}))
    train(make_config({"run.steps": 3, "run.resume": "never"}))
    with pytest.raises(CheckpointError, match=r"run\.resume is 'never'"):
        train(make_config({"run.steps": 3, "run.resume": "never"}))


def test_a_finished_run_that_is_started_again_trains_nothing_and_keeps_its_model(run_at_4: TrainConfig) -> None:
    folder = Path(run_at_4.run.folder)
    before, metrics = (folder / "model.safetensors").read_bytes(), records(folder)
    again = train(run_at_4.replace(run=run_at_4.run.replace(steps=4)))
    assert (again.steps, again.seconds) == (4, 0.0)
    assert (folder / "model.safetensors").read_bytes() == before
    assert records(folder) == metrics


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_equal_one_and_go_on_exactly(make_config, tmp_path: Path) -> None:
    changes = {"model.dropout": 0.0, "schedule.kind": "constant", "run.steps": 6, "run.precision": "float32"}

    def run(folder: str, steps: int) -> subprocess.CompletedProcess[str]:
        config = make_config({**changes, "run.folder": str(tmp_path / folder), "run.steps": steps})
        config.to_file(tmp_path / "config.yaml")
        code = f"from subquad.training import *; train(TrainConfig.from_file({str(tmp_path / 'config.yaml')!r}))"
        (tmp_path / "child.py").write_text(code)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        return subprocess.run(
            [sys.executable, *launcher, str(tmp_path / "child.py")],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    for folder, steps in (("two", 6), ("parts", 4), ("parts", 6)):
        result = run(folder, steps)
        assert result.returncode == 0, result.stderr
    train(make_config({**changes, "run.folder": str(tmp_path / "one"), "batch.size": 8}))
    assert_same_model(tmp_path / "two", tmp_path / "parts")
    one, two = load_file(tmp_path / "one" / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    for name in one:
        torch.testing.assert_close(one[name], two[name])
    with pytest.raises(CheckpointError, match=r"a step had 16 windows \(processes 2 x .*, has 8 \(1 x 4 x 2\)"):
        train(make_config({**changes, "run.folder": str(tmp_path / "parts")}))


def test_what_is_no_run_is_not_overwritten(make_config, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("notes.md", "a", "b", "c"):
        (other / name).write_text("mine")
    with pytest.raises(ValueError, match=r"holds files of something else than a run \(a, b, c, \.\.\.\), which would"):
        train(make_config({"run.folder": str(other)}))
    with pytest.raises(ValueError, match=r"notes\.md' is a file; give a folder"):
        train(make_config({"run.folder": str(other / "notes.md")}))
    assert sorted(file.name for file in other.iterdir()) == ["a", "b", "c", "notes.md"]
