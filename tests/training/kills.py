"""Trains a configuration in forks of this process that are killed again and again: python kills.py CONFIG KILLS

Of three kills one comes at any moment from the start on, one at any moment after a save, and one inside a save. Prints
for each whether a save was cut short, how the fork ended, and the step of the newest complete checkpoint. Forks needn't
import what this process has imported.
"""

import multiprocessing
import random
import signal
import sys
import time
from pathlib import Path

import torch.utils.tensorboard  # noqa: F401 (so that no fork has to import it)

import subquad.training.loop  # noqa: F401 (so that no fork has to import it)
from subquad.training import TrainConfig, checkpoint, train


def newest_step(root):
    return max((step for step, _ in checkpoint.listing(root)), default=0)


def main():
    config, kills, draw = TrainConfig.from_file(sys.argv[1]), int(sys.argv[2]), random.Random(0)
    root = Path(config.run.folder) / "checkpoints"
    for number in range(kills):
        process = multiprocessing.get_context("fork").Process(target=train, args=(config,))
        process.start()
        saves, last = draw.randint(1, 3) if number % 3 else 0, newest_step(root)
        while saves:
            time.sleep(0.002)
            if newest_step(root) > last:
                last, saves = newest_step(root), saves - 1
        while number % 3 == 2 and not list(root.glob(".saving-*")):
            pass
        time.sleep(draw.uniform(0, (1.0, 0.2, 0.01)[number % 3]))
        process.kill()
        process.join()
        cut = "cut" if list(root.glob(".saving-*")) else "whole"
        end = "killed" if process.exitcode == -signal.SIGKILL else "ended"
        checkpoint.newest_complete(root)  # raises if there are checkpoints, and none of them is whole
        print(cut, end, newest_step(root))


if __name__ == "__main__":
    main()
