"""A run small enough for a test: bytes of a short text, several epochs, dropout, accumulation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subquad.training import TrainConfig

TEXT = "".join(f"def function_{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(24))


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., TrainConfig]:
    """Make a configuration from changes, as `{"run.steps": 3}`; the run lives in `tmp_path / "run"`."""

    def make(changes: dict[str, Any] | None = None) -> TrainConfig:
        text = tmp_path / "text.py"
        if not text.exists():
            text.write_text(TEXT)
        values: dict[str, Any] = {
            "model": {
                "dim": 16,
                "num_layers": 2,
                "num_heads": 2,
                "attention": "llp",
                "options": {"llp": {"segment": 16}},
                "dropout": 0.1,
            },
            "data": {
                "path": str(text),
                "tokenizer": "bytes",
                "held_out": 0.2,
                "cache": str(tmp_path / "cache"),
            },
            "batch": {"length": 32, "size": 4, "accumulation": 2},
            "optimizer": {"lr": 3e-3},
            "schedule": {"warmup": 2},
            "run": {
                "folder": str(tmp_path / "run"),
                "steps": 10,
                "log_every": 2,
                "eval_every": 4,
                "eval_windows": 4,
                "save_every": 3,
                "threads": 1,
                "device": "cpu",
            },
        }
        for key, value in (changes or {}).items():
            group, name = key.split(".", 1)
            values[group][name] = value
        return TrainConfig.from_dict(values)

    return make
