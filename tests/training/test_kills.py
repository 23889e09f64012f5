"""Training that is killed again and again, at any moment, also inside saves, ends with the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from subquad.training import checkpoint, train
from tests.training.helpers import assert_same_run, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = 20
CHANGES: dict[str, Any] = {
    "model.dim": 64,
    "run.steps": 400,
    "run.save_every": 1,
    "run.keep": 3,
    "run.eval_every": 100,
    "run.log_every": 5,
}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def kill(*words):
    """Run kills.py; return the words of each line that it prints."""
    script = Path(__file__).with_name("kills.py")
    command = [sys.executable, str(script), *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    sys.stderr.write(result.stderr)
    return [line.split() for line in result.stdout.splitlines()]


SAVES = [3, 4, 6, 8, 9, 10]  # 4 and 8 for their best loss
FILES = ["model.safetensors", "optimizer.pt", "manifest.json"]


def draw_places(seed):
    """Draw where to kill a run of ten steps of two forward passes: in a step, in a file, before a rename, in any order.

    Return also the newest complete checkpoint after each: what is drawn depends on where the last process ended.
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


def test_sigkill_in_steps_and_inside_saves_changes_no_bit(make_config, tmp_path):
    changes = {"run.steps": 10, "run.save_every": 3, "run.eval_every": 4}
    train(make_config({**changes, "run.folder": str(tmp_path / "left alone")}))
    words, expected, configs = ["at"], [], []
    for seed in range(len(FILES)):
        file = tmp_path / f"{seed}.yaml"
        configs.append(make_config({**changes, "run.folder": str(tmp_path / f"killed {seed}")}))
        configs[-1].to_file(file)
        for place, newest in zip(*draw_places(seed), strict=True):
            words += [str(file), place]
            expected.append(["SIGKILL", newest])
    assert kill(*words) == expected, words
    for config in configs:
        folder = train(config).folder
        assert_same_run(tmp_path / "left alone", folder)
        steps_of(folder / "checkpoints")


def test_twenty_kills_change_no_bit(make_config, tmp_path):
    config = make_config({**CHANGES, "run.folder": str(tmp_path / "killed")})
    config.to_file(tmp_path / "config.yaml")
    lines = kill("often", tmp_path / "config.yaml", KILLS)
    assert len(lines) == KILLS
    assert {cut for _, cut, _ in lines} == {"cut", "whole"}, lines
    steps = [int(newest.rpartition("-")[2]) for _, _, newest in lines]
    assert all(before < after for before, after in pairwise(steps)), "what was saved is kept"
    root = tmp_path / "killed" / "checkpoints"
    for _, folder in checkpoint.listing(root):
        checkpoint.verify(folder)
    train(make_config({**CHANGES, "run.steps": steps[-1] + 5, "run.folder": str(tmp_path / "alone")}))
    train(config.replace(run=config.run.replace(steps=steps[-1] + 5)))
    assert_same_run(tmp_path / "alone", tmp_path / "killed")
    steps_of(root)


def test_torchrun_starts_again_what_was_killed(make_config, tmp_path):
    """Two processes, of which one is killed; `--max-restarts` resumes from the newest checkpoint by itself."""
    split = {"model.dropout": 0.0, "batch.size": 2, "batch.accumulation": 1}
    changes = {**CHANGES, **split, "run.steps": 40, "run.save_every": 2}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "2")
    log = tmp_path / "log"

    def start(name):
        file = tmp_path / f"{name}.yaml"
        make_config({**changes, "run.folder": str(tmp_path / name)}).to_file(file)
        command = [sys.executable, *launcher, "-m", "subquad", "train", "--config", str(file), "--run.sample_tokens=0"]
        with log.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT)

    process = start("killed")
    while len(found := checkpoint.listing(tmp_path / "killed" / "checkpoints")) < 2 or found[-1][0] < 10:
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert process.wait(600) == 0, log.read_text()
    assert "resuming from" in log.read_text()
    assert start("alone").wait(600) == 0, log.read_text()
    assert_same_run(tmp_path / "alone", tmp_path / "killed")
