"""Trains the configuration again and again in forks that are killed from outside: python kills.py CONFIG KILLS.

The first half of the kills comes at random moments, the second inside saves. Prints a line for each: where it was
wanted, whether a save was cut short, and the newest whole checkpoint.
"""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch.utils.tensorboard  # noqa: F401 (so that no fork has to import it)

import subquad.training.loop  # noqa: F401 (so that no fork has to import it)
from subquad.training import TrainConfig, checkpoint, train


def step_of(root: Path) -> int:
    published = checkpoint.listing(root)
    return published[-1][0] if published else 0


def start(config: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            train(TrainConfig.from_file(config))
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # it was to be killed
    return child


def wait_for_saves(root: Path, count: int) -> None:
    """Wait until the run has gone on by so many checkpoints."""
    last = step_of(root)
    while count:
        time.sleep(0.002)
        if step_of(root) > last:
            last, count = step_of(root), count - 1


def main() -> None:
    config, kills, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)
    root = Path(TrainConfig.from_file(config).run.folder) / "checkpoints"
    for number in range(kills):
        child = start(config)
        wait_for_saves(root, draw.randint(1, 3))
        if number < kills // 2:
            time.sleep(draw.uniform(0, 0.2))
        else:
            while not list(root.glob(".saving-*")):
                pass
            time.sleep(draw.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        newest = checkpoint.newest_complete(root)
        where = "anywhere" if number < kills // 2 else "inside"
        cut = "cut" if list(root.glob(".saving-*")) else "whole"
        sys.stdout.write(f"{where} {cut if killed else 'ended by itself'} {newest.name if newest else 'none'}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
