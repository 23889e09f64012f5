"""Runs over several processes, for the tests that read their folders afterwards: python cases.py FOLDER NAME

Processes are forks of this one, so that what a run imports is imported once.
"""

import errno
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import subquad.hf.model
import subquad.training.sharding  # noqa: F401 (so that no fork has to import it)
from subquad.training import TrainConfig, run, train
from subquad.training.config import ParallelConfig
from subquad.training.loop import Loop
from subquad.training.processes import join, leave
from subquad.training.run import RunResult
from subquad.training.saving import Checkpoints
from tests.training.helpers import config_of, write_text

BASE: dict[str, Any] = {
    "model": {"dim": 16, "num_layers": 2, "num_heads": 2, "attention": "llp", "position": "sinusoidal"},
    "model.options": {"llp": {"segment": 16}, "window": {"width": 8}},
    "batch": {"length": 32, "size": 4},
    "schedule": {"warmup": 2, "kind": "constant"},
    "parallel.timeout": 60.0,
    "run.steps": 6,
    "run.eval_every": 0,
    "run.eval_windows": 7,
    "run.save_every": 100,
}
MECHANISMS = ("llp", "latte", "linear", "elita", "window", "full")
STACKS: dict[str, dict[str, Any]] = {
    "perceiver": {"model.attention": "perceiver_ar", "model.options": {"perceiver_ar": {"latents": 8}}},
    "performer": {"model.attention": "performer", "model.options": {"performer": {"redraw_interval": 2}}},
    "probe": {"task": "probe", "data": {}},
    "packed": {"data.pack": "documents", "data.path": "texts"},
    "loops": {"model.loops": 2, "model.loop_loss": "all", "model.lookup": 8, "model.tie_embeddings": False},
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"model.attention": name} for name in MECHANISMS},
    "mixed": {"model.attention": list(MECHANISMS), "model.num_layers": len(MECHANISMS)},
    **STACKS,
}
FEW = ("latte", "performer", "packed")
SHARDED = {"batch.size": 1, "batch.accumulation": 2, "parallel.shard": True}


# --- processes


