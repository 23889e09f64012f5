"""Several processes of one training run as forks of this one, so that what a run imports is imported once."""

import faulthandler
import gc
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard

from subquad.training import TrainConfig, run, train
from subquad.training.processes import leave
from subquad.training.run import RunResult

TEXT = "".join(f"def function_{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(60))


def fork(world: int, work: Callable[[int], None], *, seconds: float = 500.0) -> list[int]:
    """Run `work(rank)` in `world` processes that know of each other as torchrun's do; their exit statuses.

    0: well, 1: an exception, which is printed, -9: killed, by itself or because it took longer than `seconds`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gc.freeze()  # what is imported here is not collected, and so not copied, in every fork
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _child(rank, world, port, work)
        children.append(child)
    return _statuses(children, seconds)


def _child(rank: int, world: int, port: int, work: Callable[[int], None]) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    status = 1
    faulthandler.enable()  # a crash of native code says where each thread was
    try:
        work(rank)
        leave()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _statuses(children: list[int], seconds: float) -> list[int]:
    end, statuses = time.monotonic() + seconds, dict.fromkeys(children, 0)
    left = set(children)
    while left:
        for child in list(left):
            if time.monotonic() > end:
                os.kill(child, 9)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
                left.remove(child)
        time.sleep(0.02)
    return [statuses[child] for child in children]


def make_config(folder: Path, changes: dict[str, Any] | None = None) -> TrainConfig:
    """A run of float64, without dropout, in `folder`; changes as `{"run.steps": 3}`. The text lies beside it."""
    text = folder.parent / "text.py"
    if not text.exists():
        text.write_text(TEXT)
        (folder.parent / "texts").mkdir()
        for i, part in enumerate(TEXT.split("\n\n\n")):  # documents of several lengths
            (folder.parent / "texts" / f"{i}.py").write_text(part * (1 + i % 3))
    values: dict[str, Any] = {
        "model": {"dim": 16, "num_layers": 2, "num_heads": 2, "attention": "llp", "position": "sinusoidal"},
        "data": {"path": str(text), "tokenizer": "bytes", "held_out": 0.2, "cache": str(folder.parent / "cache")},
        "batch": {"length": 32, "size": 4},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup": 2, "kind": "constant"},
        "parallel": {"timeout": 60.0},
        "run": {
            "folder": str(folder),
            "steps": 6,
            "log_every": 1,
            "eval_every": 0,
            "eval_windows": 7,
            "save_every": 100,
            "threads": 1,
            "device": "cpu",
            "precision": "float32",
        },
    }
    values["model"]["options"] = {"llp": {"segment": 16}, "window": {"width": 8}}
    for key, given in (changes or {}).items():
        value = str(folder.parent / given) if key == "data.path" else given
        group, _, name = key.partition(".")
        if name:
            values.setdefault(group, {})[name] = value
        else:
            values[group] = value
    return TrainConfig.from_dict(values)


def train_in(folder: Path, changes: dict[str, Any] | None = None) -> RunResult:
    """Train in float64, without a picture."""
    run.draw_curves = lambda *args, **kwargs: None  # type: ignore[assignment]
    torch.set_default_dtype(torch.float64)
    try:
        return train(make_config(folder, changes))
    finally:
        torch.set_default_dtype(torch.float32)


def tell(folder: Path, name: str, value: Any) -> None:
    """Leave something for the test that reads the folder."""
    (folder / f"{name}.json").write_text(json.dumps(value))
