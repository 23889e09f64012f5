"""What several processes do, for the tests that read the folder afterwards: python cases.py FOLDER NAME..."""

import errno
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from subquad.training.config import ParallelConfig
from subquad.training.loop import Loop
from subquad.training.processes import join
from subquad.training.run import train
from subquad.training.saving import Checkpoints
from tests.training.forks import fork, make_config, tell, train_in

MECHANISMS = ("llp", "latte", "linear", "elita", "window", "full")
EVALUATED = {"run.eval_every": 25}
SHARDED = {"batch.size": 1, "batch.accumulation": 2, "parallel.shard": True}
STACKS = {
    "perceiver": {"model.attention": "perceiver_ar", "model.options": {"perceiver_ar": {"latents": 8}}},
    "performer": {"model.attention": "performer", "model.options": {"performer": {"redraw_interval": 2}}},
    "probe": {"task": "probe", "data": {}},
    "packed": {"data.pack": "documents", "data.path": "texts"},
    "loops": {"model.loops": 2, "model.loop_loss": "all", "model.lookup": 8, "model.tie_embeddings": False},
}


def of_mechanisms(folder: Path, kind: str, steps: int, changes: dict[str, Any], names: tuple[str, ...]) -> None:
    """Runs of `steps` steps, a model each; `mixed` has a layer of every mechanism."""
    for name in names:
        model: dict[str, Any] = {"model.attention": name}
        if name == "mixed":
            model = {"model.attention": list(MECHANISMS), "model.num_layers": len(MECHANISMS)}
        train_in(folder / f"{kind} {name}", {**model, "run.steps": steps, **changes})


def of_stacks(folder: Path, kind: str, changes: dict[str, Any], names: Iterable[str] = tuple(STACKS)) -> None:
    for name in names:
        train_in(folder / f"{kind} {name}", {"run.steps": 4, "run.eval_every": 2, **STACKS[name], **changes})


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within the block `owner.name` is what `make` makes of it."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def before_step(step: int, then: Callable[[], None]) -> Callable[[Any], Any]:
    """A `training_pass` that calls `then` first, at one step."""

    def make(training_pass: Any) -> Any:
        def changed(self: Loop, *args: Any, **kwargs: Any) -> None:
            if self.standing.step + 1 == step:
                then()
            training_pass(self, *args, **kwargs)

        return changed

    return make


def poisoned(step: int, rank: int) -> Callable[[Any], Any]:
    """A `loss` that is not a number at one step of one process."""

    def make(compute: Any) -> Any:
        def changed(self: Loop, *args: Any) -> Tensor:
            loss: Tensor = compute(self, *args)
            bad = self.standing.step + 1 == step and self.processes.rank == rank
            return loss * torch.nan if bad else loss

        return changed

    return make


