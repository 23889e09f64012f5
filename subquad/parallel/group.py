"""The processes that share one sequence, and the exchanges between them: torch.distributed, with the bytes counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from subquad.state import State

Message = tuple[int, Tensor]
"""A rank, and the tensor that goes there or is filled from there."""


class Sent(NamedTuple):
    """Bytes that one process sends to others."""

    forward: int = 0
    backward: int = 0

    def plus(self, other: Sent) -> Sent:
        """Both together."""
        return Sent(self.forward + other.forward, self.backward + other.backward)


class ContextGroup:
    """P processes that share sequences: of T tokens rank r holds T / P, from number `r T / P` on.

    `process_group` is torch.distributed's (None: all processes). `sent` counts the bytes that this process has sent for
    the layers' exchanges; those of a recomputation (`gradient_checkpointing`) count as forward again. Raises
    `ValueError` where torch.distributed has not been started and where this process is not in the group.
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
        """Groups of `size` processes each, in the order of their ranks; the one that this process is in.

        They wait `timeout` seconds for each other (None: as long as torch.distributed does). All processes must call
        it. Raises `ValueError` unless `size` divides their number.
        """
        world = cls()
        if size < 1 or world.size % size:
            raise ValueError(f"groups must share {world.size} processes equally, got groups of size={size}")
        limit = None if timeout is None else timedelta(seconds=timeout)
        mine, _ = distributed.new_subgroups(group_size=size, timeout=limit)
        return cls(mine)

    def offset(self, tokens: int) -> int:
        """The position of this rank's first token, where each rank has `tokens`."""
        return self.rank * tokens

    def part(self, x_BT: Tensor, /) -> Tensor:
        """This rank's part of whole sequences `[B, T, ...]`. Raises `ValueError` unless T is a multiple of P."""
        tokens = x_BT.shape[1]
        if tokens % self.size:
            raise ValueError(
                f"{self.size} processes share a sequence equally: its tokens must be a multiple of {self.size}, "
                f"got {tokens}; cut or fill it up"
            )
        return x_BT.narrow(1, self.offset(tokens // self.size), tokens // self.size)

    def exchange(
        self, outgoing: Sequence[Message], incoming: Sequence[Message], *, backward: bool = False
    ) -> Callable[[], None]:
        """Begin to send tensors to ranks and to fill tensors from others; what is returned waits for all of it.

        All tensors must be contiguous; between two ranks they are matched by their order.
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
        """The ranks' tensors, which must agree in shape, one after another along `dim`; without gradients."""
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        distributed.all_gather(parts, x, group=self.process_group)
        return torch.cat(parts, dim)

    def last_state(self, state: State, device: torch.device) -> State:
        """The last rank's state, on every rank; without gradients."""
        last = self.size - 1
        shapes = [state.map(lambda x: x.detach().to("meta"))]
        distributed.broadcast_object_list(shapes, self._global(last), self.process_group)

        def shared(x: Tensor) -> Tensor:
            x = x.detach().contiguous() if self.rank == last else torch.empty(x.shape, dtype=x.dtype, device=device)
            distributed.broadcast(x, self._global(last), self.process_group)
            return x

        return (state if self.rank == last else shapes[0]).map(shared)

    def check_same(self, tokens: int, device: torch.device) -> None:
        """Raise `ValueError` unless all ranks hold this many tokens."""
        all_tokens = self.gather(torch.tensor([tokens], device=device)).tolist()
        if len(set(all_tokens)) > 1:
            raise ValueError(
                f"every process of a context group must hold equally many tokens of a sequence, got {all_tokens}"
            )


# By thread: a server's other threads read whole sequences. Empty almost always, which costs nothing and compiles.
_active: dict[int, ContextGroup] = {}


def active_group() -> ContextGroup | None:
    """The group whose processes share the sequences that this thread reads; None outside of `context_parallel`."""
    return _active.get(threading.get_ident()) if _active else None


@contextmanager
def context_parallel(group: ContextGroup, /) -> Iterator[ContextGroup]:
    """Within the block, what models and layers are given in this thread is this rank's part of longer sequences.

    All processes of the group must enter it and make the same calls. The backward pass may run outside of the block.
    """
    thread = threading.get_ident()
    before = _active.get(thread)
    _active[thread] = group
    try:
        yield group
    finally:
        if before is None:
            del _active[thread]
        else:
            _active[thread] = before


def refuse(owner: str) -> None:
    """Raise `ValueError` where a group is active: `owner` reads whole sequences."""
    if active_group() is not None:
        raise ValueError(f"{owner} cannot read a sequence that several processes share: leave `context_parallel`")
