"""Runs over several processes, for the tests that read their folders afterwards: python cases.py FOLDER NAME

Processes are forks of this one, so that what a run imports is imported once.
"""

import contextlib
import errno
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from subquad.training import run, train
from subquad.training.config import ParallelConfig
from subquad.training.loop import Loop
from subquad.training.processes import join, leave
from subquad.training.saving import Checkpoints
from tests.training.configs import config_of, write_text

BASE = {
    "model": {"dim": 16, "num_layers": 2, "num_heads": 2, "attention": "llp", "position": "sinusoidal"},
    "model.options": {"llp": {"segment": 16}, "window": {"width": 8}}, "batch": {"length": 32, "size": 4},
    "schedule": {"warmup": 2, "kind": "constant"}, "parallel.timeout": 300.0,
    "run.steps": 6, "run.eval_every": 0, "run.eval_windows": 7, "run.save_every": 100,
}  # fmt: skip
STACKS = {
    "perceiver": {"model.attention": "perceiver_ar", "model.options": {"perceiver_ar": {"latents": 8}}},
    "performer": {"model.attention": "performer", "model.options": {"performer": {"redraw_interval": 2}}},
    "probe": {"task": "probe", "data": {}},
    "packed": {"data.pack": "documents", "data.path": "texts", "loss.z_weight": 0.01},
    "loops": {"model.loops": 2, "model.loop_loss": "all", "model.lookup": 8, "model.tie_embeddings": False},
}
MIXED = {"model.attention": ["llp", "latte", "linear", "elita", "window", "full"], "model.num_layers": 6}
MODELS = {"llp": {}, "mixed": MIXED, **STACKS}
ONE, TWO, SHARD = {"batch.size": 1}, {"batch.size": 2}, {"parallel.shard": True}
SHARDED = {**ONE, **SHARD, "batch.accumulation": 2}


def free_port():
    """Return a free port below those that the system gives to connections, one of which could take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def begin(world, work, *given):
    """Start `work(rank, *given)` in `world` processes that know each other like torchrun's, and return them."""
    port = free_port()

    def run_rank(rank):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
        faulthandler.enable()  # a crash of native code says where each thread was
        work(rank, *given)
        leave()

    gc.freeze()  # what is imported here is not collected, and so not copied, in every fork
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


def fork(world, work, *given, seconds=500.0):
    """Run `work(rank, *given)` in `world` processes to their end; return the exit statuses."""
    return ended(begin(world, work, *given), seconds)


def ended(processes, seconds):
    """Return the exit statuses of processes.

    0: well, 1: an exception, which is printed, -9: killed, by itself or because it took longer than `seconds`.
    """
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def train_in(folder, changes, dtype=torch.float64):
    """Train without a picture a run without dropout in `folder`; the text lies beside it."""
    run.draw_curves = lambda *args, **kwargs: None
    torch.set_default_dtype(dtype)
    text = folder.parent / "text.py"
    if not text.exists():
        write_text(folder.parent)
    changes = {k: str(folder.parent / v) if k == "data.path" else v for k, v in changes.items()}
    return train(config_of(text, folder.parent, BASE, changes, folder=folder.name))


def tell(folder, name, value):
    """Leave a value for the test that reads the folder."""
    (folder / f"{name}.json").write_text(json.dumps(value))


def patched(owner, name, make):
    """Replace `owner.name` within the block by what `make` makes of it."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def before_pass(note):
    """Call `note` with the loop and the batch before each forward pass within the block."""

    def make(training_pass):
        return lambda self, batch, *args, **more: (note(self, batch), training_pass(self, batch, *args, **more))[1]

    return patched(Loop, "training_pass", make)


def recording(seen):
    """Keep the step and the windows of each batch."""
    return before_pass(lambda loop, batch: seen.append((loop.state.step, batch["window"].tolist())))


def error_of(folder, changes):
    """Train and return the error's type and text."""
    try:
        train_in(folder, changes)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def models(rank, folder, kind, changes, names):
    """Train a few steps of each model."""
    for name in names:
        train_in(folder / f"{kind} {name}", {"run.steps": 4, "run.eval_every": 2, **MODELS[name], **changes})


