"""A context group whose ranks are threads of one process."""

import queue
from concurrent.futures import ThreadPoolExecutor

import torch

from subquad.parallel import ContextGroup, Sent

SECONDS = 30
"""Limit of a rank's wait for another one."""


class Threads(ContextGroup):
    """One of `size` threads, which exchange tensors through queues."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self.boxes, self.sent = rank, size, boxes, Sent()

    def exchange(self, outgoing, incoming, *, backward=False):
        nbytes = sum(x.nbytes for _, x in outgoing)
        self.sent = self.sent.plus(Sent(0, nbytes) if backward else Sent(nbytes, 0))
        for rank, x in outgoing:
            assert rank != self.rank
            assert x.is_contiguous()
            self.boxes[self.rank, rank].put(x.detach().clone())

        def wait():
            for rank, x in incoming:
                assert x.is_contiguous()
                letter = self.boxes[rank, self.rank].get(timeout=SECONDS)
                assert (letter.shape, letter.dtype) == (x.shape, x.dtype)
                x.copy_(letter)

        return wait

    def gather(self, x, dim=0):
        for rank in range(self.size):
            self.boxes[self.rank, rank].put(x.detach().clone())
        return torch.cat([self.boxes[rank, self.rank].get(timeout=SECONDS) for rank in range(self.size)], dim)

    def last_state(self, state, device):
        if self.rank == self.size - 1:
            for rank in range(self.size):
                self.boxes[self.rank, rank].put(state)
        return self.boxes[self.size - 1, self.rank].get(timeout=SECONDS)


def on_ranks(size, work):
    """Return `work(group)` of each rank, or raise the first error that isn't a wait for a lost rank."""
    boxes = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, Threads(rank, size, boxes)) for rank in range(size)]
    errors = [future.exception() for future in futures if future.exception()]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, queue.Empty))
    assert not any(box.qsize() for box in boxes.values()), "sent but not received"
    return [future.result() for future in futures]
