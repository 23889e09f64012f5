"""Trains in forks of this process that are killed, so that what a run imports is imported once.

`python kills.py at CONFIG PLACE CONFIG PLACE ...`: each fork trains its configuration and kills itself at its place:
`step:N` (in forward pass N), `half:NAME:N` (half of the file NAME of save N is written), `rename:N` (just before
checkpoint N gets its name). Prints for each the signal that ended it and the newest complete checkpoint.

`python kills.py often CONFIG KILLS`: forks train one configuration and are killed from here, in the first half of the
kills at random moments, in the second half inside saves. Prints for each where it was wanted, whether a save was cut
short, and the newest complete checkpoint.
"""

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard

from subquad.training import TrainConfig, checkpoint, train
from subquad.training.loop import Loop
from subquad.training.saving import Checkpoints


def root_of(config: Path) -> Path:
    return Path(TrainConfig.from_file(config).run.folder) / "checkpoints"


def newest_name(config: Path) -> str:
    newest = checkpoint.newest_complete(root_of(config))
    return newest.name if newest else "none"


def start(config: Path, place: str = "") -> int:
    child = os.fork()
    if child == 0:
        try:
            if place:
                die_at(place)
            train(TrainConfig.from_file(config))
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # it was to be killed
    return child


def ended(child: int) -> str:
    _, status = os.waitpid(child, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "by itself"


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


# --- at a place


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(place: str) -> None:
    kind, *names, count = place.split(":")
    if kind == "step":
        before(Loop, "training_pass", int(count))
    elif kind == "rename":
        before(checkpoint, "replace_folder", int(count))
    else:
        die_in_file(names[0], int(count))


def before(owner: Any, name: str, count: int) -> None:
    """Die before call `count` of `owner.name`."""
    call, left = getattr(owner, name), [count]

    def changed(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            die()
        return call(*args, **kwargs)

    setattr(owner, name, changed)


def die_in_file(name: str, count: int) -> None:
    """Die when the file `name` of save `count` is half written."""
    left = [count]

    def halve(wanted: Path, written: Path, data: bytes | None = None) -> None:
        left[0] -= wanted.name == name
        if wanted.name == name and left[0] == 0:
            data = written.read_bytes() if data is None else data
            written.write_bytes(data[: len(data) // 2])
            die()

    def after(owner: Any, call: str, file_of: Callable[..., Path]) -> None:
        real = getattr(owner, call)

        def changed(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            halve(file_of(*args), file_of(*args))

        setattr(owner, call, changed)

    after(torch, "save", lambda values, target: Path(target))
    after(Checkpoints, "write_weights", lambda self, folder, weights: folder / "model.safetensors")
    write = checkpoint.write_atomically

    def write_half(path: Path, data: bytes) -> None:
        halve(path, path.with_name(f"{path.name}.tmp"), data)  # it is written so, then renamed
        write(path, data)

    checkpoint.write_atomically = write_half  # type: ignore[assignment]


# --- often


def kill_often(config: Path, kills: int) -> None:
    draw, root = random.Random(0), root_of(config)

    def step_of() -> int:
        published = checkpoint.listing(root)
        return published[-1][0] if published else 0

    for number in range(kills):
        child, saves, last = start(config), draw.randint(1, 3), step_of()
        while saves:
            time.sleep(0.002)
            if step_of() > last:
                last, saves = step_of(), saves - 1
        if number < kills // 2:
            time.sleep(draw.uniform(0, 0.2))
        else:
            while not list(root.glob(".saving-*")):
                pass
            time.sleep(draw.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        end, newest = ended(child), newest_name(config)
        cut = "cut" if list(root.glob(".saving-*")) else "whole"
        say("anywhere" if number < kills // 2 else "inside", cut if end == "SIGKILL" else end, newest)


if __name__ == "__main__":
    if sys.argv[1] == "often":
        kill_often(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        for config, place in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
            say(ended(start(Path(config), place)), newest_name(Path(config)))