@contextmanager
def counted(counts):
    """Count how often gradients are summed: what DistributedDataParallel does by itself, and FSDP by torch's."""

    def summed(state, bucket):
        counts["gradients"] += 1
        return allreduce_hook(state, bucket)

    def hooked(init):
        return lambda self, *args, **kwargs: (init(self, *args, **kwargs), self.register_comm_hook(None, summed))[0]

    def told(collective):
        return lambda *args, **kwargs: (counts.update(gradients=1), collective(*args, **kwargs))[1]

    new = hasattr(torch.distributed, "reduce_scatter_single")  # its name since torch 2.13
    name = "reduce_scatter_single" if new else "reduce_scatter_tensor"
    with patched(DistributedDataParallel, "__init__", hooked), patched(torch.distributed, name, told):
        yield


def order(folder, rank):
    """Which windows each process sees, and how often gradients are exchanged."""
    for kind, changes in (("", {}), (" sharded", {"parallel.shard": True})):
        seen, counts = [], Counter()
        with recording(seen), counted(counts):
            accumulated = {"run.steps": 3, "batch.size": 1, "batch.accumulation": 2}
            train_in(folder / f"order{kind}", {**accumulated, **changes})
        tell(folder, f"order{kind} {rank}", {"seen": seen, **counts})


def nonfinite(folder, rank, runs):
    """Runs in which the loss of the last process is not a number in step 3."""

    def poisoned(compute):
        def changed(self, *args):
            bad = self.state.step == 2 and self.processes.rank == self.processes.world - 1
            return compute(self, *args) * (torch.nan if bad else 1)

        return changed

    with patched(Loop, "loss", poisoned):
        for name, changes in runs.items():
            tell(folder, f"{name} {rank}", error_of(folder / name, changes))


