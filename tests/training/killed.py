"""Trains the configuration in argv[1] and kills this very process with SIGKILL at the place that argv[2] names.

Places: `step:N` (in the N-th forward pass), `half:NAME:N` (half of the file NAME of the N-th save is written),
`rename:N` (just before the N-th checkpoint gets its name).
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from subquad.training import TrainConfig, checkpoint, train
from subquad.training.trainer import SubquadTrainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(count: int, then: Callable[[], None]) -> Callable[[], None]:
    """A function whose `count`-th call calls `then`."""
    left = [count]

    def call() -> None:
        left[0] -= 1
        if left[0] == 0:
            then()

    return call


def main() -> None:
    kind, *rest = sys.argv[2].split(":")
    count = int(rest[-1])
    if kind == "step":
        step, tick = SubquadTrainer.training_step, after(count, die)

        def training_step(self: SubquadTrainer, *args: Any, **kwargs: Any) -> Any:
            tick()
            return step(self, *args, **kwargs)

        SubquadTrainer.training_step = training_step  # type: ignore[method-assign]
    elif kind == "half":
        save = torch.save

        def cut(target: Path) -> Callable[[], None]:
            def half() -> None:
                data = target.read_bytes()
                target.write_bytes(data[: len(data) // 2])
                die()

            return half

        seen: list[Path] = []

        def save_half(values: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            save(values, target, *args, **kwargs)
            if Path(target).name == rest[0]:
                seen.append(Path(target))
                if len(seen) == count:
                    cut(Path(target))()

        torch.save = save_half
    else:
        replace, tick = checkpoint.replace_folder, after(count, die)

        def replace_folder(source: Path, target: Path) -> None:
            tick()
            replace(source, target)

        checkpoint.replace_folder = replace_folder  # type: ignore[assignment]
    train(TrainConfig.from_file(sys.argv[1]))


if __name__ == "__main__":
    main()
