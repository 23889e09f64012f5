"""Trains, for each pair of arguments CONFIG PLACE, in a process that SIGKILLs itself at the place.

Places: `step:N` (in the N-th forward pass), `half:NAME:N` (half of the file NAME of the N-th save is written),
`rename:N` (just before the N-th checkpoint gets its name). Prints for each the signal that ended the process and the
newest complete checkpoint. The processes are forks of this one, so that what a run imports is imported once.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard

from subquad.training import TrainConfig, checkpoint, train
from subquad.training.loop import Loop
from subquad.training.saving import Checkpoints


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


def die_in_step(count: int) -> None:
    compute, tick = Loop.training_pass, after(count, die)

    def training_pass(self: Loop, *args: Any, **kwargs: Any) -> None:
        tick()
        compute(self, *args, **kwargs)

    Loop.training_pass = training_pass  # type: ignore[method-assign]


def die_before_rename(count: int) -> None:
    replace, tick = checkpoint.replace_folder, after(count, die)

    def replace_folder(source: Path, target: Path) -> None:
        tick()
        replace(source, target)

    checkpoint.replace_folder = replace_folder  # type: ignore[assignment]


def die_with_half(file: Path, data: bytes) -> None:
    file.write_bytes(data[: len(data) // 2])
    die()


def die_in_file(name: str, count: int) -> None:
    """Die when the file `name` of the `count`-th save is half written."""
    left = [count]

    def is_it(file: Path) -> bool:
        left[0] -= file.name == name
        return file.name == name and left[0] == 0

    write, save_model, save = checkpoint.write_atomically, Checkpoints.write_weights, torch.save

    def write_half(path: Path, data: bytes) -> None:
        if is_it(path):
            die_with_half(path.with_name(f"{name}.tmp"), data)  # it is written so, then renamed
        write(path, data)

    def save_half_model(self: Checkpoints, folder: Path, *args: Any) -> None:
        save_model(self, folder, *args)
        if is_it(weights := folder / "model.safetensors"):
            die_with_half(weights, weights.read_bytes())

    def save_half(values: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        save(values, target, *args, **kwargs)
        if is_it(Path(target)):
            die_with_half(Path(target), Path(target).read_bytes())

    checkpoint.write_atomically = write_half  # type: ignore[assignment]
    Checkpoints.write_weights = save_half_model  # type: ignore[method-assign]
    torch.save = save_half


def run(config: Path, place: str) -> None:
    """Train until the place."""
    kind, *rest = place.split(":")
    count = int(rest[-1])
    if kind == "step":
        die_in_step(count)
    elif kind == "half":
        die_in_file(rest[0], count)
    else:
        die_before_rename(count)
    train(TrainConfig.from_file(config))


def main() -> None:
    for config, place in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        child = os.fork()
        if child == 0:
            try:
                run(Path(config), place)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "by itself"
        newest = checkpoint.newest_complete(Path(TrainConfig.from_file(config).run.folder) / "checkpoints")
        sys.stdout.write(f"{ended} {newest.name if newest else 'none'}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
