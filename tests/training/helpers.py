"""Helpers of the training tests: settings of each task, reading runs, failing commands, changed methods."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from subquad.cli import main
from subquad.testing import assert_exact
from subquad.training import TrainConfig
from subquad.training.loop import Loop


def write_text(home: Path) -> Path:
    """Write a text file, and beside it the folder `texts` of documents of one to three dozen bytes."""
    (home / "texts").mkdir()
    for i in range(60):
        (home / "texts" / f"{i:02d}.txt").write_text(f"line {i}\n" * (1 + i * 7 % 5))
    text = "".join(f"def function_{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(24))
    (home / "text.py").write_text(text)
    return home / "text.py"


def config_of(text: Path, home: Path, *changes: dict[str, Any], folder: str = "run", **run: Any) -> TrainConfig:
    """Make the configuration of a run in `home / folder` from `changes`; `run` are settings of the group `run`."""
    values: dict[str, Any] = {
        "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "full", "dropout": 0.1},
        "data": {"path": str(text), "tokenizer": "bytes", "held_out": 0.2, "cache": str(text.parent / "cache")},
        "batch": {"length": 32, "size": 4, "accumulation": 2},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup": 1, "kind": "constant"},
        "run": {"steps": 4, "log_every": 1, "eval_every": 2, "eval_windows": 4, "save_every": 2, "trackers": []},
    }
    values["run"] |= {"folder": str(home / folder), "threads": 1, "device": "cpu", "precision": "float32"}
    merged = {key: value for change in changes for key, value in change.items()}
    if merged.get("task", "language") != "language":
        del values["data"]
    for key, value in merged.items():
        group, _, name = key.partition(".")
        if name:
            values.setdefault(group, {})[name] = value
        else:
            values[group] = dict(value) if isinstance(value, dict) else value
    values["run"] |= run
    return TrainConfig.from_dict(values)


TOY = {"examples": 40, "held_out": 21}
CLASSIFY: dict[str, Any] = {
    "task": "classify",
    "classify": TOY,
    "model.attention": "window",
    "model.init_std": 0.1,
    "batch": {"length": 20, "size": 4},
    "run.eval_windows": 10,
}
MQAR = {"name": "mqar", "pairs": 2, "symbols": 4, "examples": 50, "held_out": 21}
PROBE = {"task": "probe", "probe": MQAR, "model.attention": "window", "model.init_std": 0.1, "batch.length": 20}


def pretraining(**options: Any) -> dict[str, Any]:
    """Return the settings of a classifier with a first phase."""
    return {**CLASSIFY, "pretrain": {"kind": "denoise", "steps": 4, **options}, "run.steps": 2, "run.save_every": 1}


def perceiver(**options: Any) -> dict[str, Any]:
    """Return the settings of a Perceiver AR, which predicts only a window's last tokens."""
    given = {"latents": 9, "history": "self", "history_tokens": 12, **options}
    return {"model.attention": "perceiver_ar", "model.options": {"perceiver_ar": given}}


def records(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run without the values that a clock measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in ("seconds", "tokens_per_s")} for line in lines]


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
    training_pass, left = Loop.training_pass, [number]

    def changed(self: Loop, *args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            then()
        training_pass(self, *args, **kwargs)

    patch.setattr(Loop, "training_pass", changed)


def change_loss(patch: pytest.MonkeyPatch, steps: set[int], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the loss of every batch of some steps."""
    loss = Loop.loss

    def changed(self: Loop, *args: Any) -> torch.Tensor:
        value = loss(self, *args)
        return change(value) if self.standing.step + 1 in steps else value

    patch.setattr(Loop, "loss", changed)


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises `error`."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail
