"""What goes wrong in a run of one process: full disks, memory, numbers that are not finite. See test_distributed.py."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from subquad.testing import assert_exact
from subquad.training import TrainConfig, checkpoint, train
from subquad.training.config import ParallelConfig
from subquad.training.errors import CheckpointError, NonFiniteError, SaveError, StepMemoryError
from subquad.training.loop import Loop
from subquad.training.memory import explained, free_bytes, is_out_of_memory, largest_fit, part_bytes
from subquad.training.saving import Checkpoints
from subquad.training.task import weights_file
from subquad.training.tasks_text import LanguageTask
from tests.training.metrics import records

STEADY = {"schedule.kind": "constant", "run.eval_every": 0}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    for name, tensor in weights(one).items():
        assert_exact(weights(other)[name], tensor, name)


def poison_steps(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of some steps infinite."""
    loss = Loop.loss

    def poisoned(self: Loop, *args: Any) -> torch.Tensor:
        value = loss(self, *args)
        return value * torch.inf if self.standing.step + 1 in steps else value

    monkeypatch.setattr(Loop, "loss", poisoned)


def test_a_step_that_is_not_finite_is_left_out_and_counted(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {
        **STEADY,
        "run.steps": 6,
        "run.log_every": 1,
        "run.save_every": 1,
        "run.keep": 9,
        "run.nonfinite": "skip",
    }
    poison_steps(monkeypatch, {3, 4})
    result = train(make_config(changes))
    assert (result.steps, result.skipped) == (6, 2)
    assert re.search(
        r"the loss is inf at step 3, in the batch of windows \[.*\]; the step is left out \(1 so", caplog.text
    )
    lines = records(result.folder)
    assert [(line["step"], line.get("skipped", 0)) for line in lines] == [(1, 0), (2, 0), (5, 2), (6, 2)]
    root = result.folder / "checkpoints"
    assert_same_weights(root / "checkpoint-2", root / "checkpoint-4")
    states = [torch.load(root / f"checkpoint-{step}" / "optimizer.pt", weights_only=True)["state"] for step in (2, 4)]
    assert states[0].keys() == states[1].keys()
    for one, other in zip(states[0].values(), states[1].values(), strict=True):
        for name, value in one.items():
            assert_exact(other[name], value, name)


def test_the_schedule_goes_on_while_steps_are_left_out(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"run.steps": 6, "run.log_every": 1, "run.eval_every": 0}
    rates = [{line["step"]: line["lr"] for line in records(train(make_config(changes)).folder)}]
    poison_steps(monkeypatch, {3})
    config = make_config({**changes, "run.nonfinite": "skip"})
    config = config.replace(run=config.run.replace(folder=f"{config.run.folder} skips"))
    rates.append({line["step"]: line["lr"] for line in records(train(config).folder)})
    assert rates[0].pop(3)
    assert rates[0] == rates[1]


def test_many_such_steps_in_a_row_end_the_run_and_a_resume_keeps_count(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**STEADY, "run.nonfinite": "skip", "run.nonfinite_limit": 3, "run.save_every": 4}
    poison_steps(monkeypatch, {1, 3, 4, 5, 6})
    with pytest.raises(
        NonFiniteError, match=r"the loss is inf at step 5.*nonfinite_limit=3 steps in a row.*\(4 in all\)"
    ):
        train(make_config({**changes, "run.steps": 8}))
    saved = json.loads((tmp_path / "run" / "checkpoints" / "checkpoint-4" / "skipped.json").read_text())
    assert saved == {"total": 3, "in_a_row": 2}
    with pytest.raises(
        NonFiniteError, match=r"at step 5.*3 steps in a row.*\(4 in all\); nothing was saved since check"
    ):
        train(make_config({**changes, "run.steps": 8}))
    monkeypatch.undo()
    assert train(make_config({**changes, "run.steps": 8})).skipped == 3


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within the block no file can grow past `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("part", ["write_weights", "write_optimizer"])
def test_a_save_that_finds_no_room_leaves_nothing_and_the_older_ones(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    changes = {**STEADY, "run.steps": 6, "run.save_every": 3}
    train(make_config({**changes, "run.folder": str(tmp_path / "left alone")}))
    save = getattr(Checkpoints, part)

    def without_room(self: Checkpoints, folder: Path, *args: Any) -> None:
        if folder.name.endswith("checkpoint-3"):
            save(self, folder, *args)
            return
        with largest_file(5_000):
            save(self, folder, *args)

    monkeypatch.setattr(Checkpoints, part, without_room)
    with pytest.raises(
        SaveError, match=r"checkpoint of step 6 could not be written.*Nothing of it is left.*checkpoint-3"
    ):
        train(make_config(changes))
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-3"]
    assert train(make_config(changes)).steps == 6
    assert_same_weights(tmp_path / "left alone", tmp_path / "run")


def test_a_final_model_that_finds_no_room_is_not_left_half(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Checkpoints.write_weights

    def full(self: Checkpoints, folder: Path, *args: Any) -> None:
        save(self, folder, *args)
        if folder.name == ".saving-model":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpoints, "write_weights", full)
    with pytest.raises(SaveError, match=r"the final model could not be written.*No space left.*checkpoint-3"):
        train(make_config({"run.steps": 3, "run.eval_every": 0}))
    assert not {".saving-model", "model.safetensors", "config.json"} & {
        path.name for path in (tmp_path / "run").iterdir()
    }


def test_other_errors_of_a_save_are_not_called_a_full_disk(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Checkpoints, *args: Any) -> None:
        raise RuntimeError("a mistake in the program")

    monkeypatch.setattr(Checkpoints, "write_random_numbers", fail)
    with pytest.raises(RuntimeError, match="a mistake in the program"):
        train(make_config({"run.steps": 3}))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_a_step_that_needs_too_much_memory_says_what_was_tried_and_what_fits(
    make_config, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(Loop, "loss", fail)
    with pytest.raises(StepMemoryError) as caught:
        train(make_config({"run.steps": 3}))
    text = str(caught.value)
    assert text.startswith("out of memory in a step of batch.size=4 windows of batch.length=32 tokens (")
    assert "batch.size=2 with batch.accumulation=4 sees the same windows in each step and should fit" in text
    assert "run.activation_checkpointing=true" in text
    assert caught.value.__cause__ is error


def test_other_errors_of_a_step_are_left_as_they_are(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(Loop, "loss", fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train(make_config({"run.steps": 3}))


def test_what_would_fit_is_the_largest_equal_part() -> None:
    assert [largest_fit(12, 1, free) for free in (0.5, 1, 2.5, 5, 100)] == [None, 1, 2, 4, 6]
    assert largest_fit(1, 1, 100) is None
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_estimate_is_the_models_own(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    config: TrainConfig = make_config({"model.dropout": 0.0})
    account = LanguageTask.window_bytes
    need = part_bytes(config, 32, account)
    assert need is not None
    longer = part_bytes(config, 64, account)
    assert longer is not None
    assert longer > need
    assert part_bytes(config.replace(parallel=ParallelConfig(context=2)), 32, account) == need / 2
    assert part_bytes(make_config({"run.activation_checkpointing": True}), 32, account) is None
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert free > 0

    def texts(left: float | None, config: TrainConfig) -> str:
        monkeypatch.setattr("subquad.training.memory.free_bytes", lambda device: left)
        return str(explained(MemoryError(), config, torch.device("cpu"), account))

    assert "batch.size=2 with batch.accumulation=4 sees the same windows in each step and should fit" in texts(
        3 * need, config
    )
    assert "batch.size=1 with batch.accumulation=8" in texts(need, config)
    assert "Fewer windows at a time do not help: try run.activation_checkpointing=true, a shorter" in texts(0, config)
    assert "true, batch.length=16, of which a window should fit, or more" in texts(need / 1.5, config)
    assert "batch.size=2 with batch.accumulation=4 sees the same windows in each step and needs less" in texts(
        None, config
    )
    alone = make_config({"batch.size": 1, "run.activation_checkpointing": True})
    assert "MemoryError). Try a shorter batch.length" in texts(None, alone)


@pytest.mark.slow
def test_a_process_with_little_memory_says_what_fits(make_config, tmp_path: Path) -> None:
    make_config({"batch.length": 128, "batch.size": 4096, "model.dim": 64}).to_file(tmp_path / "config.yaml")
    code = (
        "import resource, torch, subquad.training.loop, torch.utils.tensorboard\n"
        "from subquad.cli import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))\n"
        f"raise SystemExit(main(['train', '--config', {str(tmp_path / 'config.yaml')!r}]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 1, result.stderr
    assert "error: out of memory in a step of batch.size=4096 windows of batch.length=128 tokens" in result.stderr
    assert re.search(r"batch.size=\d+ with batch.accumulation=\d+ sees the same windows", result.stderr)


@pytest.mark.parametrize("attention", ["llp", "latte"])
def test_activations_that_are_computed_again_change_no_bit(make_config, tmp_path: Path, attention: str) -> None:
    changes = {**STEADY, "run.steps": 3, "model.attention": attention, "model.position": "sinusoidal"}
    folders = [tmp_path / "kept", tmp_path / "again"]
    for folder, again in zip(folders, (False, True), strict=True):
        result = train(make_config({**changes, "run.folder": str(folder), "run.activation_checkpointing": again}))
        assert result.model.model.gradient_checkpointing is again
    assert_same_weights(*folders)


def settings(**changes: Any) -> dict[str, Any]:
    batch = {"length": 32, "size": 4, "accumulation": 2}
    return {"batch": batch, "processes": 2, **changes}


@pytest.mark.parametrize(("processes", "size", "accumulation"), [(1, 16, 1), (4, 2, 2), (8, 2, 1), (16, 1, 1)])
def test_a_run_goes_on_where_a_step_has_as_many_windows(processes: int, size: int, accumulation: int) -> None:
    batch = {"length": 32, "size": size, "accumulation": accumulation}
    checkpoint.check_settings({"step": 3, "settings": settings()}, settings(batch=batch, processes=processes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"processes": 1},
            r"16 windows \(processes 2 x batch\.size 4 x batch\.accumulation 2\), has 8 \(1 x 4 x 2\): with "
            r"1 processes give batch\.size=4 and batch\.accumulation=4",
        ),
        ({"processes": 4}, r"has 32 \(4 x 4 x 2\): with 4 processes give batch\.size=4 and batch\.accumulation=1"),
        ({"processes": 3}, r"which 3 processes can't make: start 1, 2, 4, 8 or 16"),
        ({"batch": {"length": 64, "size": 4, "accumulation": 2}}, r"batch\.length was 32, is 64"),
    ],
)
def test_else_the_error_says_what_would_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint of step 3 was made by other settings: .*{message}"):
        checkpoint.check_settings({"step": 3, "settings": settings()}, settings(**changes))


def test_other_random_numbers_after_a_change_of_processes_are_announced(
    make_config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint of one process, made to look like that of two."""
    changes = {**STEADY, "run.steps": 3}
    for name, dropout in (("draws", 0.1), ("draws nothing", 0.0)):
        config = {**changes, "model.dropout": dropout, "run.folder": str(tmp_path / name)}
        train(make_config(config))
        made = tmp_path / name / "checkpoints" / "checkpoint-3"
        draft = made.rename(made.with_name("draft"))
        (draft / "rng_state_1.safetensors").write_bytes((draft / "rng_state_0.safetensors").read_bytes())
        settings = checkpoint.read_manifest(draft)["settings"]
        (draft / "manifest.json").unlink()
        checkpoint.publish(draft, made, step=3, settings=settings)
        caplog.clear()
        assert train(make_config({**config, "run.steps": 4})).steps == 4
        assert ("checkpoint-3 was made by 2 processes and 1 go on" in caplog.text) is bool(dropout)


def test_a_checkpoint_whose_successor_never_came_is_put_back(make_config, tmp_path: Path) -> None:
    train(make_config({**STEADY, "run.steps": 3}))
    root = tmp_path / "run" / "checkpoints"
    (root / "checkpoint-3").rename(root / ".trash-checkpoint-3")
    checkpoint.sweep(root)
    assert [path.name for path in root.iterdir()] == ["checkpoint-3"]
    assert checkpoint.newest_complete(root) == root / "checkpoint-3"


def test_a_checkpoint_without_weights_is_refused_by_the_trainer(make_config, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        weights_file(tmp_path)
