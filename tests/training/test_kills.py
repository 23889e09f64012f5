"""Training that is killed again and again, at any moment, also inside saves, ends with the same bits.

`SUBQUAD_KILLS` sets how often.
"""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from subquad.checksums import CHECKSUMS
from subquad.training import checkpoint, train
from tests.training.helpers import ENVIRONMENT, assert_same_run, python, read_json, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("SUBQUAD_KILLS", "200"))
MODEL, RUN = {"model.dim": 64}, {"save_every": 1, "keep": 3, "eval_every": 100, "log_every": 5}


def test_two_hundred_kills_change_no_bit(make_config, tmp_path):
    make_config(MODEL, steps=10 * KILLS, folder="killed", **RUN).to_file(tmp_path / "config.yaml")
    result = python(Path(__file__).with_name("kills.py"), tmp_path / "config.yaml", KILLS, timeout=3000)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == KILLS
    assert {(cut, end) for cut, end, _ in lines} == {("cut", "killed"), ("whole", "killed")}, lines
    steps = [int(newest) for _, _, newest in lines]
    assert all(before <= after for before, after in pairwise(steps)), "what was saved is kept"
    assert len(set(steps)) > KILLS // 2
    for _, folder in checkpoint.listing(tmp_path / "killed" / "checkpoints"):
        checkpoint.verify(folder)
    alone, killed = (train(make_config(MODEL, steps=steps[-1] + 5, folder=name, **RUN)) for name in ("alone", "killed"))
    assert_same_run(alone.folder, killed.folder)
    assert read_json(alone.folder / CHECKSUMS) == read_json(killed.folder / CHECKSUMS)
    steps_of(killed.folder / "checkpoints")
    cuts = sum(cut == "cut" for cut, _, _ in lines)
    sys.stdout.write(f"{KILLS} kills, {cuts} of them inside a save; {steps[-1] + 5} steps, the same bits\n")


def test_torchrun_starts_again_what_was_killed(make_config, tmp_path):
    """Two processes, of which one is killed; `--max-restarts` resumes from the newest checkpoint by itself."""
    split = {"model.dropout": 0.0, "batch.size": 2, "batch.accumulation": 1}
    run = {**RUN, "steps": 40, "save_every": 2}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "2")
    log = tmp_path / "log"

    def start(name):
        file = tmp_path / f"{name}.yaml"
        make_config(MODEL, split, folder=name, **run).to_file(file)
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
