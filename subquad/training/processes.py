"""The processes of a run: how they meet, what each one's part is, and how they fail together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from subquad.models.stacks import STACKS
from subquad.training.config import TrainConfig
from subquad.training.errors import LostProcessError
from subquad.training.meeting import meet
from subquad.training.parallel_config import ParallelConfig

if TYPE_CHECKING:
    from subquad.training.heartbeat import Heartbeat

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

FOREIGN = {
    "ACCELERATE_USE_FSDP": "parallel.shard=true shards the model",
    "ACCELERATE_USE_DEEPSPEED": "parallel.shard=true shards the model",
    "ACCELERATE_USE_MEGATRON_LM": "parallel.shard=true shards the model",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallel.context and parallel.shard say how processes work together",
    "ACCELERATE_USE_CPU": "run.device=cpu trains on the CPU",
    "ACCELERATE_DOWNCAST_BF16": "run.precision chooses the precision",
}
"""Switches of Accelerate's launcher that would change a run, or would seem to; and what to say instead."""

_heart: Heartbeat | None = None


@dataclass(frozen=True)
class Processes:
    """Process `rank` of `world`, of which `context` neighbours share each window."""

    rank: int = 0
    world: int = 1
    context: int = 1
    device: str = "cpu"
    """The type of the devices: cpu or cuda."""
    timeout: float | None = None
    """Seconds that neighbours wait for each other (None: as long as torch.distributed does)."""

    @property
    def data_rank(self) -> int:
        """The number of this process's part of the windows."""
        return self.rank // self.context

    @property
    def data_ranks(self) -> int:
        """The parts into which the windows are dealt."""
        return self.world // self.context

    @property
    def first(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def sharing_windows(self) -> Callable[[], AbstractContextManager[Any]]:
        """What makes a context in which the model shares each window with this process's neighbours.

        Every process must call it.
        """
        if self.context == 1:
            return nullcontext
        from subquad.parallel import ContextGroup, context_parallel

        group = ContextGroup.neighbours(self.context, timeout=self.timeout)
        return lambda: context_parallel(group)

    def by_the_first(self, work: Callable[[], Result]) -> Result:
        """What `work` returns in the first process, in all of them; what it raises there, all raise."""
        if self.world == 1:
            return work()
        import torch

        said: list[Any] = [None, None]
        if self.first:
            try:
                said[0] = work()
            except Exception as error:
                said[1] = _sendable(error)
        torch.distributed.broadcast_object_list(said, src=0)
        if said[1] is not None:
            raise said[1]
        result: Result = said[0]
        return result

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where the work inside fails in one process, it fails in all: the others raise the same error, with its rank.

        The work itself must not wait for other processes.
        """
        if self.world == 1:
            yield
            return
        import torch

        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        said: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(said, None if error is None else _sendable(error))
        if error is not None:
            raise error
        for rank, other in enumerate(said):
            if other is not None:
                raise type(other)(f"in process {rank}: {other}") from other

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn a failed wait for processes that have ended, or hang, into a `LostProcessError` that names them."""
        try:
            yield
        except RuntimeError as error:  # gloo and NCCL fail with nothing more special
            lost = None if _heart is None else _heart.lost()
            if lost is None:
                raise
            raise LostProcessError(
                f"{lost}. The run goes on from its newest checkpoint when the same command is given again (torchrun "
                f"--max-restarts does it by itself). This process failed with: {str(error).splitlines()[0]}"
            ) from error


def check_parallel(config: TrainConfig) -> None:
    """Raise `ValueError` for settings that these processes, their environment or the model can't follow."""
    for name, instead in FOREIGN.items():
        if os.environ.get(name, "false").lower() in ("true", "1", "yes", "on"):
            raise ValueError(f"{name} is set, which subquad train does not follow: unset it; {instead}")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise ValueError(
            f"ACCELERATE_MIXED_PRECISION={precision} is set, which subquad train does not follow: unset it; "
            "run.precision chooses the precision"
        )
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() != "no":
        raise ValueError(
            f"ACCELERATE_DYNAMO_BACKEND={compiler} is set, which subquad train does not follow: unset it; training is "
            "not compiled"
        )
    world, context = world_size(), config.parallel.context
    if world % context:
        raise ValueError(
            f"parallel.context={context} must divide the number of processes, got {world}: start them with torchrun "
            f"--nproc_per_node and a multiple of {context}"
        )
    if context > 1:
        for name in config.model.mechanisms:
            if name in STACKS:
                raise ValueError(f"attention {name!r} can't share a window: parallel.context must be 1, got {context}")


def world_size() -> int:
    """The number of processes that the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(parallel: ParallelConfig, *, cpu: bool) -> Processes:
    """Meet the other processes that torchrun has started, where there are any.

    A second call finds them met, with the time-out of the first.
    """
    import torch

    device = "cpu" if cpu else "cuda"
    world = world_size()
    if world == 1:
        if parallel.shard:
            logger.warning("parallel.shard has no effect with one process")
        return Processes(device=device)
    distributed = torch.distributed
    if not distributed.is_initialized():
        if not cpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        limit = timedelta(seconds=parallel.timeout)
        store, rank, world = next(distributed.rendezvous("env://", timeout=limit))
        store = meet(store, rank, world, parallel.timeout)
        # NCCL moves tensors of a GPU alone; what is said between processes are bytes on the CPU.
        backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        _watch(store, rank, world, parallel.timeout)
    return Processes(distributed.get_rank(), distributed.get_world_size(), parallel.context, device, parallel.timeout)


def leave() -> None:
    """Part from the other processes, for good."""
    global _heart
    if _heart is not None:
        _heart.close()
        _heart = None
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def at(place: str) -> None:
    """Tell the other processes what this one does now, for the errors of those that wait for it."""
    if _heart is not None:
        _heart.at(place)


def _sendable(error: Exception) -> Exception:
    """The error, or one with its text where it is of a kind that may not be made again from a text."""
    try:
        if type(error).__module__.partition(".")[0] in ("builtins", "subquad"):
            type(error)(str(error))
            return error
    except TypeError:  # as of UnicodeDecodeError, which is made of five arguments
        pass
    return OSError(f"{type(error).__name__}: {error}")


def _watch(store: Any, rank: int, world: int, timeout: float) -> None:
    global _heart
    from subquad.training.heartbeat import beat_from

    _heart = beat_from(store, rank, world, timeout)
