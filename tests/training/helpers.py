"""Helpers of the training tests: reading and comparing runs, failing commands, changed methods."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from subquad.cli import main
from subquad.testing import assert_exact
from subquad.training import TrainConfig
from subquad.training.loop import Loop, StopSignal
from subquad.training.progress import CHECKSUM

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def python(*words: object, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` with the paths of this process."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, **options)


def records(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run without the values that a clock measured, and their checksums."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in ("seconds", "tokens_per_s", CHECKSUM)} for line in lines]


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def assert_same_weights(one: Path, other: Path, file: str = "model.safetensors") -> None:
    weights, others = load_file(one / file), load_file(other / file)
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert_exact(others[name], tensor, name)


def assert_same_run(one: Path, other: Path) -> None:
    assert_same_weights(one, other)
    assert records(one) == records(other)


def steps_of(root: Path) -> list[int]:
    """Return the steps of the checkpoints in `root`; fail if a save or rotation left anything behind."""
    assert not list(root.glob(".*"))
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in root.iterdir())


def forget(folder: Path, *steps: int) -> None:
    """Delete the final model and the checkpoints of some steps."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    for step in steps:
        shutil.rmtree(folder / "checkpoints" / f"checkpoint-{step}")


def train_by_command(config: TrainConfig) -> Path:
    """Train by `subquad train` and return the run's folder."""
    folder = Path(config.run.folder)
    config.to_file(folder.with_suffix(".yaml"))
    assert main(["train", "--config", str(folder.with_suffix(".yaml"))]) == 0
    return folder


def failed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the message of a command that ends with status 2 and without a traceback."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-2]


def before_pass(patch: pytest.MonkeyPatch, number: int, then: Callable[[], Any]) -> None:
    """Call `then` before forward pass `number` (from 1)."""
    training_pass, passes = Loop.training_pass, itertools.count(1)

    def changed(self: Loop, *args: Any, **kwargs: Any) -> None:
        if next(passes) == number:
            then()
        training_pass(self, *args, **kwargs)

    patch.setattr(Loop, "training_pass", changed)


def change_loss(patch: pytest.MonkeyPatch, steps: set[int], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the loss of every batch of some steps."""
    loss = Loop.loss

    def changed(self: Loop, *args: Any) -> torch.Tensor:
        value = loss(self, *args)
        return change(value) if self.state.step + 1 in steps else value

    patch.setattr(Loop, "loss", changed)


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises `error`."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def stop_at_once(patch):
    """Make every run believe that a signal arrived before its first step, after which it ends."""
    patch.setattr(StopSignal, "__enter__", lambda self: setattr(self, "received", True) or self)