def full_disk(folder, rank):
    """The first process can't write the second checkpoint."""

    def full(save):
        def changed(self, folder, *args):
            if self.processes.first and folder.name.endswith("checkpoint-4"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            save(self, folder, *args)

        return changed

    with patched(Checkpoints, "write_weights", full):
        for name, more in (("full", {"batch.size": 2}), ("full sharded", SHARDED)):
            tell(folder, f"{name} {rank}", error_of(folder / name, {"run.save_every": 2, **more}))
    tell(folder, f"fewer {rank}", error_of(folder / "full", {"batch.size": 1}))


def context(folder, rank):
    """Neighbours that share windows: which windows each of them is given."""
    seen = []
    with recording(seen):
        result = train_in(folder / "context", {"run.steps": 4, "parallel.context": 2, "run.eval_every": 2})
    tell(folder, f"context {rank}", {"seen": seen, "tokens": result.tokens})


def half(folder, rank):
    """A sharded run in bfloat16: in which dtypes its linear layers compute."""
    seen = set()

    def note(module, inputs):
        if isinstance(module, torch.nn.Linear):
            seen.update({str(inputs[0].dtype), str(module.weight.dtype)})

    torch.nn.modules.module.register_module_forward_pre_hook(note)
    changes = {"run.precision": "bf16", "run.steps": 2, "run.save_every": 2, "schedule.warmup": 1, **SHARDED}
    train_in(folder / "half", changes, torch.float32)
    tell(folder, f"half {rank}", sorted(seen))


def resharding(folder):
    """A run that is resumed by another number of processes, sharded and not."""

    def move(rank, steps, changes):
        train_in(folder / "moves", {"run.steps": steps, **changes})

    stages = [(2, 3, TWO | SHARD), (4, 4, ONE | SHARD), (1, 5, SHARD), (2, 6, TWO | SHARD)]
    tell(folder, "resharding", [fork(world, move, steps, changes) for world, steps, changes in stages])


def restarted(folder):
    """Two processes meet three times at the store of one torchrun, which outlives a restart."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(rank, late):
        os.environ.update(MASTER_PORT=str(server.port), TORCHELASTIC_USE_AGENT_STORE="True")
        if rank == late:  # finds what it wrote before still in the store
            time.sleep(0.5)
        processes = join(ParallelConfig(timeout=10.0), "cpu")
        tell(folder, f"restarted {late} {rank}", processes.by_the_first(lambda: late))

    tell(folder, "restarted", [fork(2, attempt, late, seconds=60) for late in (2, 1, 0)])


def lost(rank, folder, how):
    """Process 1 dies or hangs in step 2."""

    def end(loop, batch):
        if rank == 1 and loop.state.step == 1:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            end = time.monotonic() + 60
            while time.monotonic() < end and not all((folder / f"{how} {other}.json").exists() for other in (0, 2)):
                time.sleep(0.1)
            os._exit(0)

    changes = {"batch.size": 1, "schedule.warmup": 0, "run.steps": 2, "parallel.timeout": 6.0}
    with before_pass(end):
        tell(folder, f"{how} {rank}", error_of(folder / how, changes))
    os._exit(0)  # a process that has lost another has nobody to part from


SKIP = {"run.nonfinite": "skip"}


def alone(rank, folder):
    models(rank, folder, "one", {}, ("llp", "packed"))
    nonfinite(folder, rank, {"one skips": SKIP})
    train_in(folder / "whole", {"run.steps": 6})


def together(rank, folder):
    models(rank, folder, "ddp", TWO, ("llp", "packed"))
    models(rank, folder, "fsdp", {**SHARDED, "run.activation_checkpointing": True}, ["packed"])
    order(folder, rank)
    nonfinite(folder, rank, {"two skips": SKIP | TWO, "shards skip": SKIP | TWO | SHARD, "stops": TWO})
    full_disk(folder, rank)
    context(folder, rank)
    half(folder, rank)


def quick(folder):
    tell(folder, "quick", [fork(1, alone, folder), fork(2, together, folder)])
    waiting = [begin(3, lost, folder, how) for how in ("dies", "hangs")]  # for seconds, of which they compute little
    resharding(folder)
    restarted(folder)
    for processes in waiting:
        ended(processes, 60)


HALVES = {"parallel.context": 2}
KINDS = {
    "ddp 2": (2, TWO), "fsdp 2": (2, TWO | SHARD), "context 2": (2, HALVES),
    "ddp 4": (4, ONE), "fsdp 4": (4, ONE | SHARD), "context 4": (4, {"parallel.context": 4}),
    "context 2 x 2": (4, HALVES | TWO), "context 2 x 2 fsdp": (4, HALVES | TWO | SHARD),
}  # fmt: skip
"""How many processes train, and what they share."""


def curves(folder):
    """One model with a layer of each mechanism in all ways, and other models in some."""
    long, recomputed = {"run.steps": 50, "run.eval_every": 25}, {"run.activation_checkpointing": True}
    ways = [(kind, *way, long, ("mixed",)) for kind, way in {"one": (1, {}), **KINDS}.items()]
    ways += [("one", 1, {}, {}, STACKS), ("ddp 2", *KINDS["ddp 2"], {}, STACKS)]
    ways += [("fsdp 2", *KINDS["fsdp 2"], recomputed, STACKS)]
    for kind, world, changes, more, names in ways:
        statuses = fork(world, models, folder, kind, {**changes, **more}, names, seconds=900)
        tell(folder, f"{kind} {' '.join(names)}", statuses == [0] * world)


if __name__ == "__main__":
    for module in ("accelerate.tracking", "subquad.hf.model", "subquad.training.sharding", "torch._dynamo"):
        importlib.import_module(module)  # so that no fork has to import it
    {"quick": quick, "curves": curves}[sys.argv[2]](Path(sys.argv[1]))
