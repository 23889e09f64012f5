"""A run small enough for a test: bytes of a short text, several epochs, dropout, accumulation."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subquad.training import RunResult, TrainConfig, train

TEXT = "".join(f"def function_{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(24))
MakeConfig = Callable[..., TrainConfig]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file, beside a folder for its prepared tokens."""
    file = tmp_path_factory.mktemp("text") / "text.py"
    file.write_text(TEXT)
    return file


def config_in(folder: Path, text: Path, changes: dict[str, Any]) -> TrainConfig:
    values: dict[str, Any] = {
        "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "full", "dropout": 0.1},
        "data": {"path": str(text), "tokenizer": "bytes", "held_out": 0.2, "cache": str(text.parent / "cache")},
        "batch": {"length": 32, "size": 4, "accumulation": 2},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup": 1, "kind": "constant"},
        "run": {
            "folder": str(folder),
            "steps": 4,
            "log_every": 1,
            "eval_every": 2,
            "eval_windows": 4,
            "save_every": 2,
            "threads": 1,
            "device": "cpu",
            "precision": "float32",
            "trackers": [],
        },
    }
    if changes.get("task", "language") != "language":
        del values["data"]
    for key, value in changes.items():
        group, _, name = key.partition(".")
        if name:
            values.setdefault(group, {})[name] = value
        else:
            values[group] = value
    return TrainConfig.from_dict(values)


@pytest.fixture
def make_config(tmp_path: Path, text: Path) -> MakeConfig:
    """Make a configuration from changes, as `{"run.steps": 3}` or `{"task": "probe"}`; the run is `tmp_path / "run"`."""
    return lambda changes=None: config_in(tmp_path / "run", text, changes or {})


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> RunResult:
    """A finished run of `make_config()`: four steps, with the checkpoints 2 and 4. Don't change its folder."""
    return train(config_in(tmp_path_factory.mktemp("finished") / "run", text, {}))


@pytest.fixture
def run_at_4(finished: RunResult, tmp_path: Path) -> Path:
    """A copy of the finished run where `make_config` has its run."""
    return Path(shutil.copytree(finished.folder, tmp_path / "run"))
