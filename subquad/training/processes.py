"""The processes of a run: they find each other, divide the work, and end together after an error.

With `--max-restarts`, torchrun keeps one store over all starts. The next start would take entries of an earlier one
for valid addresses and counters. So process 0 draws a random name for each start and sends it to every process that
answers; all keys of the start begin with it (`meet`).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from subquad.models.stacks import STACKS
from subquad.parallel import ContextGroup, context_parallel
from subquad.training.config import ParallelConfig, TrainConfig
from subquad.training.errors import LostProcessError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

PAUSE = 0.01
"""Seconds between polls of the store."""
LONGEST_INTERVAL = 5.0
"""Longest interval between heartbeats in seconds; an eighth of the time-out if that is less."""
PATIENCE = 3
"""Intervals without a heartbeat after which a process counts as ended."""

FOREIGN = {
    "ACCELERATE_USE_FSDP": "parallel.shard=true shards the model",
    "ACCELERATE_USE_DEEPSPEED": "parallel.shard=true shards the model",
    "ACCELERATE_USE_MEGATRON_LM": "parallel.shard=true shards the model",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallel.context and parallel.shard set how processes work together",
    "ACCELERATE_USE_CPU": "run.device=cpu trains on the CPU",
    "ACCELERATE_DOWNCAST_BF16": "run.precision chooses the precision",
    "ACCELERATE_MIXED_PRECISION": "run.precision chooses the precision",
    "ACCELERATE_DYNAMO_BACKEND": "training is not compiled",
}
"""Settings of Accelerate's launcher that subquad doesn't follow, and what to use instead."""
OFF = ("", "0", "false", "no", "off")
"""Values of these variables that have no effect."""

_heart: Heartbeat | None = None


@dataclass(frozen=True)
class Processes:
    """Process `rank` of `world` processes; groups of `context` neighbours share each window."""

    rank: int = 0
    world: int = 1
    context: int = 1
    device: str = "cpu"
    """Device type: cpu or cuda."""
    timeout: float | None = None
    """Seconds that neighbours wait for each other (None: the default of torch.distributed)."""

    @property
    def data_rank(self) -> int:
        """Index of the share of the windows that this process trains on."""
        return self.rank // self.context

    @property
    def data_ranks(self) -> int:
        """Number of shares of the windows."""
        return self.world // self.context

    @property
    def torch_device(self) -> torch.device:
        """Device of this process's model."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    @property
    def first(self) -> bool:
        """Whether this process is rank 0, which writes and reports."""
        return self.rank == 0

    def sharing_windows(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return a context factory to share windows with this process's neighbours. All processes must call it."""
        if self.context == 1:
            return nullcontext
        group = ContextGroup.neighbours(self.context, timeout=self.timeout)
        return lambda: context_parallel(group)

    def any_of(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is set in any process."""
        if self.world == 1:
            return list(flags)
        seen = torch.tensor([int(flag) for flag in flags], device=self.torch_device)
        distributed.all_reduce(seen, op=distributed.ReduceOp.MAX)
        return [bool(flag) for flag in seen.tolist()]

    def gather_objects(self, mine: Result) -> list[Result]:
        """Return the objects of all processes, by rank."""
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, mine)
        return found

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Run the block in rank 0 first, then in all other processes."""
        if self.world > 1 and not self.first:
            distributed.barrier()
        try:
            yield
        finally:
            if self.world > 1 and self.first:
                distributed.barrier()

    def by_the_first(self, work: Callable[[], Result]) -> Result:
        """Run `work` in rank 0 only; return its result or raise its error in all processes."""
        if self.world == 1:
            return work()
        said: list[Any] = [None, None]
        if self.first:
            try:
                said[0] = work()
            except Exception as error:
                said[1] = _sendable(error)
        distributed.broadcast_object_list(said, src=0)
        if said[1] is not None:
            raise said[1]
        return said[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of the block in all processes, with the rank of the failed one. No collectives inside."""
        if self.world == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        said = self.gather_objects(None if error is None else _sendable(error))
        if error is not None:
            raise error
        for rank, other in enumerate(said):
            if other is not None:
                raise type(other)(f"in process {rank}: {other}") from other

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise `LostProcessError`, naming processes that have ended or hang, if a collective in the block fails."""
        try:
            yield
        except RuntimeError as error:  # gloo and NCCL raise no more specific type
            lost = None if _heart is None else _heart.lost()
            if lost is None:
                raise
            raise LostProcessError(
                f"{lost}. Run the same command again to resume from the newest checkpoint (torchrun --max-restarts "
                f"does so automatically). This process failed with: {str(error).splitlines()[0]}"
            ) from error


def check_parallel(config: TrainConfig) -> None:
    """Raise `ValueError` for settings that don't fit the processes, their environment or the model."""
    for name, instead in FOREIGN.items():
        value = os.environ.get(name, "")
        if value.lower() not in OFF:
            raise ValueError(f"subquad train ignores {name}, which is {value}: unset it; {instead}")
    world, context = world_size(), config.parallel.context
    if world % context:
        raise ValueError(
            f"parallel.context={context} must divide the number of processes, got {world}: give torchrun "
            f"--nproc_per_node a multiple of {context}"
        )
    if context > 1:
        for name in config.model.mechanisms:
            if name in STACKS:
                raise ValueError(f"attention {name!r} can't share a window: parallel.context must be 1, got {context}")


def device_type(device: str) -> str:
    """Return `cuda` if `device` is `auto` and PyTorch finds a GPU, else `cpu`."""
    return "cuda" if device == "auto" and torch.cuda.is_available() else "cpu"


def world_size() -> int:
    """Return the number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def first_process() -> bool:
    """Return whether this is the first of the processes that the launcher started."""
    return int(os.environ.get("RANK", "0")) == 0


def join(parallel: ParallelConfig, device: str) -> Processes:
    """Connect, once, to the other processes that torchrun started, if any; `device` is cpu or cuda."""
    global _heart
    world = world_size()
    if world == 1:
        if parallel.shard:
            logger.warning("parallel.shard has no effect with one process")
        return Processes(device=device)
    if not distributed.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        limit = timedelta(seconds=parallel.timeout)
        store, rank, world = next(distributed.rendezvous("env://", timeout=limit))
        store = meet(store, rank, world, parallel.timeout)
        # NCCL handles only GPU tensors; the objects that processes exchange are bytes on the CPU.
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        # A separate connection, because a waiting collective blocks the first.
        own: Any = store
        _heart = Heartbeat(distributed.PrefixStore("subquad heartbeat", own.clone()), rank, world, parallel.timeout)
    return Processes(distributed.get_rank(), distributed.get_world_size(), parallel.context, device, parallel.timeout)


def meet(store: distributed.Store, rank: int, world: int, timeout: float) -> distributed.Store:
    """Return a view of `store` for this start alone; `LostProcessError` with ranks missing after `timeout` seconds."""
    me = secrets.token_hex(16)
    if rank == 0:
        _welcome(store, me, world, timeout)
        return distributed.PrefixStore(me, store)
    store.set(f"subquad/here/{rank}", me)
    try:
        store.wait([f"subquad/welcome/{me}"], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise LostProcessError(f"process {rank} waited {timeout:g} s for process 0, which did not connect") from error
    name = store.get(f"subquad/welcome/{me}").decode()
    store.set(f"subquad/in/{name}/{rank}", "")
    return distributed.PrefixStore(name, store)


def _welcome(store: distributed.Store, name: str, world: int, timeout: float) -> None:
    """Send `name` to every process that announces itself, until all have answered."""
    end = time.monotonic() + timeout
    told: set[bytes] = set()
    missing = set(range(1, world))
    while missing:
        for rank in sorted(missing):
            if store.check([f"subquad/here/{rank}"]):
                who = store.get(f"subquad/here/{rank}")  # may be left from an earlier start
                if who not in told:
                    told.add(who)
                    store.set(f"subquad/welcome/{who.decode()}", name)
        missing = {rank for rank in missing if not store.check([f"subquad/in/{name}/{rank}"])}
        if missing and time.monotonic() > end:
            ranks = ", ".join(map(str, sorted(missing)))
            raise LostProcessError(f"process 0 waited {timeout:g} s; of {world} processes, {ranks} did not connect")
        if missing:
            time.sleep(PAUSE)


def leave() -> None:
    """Disconnect from the other processes."""
    global _heart
    if _heart is not None:
        _heart.close()
        _heart = None
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def now_at(place: str) -> None:
    """Publish what this process does now, for error messages of processes that wait for it."""
    if _heart is not None:
        _heart.at(place)


def _sendable(error: Exception) -> Exception:
    """Return `error`, or an `OSError` with its text if its type can't be rebuilt from a text in another process."""
    try:
        if type(error).__module__.partition(".")[0] in ("builtins", "subquad"):
            type(error)(str(error))
            return error
    except TypeError:  # UnicodeDecodeError, for example, takes five arguments
        pass
    return OSError(f"{type(error).__name__}: {error}")


class Heartbeat:
    """Publishes heartbeats of process `rank`. `timeout` is the time-out of collectives in seconds.

    Every `interval` seconds a thread writes a counter and the last place named by `at` to the store. Training steps are
    not slowed down, because `at` only sets attributes.
    """

    def __init__(self, store: distributed.Store, rank: int, world: int, timeout: float) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.interval = min(LONGEST_INTERVAL, timeout / 8)
        self._patience = timeout - 2 * PATIENCE * self.interval
        self._place = (0, "the start")
        self._since = time.monotonic()
        self._told = False
        self._before: tuple[int, list[tuple[int, int, str]]] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="subquad heartbeat", daemon=True)
        self._thread.start()

    def at(self, place: str) -> None:
        """Record what this process does now. All processes must name the same places in the same order."""
        self._place = (self._place[0] + 1, place)
        self._since = time.monotonic()
        self._told = False

    def lost(self) -> str | None:
        """Describe the processes that have ended or are behind this one, or return None.

        Takes a few intervals. Call it after a failed wait: it marks this process as alive but giving up.
        """
        try:
            self.store.set(f"gave up/{self.rank}", "1")
            before = self._read()
            time.sleep(PATIENCE * self.interval)
            return self._named(before)
        except RuntimeError as error:  # the base of all errors of torch.distributed
            return f"the store of process 0 or its torchrun does not answer: {error}"

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join(2 * LONGEST_INTERVAL)

    def _named(self, before: list[tuple[int, int, str]]) -> str | None:
        """Describe the processes without a heartbeat since `before` and those that are behind this one."""
        parts = []
        for rank, (beats, number, place) in enumerate(self._read()):
            if rank == self.rank or self.store.check([f"gave up/{rank}"]):
                continue
            if beats == before[rank][0]:
                parts.append(f"process {rank} has ended or does not answer, last seen in {place}")
            elif number < self._place[0]:
                parts.append(f"process {rank} hangs in {place}")
        return "; ".join(parts) or None

    def _read(self) -> list[tuple[int, int, str]]:
        """Return the heartbeat count, place number and place name of each process."""
        found = []
        for rank in range(self.world):
            key = f"beat/{rank}"
            beats, number, place = (
                self.store.get(key).decode().split(" ", 2) if self.store.check([key]) else ("0", "0", "no place")
            )
            found.append((int(beats), int(number), place))
        return found

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(self.interval if beats else 0):
            beats += 1
            number, place = self._place
            try:
                self.store.set(f"beat/{self.rank}", f"{beats} {number} {place}")
                self._tell(beats)
            except RuntimeError:
                logger.debug("heartbeats stopped: the store does not answer", exc_info=True)
                return

    def _tell(self, beats: int) -> None:
        """Log who is waited for before the time-out, because NCCL then ends the process without an exception."""
        if self._told or time.monotonic() - self._since < self._patience:
            self._before = None
        elif self._before is None:
            self._before = (beats, self._read())
        elif beats - self._before[0] >= PATIENCE:
            self._told = True
            if lost := self._named(self._before[1]):
                logger.warning("process %d waits in %s: %s", self.rank, self._place[1], lost)
