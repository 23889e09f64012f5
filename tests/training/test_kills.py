"""Training that is killed again and again, at any moment, also inside saves, ends with the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from subquad.testing import assert_exact
from subquad.training import TrainConfig, checkpoint, train
from tests.training.metrics import records

KILLS = 20
CHANGES: dict[str, Any] = {
    "model.dim": 64,
    "run.steps": 400,
    "run.save_every": 2,
    "run.keep": 3,
    "run.eval_every": 100,
    "run.log_every": 2,
    "run.precision": "float32",
    "schedule.kind": "constant",
}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def assert_same_end(one: Path, other: Path) -> None:
    weights, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert_exact(others[name], tensor, name)
    assert records(one) == records(other)
    assert not list((other / "checkpoints").glob(".*"))


def start(file: Path, log: Path, launcher: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "subquad", "train", "--config", str(file), "--run.sample_tokens", "0"],
            stdout=output,
            stderr=output,
            env=ENVIRONMENT,
        )


def step_of(root: Path) -> int:
    published = checkpoint.listing(root)
    return published[-1][0] if published else 0


def kill_in_training(process: subprocess.Popen[bytes], root: Path, steps: int) -> None:
    """Kill when the run has gone on by so many steps at least, wherever it is then."""
    until = step_of(root) + steps
    while step_of(root) < until and process.poll() is None:
        time.sleep(0.002)
    process.kill()


def kill_in_a_save(process: subprocess.Popen[bytes], root: Path, steps: int, wait: float) -> bool:
    """Kill while a checkpoint is being written; whether it was."""
    until = step_of(root) + steps
    while process.poll() is None:
        if step_of(root) >= until and list(root.glob(".saving-*")):
            time.sleep(wait)
            process.kill()
            process.wait()
            return bool(list(root.glob(".saving-*")))
    return False


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_change_no_bit(make_config, tmp_path: Path) -> None:
    alone: TrainConfig = make_config({**CHANGES, "run.folder": str(tmp_path / "alone")})
    train(alone)
    config: TrainConfig = make_config({**CHANGES, "run.folder": str(tmp_path / "killed")})
    config.to_file(tmp_path / "config.yaml")
    root, log, draw = tmp_path / "killed" / "checkpoints", tmp_path / "log", random.Random(0)
    inside = 0
    for number in range(KILLS):
        before = step_of(root)
        process = start(tmp_path / "config.yaml", log)
        if number % 2:
            inside += kill_in_a_save(process, root, draw.randint(2, 12), draw.uniform(0, 0.01))
        else:
            kill_in_training(process, root, draw.randint(2, 12))
        assert process.wait() == -signal.SIGKILL, log.read_text()
        newest = checkpoint.newest_complete(root)
        assert newest is not None
        assert step_of(root) >= before + 2, "what was saved is kept"
        for _, folder in checkpoint.listing(root):
            checkpoint.verify(folder)
    assert inside >= KILLS // 5, "some must have been killed inside a save"
    assert train(config).steps == 400
    assert_same_end(tmp_path / "alone", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_starts_again_what_was_killed(make_config, tmp_path: Path) -> None:
    """Two processes, of which one is killed; `--max-restarts` goes on from the newest checkpoint by itself."""
    changes = {**CHANGES, "run.steps": 120, "model.dropout": 0.0, "batch.size": 2, "batch.accumulation": 1}
    config: TrainConfig = make_config({**changes, "run.folder": str(tmp_path / "two")})
    config.to_file(tmp_path / "config.yaml")
    root, log = tmp_path / "two" / "checkpoints", tmp_path / "log"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "2")
    process = start(tmp_path / "config.yaml", log, launcher)
    while step_of(root) < 10 and process.poll() is None:
        time.sleep(0.01)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    assert process.wait(600) == 0, log.read_text()
    assert "going on from" in log.read_text()
    train(make_config({**changes, "run.folder": str(tmp_path / "one"), "batch.size": 4}))
    one, two = ([record["step"] for record in records(tmp_path / name)] for name in ("one", "two"))
    assert one == two
    again: TrainConfig = make_config({**changes, "run.folder": str(tmp_path / "again")})
    again.to_file(tmp_path / "again.yaml")
    assert start(tmp_path / "again.yaml", log, launcher).wait(600) == 0, log.read_text()
    assert_same_end(tmp_path / "again", tmp_path / "two")


def children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(child) for child in text.split()]
