"""A context group whose ranks are threads of one process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from subquad.parallel import ContextGroup, Sent
from subquad.state import State

SECONDS = 30
"""Limit of a rank's wait for another one."""
T = TypeVar("T")


class Threads(ContextGroup):
    """One of `size` threads, which exchange tensors through queues."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], queue.SimpleQueue[Any]]) -> None:
        self.rank, self.size, self.boxes, self.sent = rank, size, boxes, Sent()

    def exchange(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]], *, backward: bool = False
    ) -> Callable[[], None]:
        """Send copies, and return a function that waits for what others send."""
        nbytes = sum(x.nbytes for _, x in outgoing)
        self.sent = self.sent.plus(Sent(0, nbytes) if backward else Sent(nbytes, 0))
        for rank, x in outgoing:
            assert rank != self.rank, f"rank {rank} sends to itself"
            assert x.is_contiguous(), f"rank {self.rank} sends a tensor that is not contiguous"
            self.boxes[self.rank, rank].put(x.detach().clone())

        def wait() -> None:
            for rank, x in incoming:
                assert x.is_contiguous(), f"rank {self.rank} receives into a tensor that is not contiguous"
                letter = self.boxes[rank, self.rank].get(timeout=SECONDS)
                found, expected = (letter.shape, letter.dtype), (x.shape, x.dtype)
                assert found == expected, f"rank {self.rank} receives {found} from rank {rank}, expected {expected}"
                x.copy_(letter)

        return wait

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return all ranks' tensors, joined."""
        for rank in range(self.size):
            self.boxes[self.rank, rank].put(x.detach().clone())
        return torch.cat([self.boxes[rank, self.rank].get(timeout=SECONDS) for rank in range(self.size)], dim)

    def last_state(self, state: State, device: Any) -> State:
        """Return the last rank's state."""
        if self.rank == self.size - 1:
            for rank in range(self.size):
                self.boxes[self.rank, rank].put(state)
        last: State = self.boxes[self.size - 1, self.rank].get(timeout=SECONDS)
        return last


def on_ranks(size: int, work: Callable[[Threads], T]) -> list[T]:
    """Return `work(group)` of each rank, or raise the first error that isn't a wait for a lost rank."""
    boxes: dict[tuple[int, int], queue.SimpleQueue[Any]]
    boxes = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, Threads(rank, size, boxes)) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, queue.Empty))
    left = sum(box.qsize() for box in boxes.values())
    assert not left, f"{left} tensors were sent and not received"
    return [future.result() for future in futures]
