"""The ranks of a context group as threads of one process: what real processes do, without starting them."""

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch

from subquad.parallel import ContextGroup, Sent, context_parallel

SECONDS = 30
"""A rank that waits longer for another one is lost."""


class Threads(ContextGroup):
    """One of `size` threads, which write to one another's letter boxes."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self.boxes, self.sent, self.process_group = rank, size, boxes, Sent(), None

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
        x = x.detach().clone()
        for rank in range(self.size):
            self.boxes[self.rank, rank, "gather"].put(x)
        return torch.cat([self.boxes[r, self.rank, "gather"].get(timeout=SECONDS) for r in range(self.size)], dim)

    def last_state(self, state, device):
        last = self.size - 1
        if self.rank == last:
            for rank in range(self.size):
                self.boxes[last, rank, "state"].put(state)
        return self.boxes[last, self.rank, "state"].get(timeout=SECONDS)


def on_ranks(size, work):
    """What `work(group)` returns on each rank, in threads; the first error of any of them is raised, and no letter left."""
    boxes, errors = defaultdict(queue.Queue), []

    def run(rank):
        group = Threads(rank, size, boxes)
        try:
            with context_parallel(group):
                return work(group)
        except BaseException as error:
            errors.append(error)
            raise

    lock = threading.Lock()
    boxes.default_factory = lambda: queue.Queue()
    with lock, ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        futures_done = [f.exception() for f in futures]
    if errors:
        raise next(e for e in errors if not isinstance(e, queue.Empty)) if any(not isinstance(e, queue.Empty) for e in errors) else errors[0]
    assert not any(futures_done)
    left = {key: box.qsize() for key, box in boxes.items() if box.qsize()}
    assert not left, f"sent but not received: {left}"
    return [f.result() for f in futures]
