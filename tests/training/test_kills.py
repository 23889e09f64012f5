"""Training that is killed again and again, at any moment, also inside saves, ends with the same bits."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
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
    "run.save_every": 1,
    "run.keep": 3,
    "run.eval_every": 100,
    "run.log_every": 5,
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_change_no_bit(make_config, tmp_path: Path) -> None:
    config: TrainConfig = make_config({**CHANGES, "run.folder": str(tmp_path / "killed")})
    config.to_file(tmp_path / "config.yaml")
    script = Path(__file__).with_name("kills.py")
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "config.yaml"), str(KILLS)],
        capture_output=True,
        text=True,
        timeout=1200,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == KILLS
    assert {cut for _, cut, _ in lines} == {"cut", "whole"}, result.stdout + result.stderr
    steps = [int(newest.rpartition("-")[2]) for _, _, newest in lines]
    assert all(before < after for before, after in pairwise(steps)), "what was saved is kept"
    root = tmp_path / "killed" / "checkpoints"
    for _, folder in checkpoint.listing(root):
        checkpoint.verify(folder)
    train(make_config({**CHANGES, "run.steps": steps[-1] + 5, "run.folder": str(tmp_path / "alone")}))
    train(config.replace(run=config.run.replace(steps=steps[-1] + 5)))
    assert_same_end(tmp_path / "alone", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_starts_again_what_was_killed(make_config, tmp_path: Path) -> None:
    """Two processes, of which one is killed; `--max-restarts` goes on from the newest checkpoint by itself."""
    changes = {
        **CHANGES,
        "run.steps": 40,
        "run.save_every": 2,
        "model.dropout": 0.0,
        "batch.size": 2,
        "batch.accumulation": 1,
    }
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
    again: TrainConfig = make_config({**changes, "run.folder": str(tmp_path / "again")})
    again.to_file(tmp_path / "again.yaml")
    assert start(tmp_path / "again.yaml", log, launcher).wait(600) == 0, log.read_text()
    assert_same_end(tmp_path / "again", tmp_path / "two")


def children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(child) for child in text.split()]
