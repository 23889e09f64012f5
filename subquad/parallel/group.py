"""The group of processes that share a sequence: exchanges by torch.distributed, with their bytes counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from subquad.per_thread import held_by_thread
from subquad.state import State

Message = tuple[int, Tensor]
"""A rank, and the tensor to send to it or to fill from it."""


class Sent(NamedTuple):
    """Bytes that one process sends to others in the forward and in the backward pass."""

    forward: int = 0
    backward: int = 0

    def plus(self, other: Sent) -> Sent:
        """Return the sums."""
        return Sent(self.forward + other.forward, self.backward + other.backward)


class ContextGroup:
    """P processes that share sequences: rank r holds T / P of the T tokens, from position `r T / P` on.

    `process_group` is torch.distributed's (None: all processes). `sent` counts the bytes that this process has sent in
    the layers' exchanges; a recomputation (`gradient_checkpointing`) counts as forward again. Raises `ValueError` if
    torch.distributed isn't initialised or this process isn't in the group.
    """

    rank: int
    size: int

    def __init__(self, process_group: distributed.ProcessGroup | None = None) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ValueError(
                "a ContextGroup needs the processes of torch.distributed: call torch.distributed.init_process_group() "
                "first, in processes started by torchrun"
            )
        self.process_group = process_group
        self.rank, self.size = distributed.get_rank(process_group), distributed.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(f"process {distributed.get_rank()} is not in this process group and holds no tokens")
        self.sent = Sent()

    @classmethod
    def neighbours(cls, size: int, *, timeout: float | None = None) -> ContextGroup:
        """Split all processes into groups of `size` consecutive ranks, and return the group of this process.

        Processes of a group wait at most `timeout` seconds for each other (None: torch.distributed's limit). All
        processes must call this. Raises `ValueError` unless `size` divides their number.
        """
        world = cls()
        if size < 1 or world.size % size:
            raise ValueError(f"size must divide the number of processes, {world.size}, got size={size}")
        limit = None if timeout is None else timedelta(seconds=timeout)
        mine, _ = distributed.new_subgroups(group_size=size, timeout=limit)
        return cls(mine)

    def offset(self, tokens: int) -> int:
        """Return the position of this rank's first token if each rank has `tokens` tokens."""
        return self.rank * tokens

    def part(self, x_BT: Tensor, /) -> Tensor:
        """Return this rank's part of sequences `[B, T, ...]`. Raises `ValueError` unless T is a multiple of P."""
        tokens = x_BT.shape[1]
        if tokens % self.size:
            raise ValueError(
                f"{self.size} processes share a sequence equally: its tokens must be a multiple of {self.size}, "
                f"got {tokens}; truncate or extend it"
            )
        return x_BT.narrow(1, self.offset(tokens // self.size), tokens // self.size)

    def exchange(
        self, outgoing: Sequence[Message], incoming: Sequence[Message], *, backward: bool = False
    ) -> Callable[[], None]:
        """Start sending and receiving tensors, and return a function that waits for all of them.

        Tensors must be contiguous; those between two ranks are matched by order.
        """
        size = sum(x.nbytes for _, x in outgoing)
        self.sent = self.sent.plus(Sent(0, size) if backward else Sent(size, 0))
        operations = [
            *self._operations(distributed.isend, outgoing),
            *self._operations(distributed.irecv, incoming),
        ]
        works = distributed.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def _operations(self, kind: Any, messages: Sequence[Message]) -> list[distributed.P2POp]:
        count: dict[int, int] = {}
        operations = []
        for rank, x in messages:
            tag = count[rank] = count.get(rank, -1) + 1
            operations.append(distributed.P2POp(kind, x, self._global(rank), self.process_group, tag))
        return operations

    def _global(self, rank: int) -> int:
        return rank if self.process_group is None else distributed.get_global_rank(self.process_group, rank)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the ranks' tensors, of equal shape, along `dim`, without gradients."""
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        distributed.all_gather(parts, x, group=self.process_group)
        return torch.cat(parts, dim)

    def last_state(self, state: State, device: torch.device) -> State:
        """Return the last rank's state on every rank, without gradients."""
        last = self.size - 1
        shapes = [state.detach().to("meta")]
        distributed.broadcast_object_list(shapes, self._global(last), self.process_group)

        def shared(x: Tensor) -> Tensor:
            x = x.detach().contiguous() if self.rank == last else torch.empty(x.shape, dtype=x.dtype, device=device)
            distributed.broadcast(x, self._global(last), self.process_group)
            return x

        return (state if self.rank == last else shapes[0]).map(shared)

    def check_same(self, tokens: int, device: torch.device) -> None:
        """Raise `ValueError` unless all ranks hold `tokens` tokens."""
        all_tokens = self.gather(torch.tensor([tokens], device=device)).tolist()
        if len(set(all_tokens)) > 1:
            raise ValueError(f"every process of a context group must hold the same number of tokens, got {all_tokens}")


# Per thread, since other threads of a server read whole sequences. Usually empty, so that the check is free and
# compiles.
_active: dict[int, ContextGroup] = {}


def active_group() -> ContextGroup | None:
    """Return the group that shares the sequences read by this thread, or None outside of `context_parallel`."""
    return _active.get(threading.get_ident()) if _active else None


@contextmanager
def context_parallel(group: ContextGroup, /) -> Iterator[ContextGroup]:
    """Treat the inputs of models and layers called in this block and thread as this rank's part of longer sequences.

    All processes of the group must enter the block and make the same calls. The backward pass may run outside of it.
    """
    with held_by_thread(_active, group):
        yield group


def refuse(owner: str) -> None:
    """Raise `ValueError` if a group is active, since `owner` reads whole sequences."""
    if active_group() is not None:
        raise ValueError(f"{owner} cannot read a sequence that several processes share: leave `context_parallel`")
