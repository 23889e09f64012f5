"""Configurations of tiny runs, and the settings of each task."""

from pathlib import Path
from typing import Any

from subquad.training import TrainConfig


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