def fork(world: int, work: Callable[[int], None], *, seconds: float = 500.0) -> list[int]:
    """Run `work(rank)` in `world` processes that know of each other as torchrun's do; return their exit statuses.

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


def make_config(folder: Path, changes: dict[str, Any]) -> TrainConfig:
    """Make a run without dropout in `folder`; the text lies beside it."""
    text = folder.parent / "text.py"
    if not text.exists():
        write_text(folder.parent)
    changes = {k: str(folder.parent / v) if k == "data.path" else v for k, v in changes.items()}
    return config_of(text, folder.parent, BASE, changes, folder=folder.name)


def train_in(folder: Path, changes: dict[str, Any]) -> RunResult:
    """Train in float64, without a picture."""
    run.draw_curves = lambda *args, **kwargs: None  # type: ignore[assignment]
    torch.set_default_dtype(torch.float64)
    try:
        return train(make_config(folder, changes))
    finally:
        torch.set_default_dtype(torch.float32)


def tell(folder: Path, name: str, value: Any) -> None:
    """Leave a value for the test that reads the folder."""
    (folder / f"{name}.json").write_text(json.dumps(value))


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` within the block by what `make` makes of it."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def before_pass(note: Callable[[Loop, Any], None]) -> Any:
    """Call `note` with the loop and the batch before each forward pass within the block."""

    def make(training_pass: Any) -> Any:
        return lambda self, batch, *args, **more: (note(self, batch), training_pass(self, batch, *args, **more))[1]

    return patched(Loop, "training_pass", make)


def recording(seen: list[tuple[int, list[int]]]) -> Any:
    """Keep the step and the windows of each batch."""
    return before_pass(lambda loop, batch: seen.append((loop.standing.step, batch["window"].tolist())))


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# --- quick cases


def models(folder: Path, kind: str, changes: dict[str, Any], names: Iterable[str]) -> None:
    """Train a few steps of each model."""
    for name in names:
        train_in(folder / f"{kind} {name}", {"run.steps": 4, "run.eval_every": 2, **MODELS[name], **changes})


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count how often gradients are summed: what DistributedDataParallel does by itself, and FSDP by torch's."""

    def summed(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        counts["gradients"] += 1
        result: torch.futures.Future[torch.Tensor] = allreduce_hook(state, bucket)
        return result

    def hooked(init: Any) -> Any:
        return lambda self, *args, **kwargs: (init(self, *args, **kwargs), self.register_comm_hook(None, summed))[0]

    def told(collective: Any) -> Any:
        return lambda *args, **kwargs: (counts.update(gradients=1), collective(*args, **kwargs))[1]

    new = hasattr(torch.distributed, "reduce_scatter_single")  # its name since torch 2.13
    name = "reduce_scatter_single" if new else "reduce_scatter_tensor"
    with patched(DistributedDataParallel, "__init__", hooked), patched(torch.distributed, name, told):
        yield


def order(folder: Path, rank: int) -> None:
    """Which windows each process sees, and how often gradients are exchanged."""
    for name, changes in (
        ("wide", {"batch.size": 2}),
        ("deep", {"batch.size": 1, "batch.accumulation": 2}),
        ("wide sharded", {"batch.size": 2, "parallel.shard": True}),
        ("deep sharded", SHARDED),
    ):
        seen: list[tuple[int, list[int]]] = []
        counts: Counter[str] = Counter()
        with recording(seen), counted(counts):
            train_in(folder / f"order {name}", {"run.steps": 3, **changes})
        tell(folder, f"order {name} {rank}", {"seen": seen, **counts})


def nonfinite(folder: Path, rank: int, size: int, culprit: int) -> None:
    """A step that is skipped, and one that ends the run, as the loss of process `culprit` is not a number."""

    def poisoned(compute: Any) -> Any:
        def changed(self: Loop, *args: Any) -> Tensor:
            loss: Tensor = compute(self, *args)
            return loss * torch.nan if (self.standing.step, self.processes.rank) == (2, culprit) else loss

        return changed

    runs: dict[str, dict[str, Any]] = (
        {"one skips": {"run.nonfinite": "skip"}}
        if size == 4
        else {
            "two skips": {"run.nonfinite": "skip"},
            "shards skip": {"run.nonfinite": "skip", "parallel.shard": True},
            "stops": {},
        }
    )
    with patched(Loop, "loss", poisoned):
        for name, changes in runs.items():
            text = error_of(lambda at=folder / name, c=changes: train_in(at, {"batch.size": size, **c}))
            tell(folder, f"{name} {rank}", text)


def full_disk(folder: Path, rank: int) -> None:
    """The first process can't write the second checkpoint."""

    def fail(save: Any) -> Any:
        def changed(self: Checkpoints, folder: Path, *args: Any) -> None:
            if self.processes.first and folder.name.endswith("checkpoint-4"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            save(self, folder, *args)

        return changed

    changes = {"batch.size": 2, "run.save_every": 2}
    with patched(Checkpoints, "write_weights", fail):
        for name, more in (("full", {}), ("full sharded", SHARDED)):
            text = error_of(lambda at=folder / name, more=more: train_in(at, {**changes, **more}))
            tell(folder, f"{name} {rank}", text)
    tell(folder, f"fewer {rank}", error_of(lambda: train_in(folder / "full", {"batch.size": 1})))


def context(folder: Path, rank: int, changes: dict[str, Any]) -> None:
    """Neighbours that share windows: which windows each of them is given."""
    seen: list[tuple[int, list[int]]] = []
    with recording(seen):
        result = train_in(folder / "context", {"run.steps": 4, "parallel.context": 2, "run.eval_every": 2, **changes})
    tell(folder, f"context {rank}", {"seen": seen, "tokens": result.tokens})


def half(folder: Path, rank: int) -> None:
    """A sharded run in bfloat16: in which dtypes its linear layers compute."""
    seen: set[str] = set()

    def note(module: Any, inputs: Any) -> None:
        if isinstance(module, torch.nn.Linear):
            seen.update({str(inputs[0].dtype), str(module.weight.dtype)})

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        changes = {"run.precision": "bf16", "run.steps": 2, "run.save_every": 2, "schedule.warmup": 1, **SHARDED}
        train(make_config(folder / "half", changes))
    finally:
        hook.remove()
    tell(folder, f"half {rank}", sorted(seen))


def resharding(folder: Path) -> None:
    """A run that is resumed by another number of processes, sharded and not."""
    stages: list[tuple[int, dict[str, Any]]] = [
        (2, {"run.steps": 3, "batch.size": 2, "parallel.shard": True}),
        (4, {"run.steps": 4, "batch.size": 1, "parallel.shard": True}),
        (1, {"run.steps": 5, "parallel.shard": True}),
        (2, {"run.steps": 6, "batch.size": 2}),
    ]
    statuses = [fork(world, lambda rank, c=changes: train_in(folder / "moves", c)) for world, changes in stages]
    tell(folder, "resharding", statuses)


def restarted(folder: Path) -> None:
    """Two processes meet three times at the store of one torchrun, which is what it keeps over a restart."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(number: int) -> Callable[[int], None]:
        def work(rank: int) -> None:
            os.environ.update(MASTER_PORT=str(server.port), TORCHELASTIC_USE_AGENT_STORE="True")
            if rank == number:  # each is the late one once, with what it has said before still in the store
                time.sleep(0.5)
            processes = join(ParallelConfig(timeout=10.0), "cpu")
            tell(folder, f"restarted {number} {rank}", processes.by_the_first(lambda: number))

        return work

    tell(folder, "restarted", [fork(2, attempt(number), seconds=60) for number in (2, 1, 0)])


def lost(folder: Path, rank: int, how: str) -> None:
    """Process 1 dies or hangs in step 2."""

    def end(loop: Loop, batch: Any) -> None:
        if rank == 1 and loop.standing.step == 1:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(15)
            os._exit(0)

    changes = {"batch.size": 1, "schedule.warmup": 0, "run.steps": 2, "parallel.timeout": 6.0}
    with before_pass(end):
        text = error_of(lambda: train_in(folder / how, changes))
    tell(folder, f"{how} {rank}", text)
    os._exit(0)  # a process that has lost another has nobody to part from


def quick(folder: Path) -> None:
    def alone(rank: int) -> None:
        models(folder, "one", {}, ("llp", *FEW))
        nonfinite(folder, rank, 4, 0)
        train_in(folder / "whole", {"run.steps": 6})

    def together(rank: int) -> None:
        models(folder, "ddp", {"batch.size": 2}, ("llp", "packed"))
        models(folder, "fsdp", {**SHARDED, "run.activation_checkpointing": True}, FEW)
        order(folder, rank)
        nonfinite(folder, rank, 2, 1)
        full_disk(folder, rank)
        context(folder, rank, {})
        half(folder, rank)

    tell(folder, "quick", [fork(1, alone), fork(2, together)])
    resharding(folder)
    restarted(folder)
    for how in ("dies", "hangs"):
        fork(3, lambda rank, how=how: lost(folder, rank, how), seconds=60)


# --- fifty steps in several ways

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp 2": (2, {"batch.size": 2}),
    "fsdp 2": (2, {"batch.size": 2, "parallel.shard": True}),
    "context 2": (2, {"parallel.context": 2}),
    "ddp 4": (4, {"batch.size": 1}),
    "fsdp 4": (4, {"batch.size": 1, "parallel.shard": True}),
    "context 4": (4, {"parallel.context": 4}),
    "context 2 x 2": (4, {"parallel.context": 2, "batch.size": 2}),
    "context 2 x 2 fsdp": (4, {"parallel.context": 2, "batch.size": 2, "parallel.shard": True}),
}
"""How many processes train, and what they share."""


def curves(folder: Path) -> None:
    """One model with a layer of each mechanism in all ways, and other models in some."""
    long, recomputed = {"run.steps": 50, "run.eval_every": 25}, {"run.activation_checkpointing": True}
    ways = [(kind, *way, long, ("mixed",)) for kind, way in {"one": (1, {}), **KINDS}.items()]
    ways += [("one", 1, {}, {}, STACKS), ("ddp 2", *KINDS["ddp 2"], {}, STACKS)]
    ways += [("fsdp 2", *KINDS["fsdp 2"], recomputed, STACKS)]
    for kind, world, changes, more, names in ways:
        work = partial(models, folder, kind, {**changes, **more}, names)
        tell(
            folder, f"{kind} {' '.join(names)}", fork(world, lambda rank, work=work: work(), seconds=900) == [0] * world
        )
    fork(4, lambda rank: context(folder, rank, {"batch.size": 2}))


if __name__ == "__main__":
    for module in ("accelerate.tracking", "subquad.hf.model", "subquad.training.sharding", "torch._dynamo"):
        importlib.import_module(module)  # so that no fork has to import it
    {"quick": quick, "curves": curves}[sys.argv[2]](Path(sys.argv[1]))