def recording(seen: list[tuple[int, list[int]]]) -> Callable[[Any], Any]:
    """A `training_pass` that keeps the windows of each batch."""

    def make(training_pass: Any) -> Any:
        def changed(self: Loop, batch: Any, *args: Any, **kwargs: Any) -> None:
            seen.append((self.standing.step, batch["window"].tolist()))
            training_pass(self, batch, *args, **kwargs)

        return changed

    return make


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count how often gradients are summed up: what DistributedDataParallel does by itself, and FSDP by torch's."""

    def hooked(init: Any) -> Any:
        def changed(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.register_comm_hook(None, summed)

        return changed

    def summed(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        counts["gradients"] += 1
        result: torch.futures.Future[torch.Tensor] = allreduce_hook(state, bucket)
        return result

    def told(collective: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            counts["gradients"] += 1
            return collective(*args, **kwargs)

        return changed

    with ExitStack() as stack:
        stack.enter_context(patched(DistributedDataParallel, "__init__", hooked))
        new = hasattr(torch.distributed, "reduce_scatter_single")  # its name since torch 2.13
        name = "reduce_scatter_single" if new else "reduce_scatter_tensor"
        stack.enter_context(patched(torch.distributed, name, told))
        yield


def order(folder: Path, rank: int) -> None:
    for name, changes in (
        ("wide", {"batch.size": 2}),
        ("deep", {"batch.size": 1, "batch.accumulation": 2}),
        ("wide sharded", {"batch.size": 2, "parallel.shard": True}),
        ("deep sharded", SHARDED),
    ):
        seen: list[tuple[int, list[int]]] = []
        counts: Counter[str] = Counter()
        with patched(Loop, "training_pass", recording(seen)), counted(counts):
            train_in(folder / f"order {name}", {"run.steps": 3, **changes})
        tell(folder, f"order {name} {rank}", seen)
        tell(folder, f"counts {name} {rank}", dict(counts))


def nonfinite(folder: Path, rank: int, size: int, culprit: int) -> None:
    """A step that is left out, and one that ends the run."""
    with patched(Loop, "loss", poisoned(3, culprit)):
        kind = "one" if size == 4 else "two"
        train_in(folder / f"{kind} skips", {"batch.size": size, "run.nonfinite": "skip"})
        if size == 4:
            return
        train_in(folder / "shards skip", {"batch.size": size, "run.nonfinite": "skip", "parallel.shard": True})
        text = error_of(lambda: train_in(folder / "stops", {"batch.size": size}))
        tell(folder, f"stops {rank}", text)


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
        tell(folder, f"full {rank}", error_of(lambda: train_in(folder / "full", changes)))
        tell(folder, f"full sharded {rank}", error_of(lambda: train_in(folder / "full s", {**changes, **SHARDED})))
    tell(folder, f"fewer {rank}", error_of(lambda: train_in(folder / "full", {"batch.size": 1})))


def context(folder: Path, rank: int, changes: dict[str, Any]) -> None:
    """Neighbours that share windows: which ones each of them is given."""
    seen: list[tuple[int, list[int]]] = []
    with patched(Loop, "training_pass", recording(seen)):
        result = train_in(folder / "context", {"parallel.context": 2, "run.eval_every": 3, **changes})
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


def lost(folder: Path, rank: int, how: str) -> None:
    """Process 1 dies or hangs in step 3."""

    def end() -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(15)
        os._exit(0)

    make = before_step(3, end) if rank == 1 else lambda step: step
    changes = {"batch.size": 1, "batch.accumulation": 1, "parallel.timeout": 6.0}
    with patched(Loop, "training_pass", make):
        text = error_of(lambda: train_in(folder / how, changes))
    tell(folder, f"{how} {rank}", text)
    os._exit(0)  # a process that has lost another has nobody to part from


def resharding(folder: Path) -> None:
    """A run that goes on with another number of processes, sharded and not."""
    stages: list[tuple[int, dict[str, Any]]] = [
        (2, {"run.steps": 3, "batch.size": 2, "parallel.shard": True}),
        (4, {"run.steps": 5, "batch.size": 1, "parallel.shard": True}),
        (1, {"run.steps": 6, "parallel.shard": True}),
        (2, {"run.steps": 8, "batch.size": 2}),
    ]
    statuses = [fork(world, lambda rank, c=changes: train_in(folder / "moves", c)) for world, changes in stages]
    tell(folder, "resharding", statuses)


def quick(folder: Path) -> None:
    few, recomputed = ("llp", "latte", "full"), {"run.activation_checkpointing": True}

    def alone(rank: int) -> None:
        of_mechanisms(folder, "one", 6, {"run.eval_every": 3}, few)
        of_stacks(folder, "one", {}, ("performer", "probe", "packed"))
        nonfinite(folder, rank, 4, 0)
        train_in(folder / "whole", {"run.steps": 8})

    def together(rank: int) -> None:
        of_mechanisms(folder, "ddp", 6, {"run.eval_every": 3, "batch.size": 2}, few[:1])
        of_mechanisms(folder, "fsdp", 6, {"run.eval_every": 3, **SHARDED, **recomputed}, few)
        of_stacks(folder, "fsdp", SHARDED, ("performer", "probe", "packed"))
        of_stacks(folder, "ddp", {"batch.size": 2}, ("packed",))
        order(folder, rank)
        nonfinite(folder, rank, 2, 1)
        full_disk(folder, rank)
        context(folder, rank, {})
        half(folder, rank)

    statuses = [fork(1, alone), fork(2, together)]
    tell(folder, "quick", statuses)
    resharding(folder)
    restarted(folder)
    for how in ("dies", "hangs"):
        fork(3, lambda rank, how=how: lost(folder, rank, how), seconds=60)


def restarted(folder: Path) -> None:
    """Two processes meet twice at the store of one torchrun, which is what it holds over a restart."""
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
MIXED = tuple(kind for kind in KINDS if kind not in ("fsdp 4", "context 2 x 2"))
"""The ways in which the model of all mechanisms is trained; the others are tried with a mechanism each."""


def in_all_ways(folder: Path, kinds: Iterable[str], names: tuple[str, ...]) -> list[list[int]]:
    """Fifty steps of each model, alone and in these ways by several processes; their exit statuses."""
    ways: dict[str, tuple[int, dict[str, Any]]] = {"one": (1, {}), **{kind: KINDS[kind] for kind in kinds}}
    return [
        fork(world, lambda _, k=kind, c=c: of_mechanisms(folder, k, 50, EVALUATED | c, names), seconds=900)
        for kind, (world, c) in ways.items()
    ]


def more_curves(folder: Path) -> None:
    """Each mechanism by itself."""
    tell(folder, "curves", in_all_ways(folder, KINDS, MECHANISMS))


def curves(folder: Path) -> None:
    """One model with a layer of each mechanism, and other models."""
    statuses = in_all_ways(folder, MIXED, ("mixed",))

    def stacks(kind: str, changes: dict[str, Any]) -> Callable[[int], None]:
        return lambda rank: of_stacks(folder, kind, changes)

    statuses += [fork(1, stacks("one", {})), fork(2, stacks("ddp 2", {"batch.size": 2}))]
    statuses.append(
        fork(2, stacks("fsdp 2", {"batch.size": 2, "parallel.shard": True, "run.activation_checkpointing": True}))
    )
    statuses.append(fork(4, lambda rank: context(folder, rank, {"batch.size": 2})))
    tell(folder, "curves", statuses)


if __name__ == "__main__":
    for case in sys.argv[2:]:
        {"quick": quick, "curves": curves, "more": more_curves}[case](Path(sys.argv[1]))
