"""The batches of each process: one order of windows for the whole run, dealt out.

Windows carry their numbers, and an error names those that a reading process was at when it died or hung.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, get_worker_info

from subquad.data.order import epoch_order
from subquad.training.errors import ReadError

NOTHING = -1
LOST = re.compile(r"DataLoader worker \(pid|DataLoader timed out")
"""Texts of PyTorch for a worker that died or hangs; another error in one begins with `Caught`."""


class RunOrder(Sampler[int]):
    """The windows of a whole run as one sequence: epoch after epoch, each in its own order, cut to `total`.

    The window at a place depends on the seed and the place alone, so skipping the batches already trained is exact,
    also in the middle of an epoch, and a longer run begins with a shorter one. With `together = P` the windows P i to
    P i + P - 1 follow one another wherever i is in the order of `windows / P`.
    """

    def __init__(self, windows: int, seed: int, total: int, together: int = 1) -> None:
        self.windows, self.seed, self.total, self.together = windows, seed, total, together

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        left, epoch = self.total, 0
        while left > 0:
            for index in epoch_order(self.windows // self.together, self.seed, epoch):
                for part in range(min(left, self.together)):
                    yield int(index) * self.together + part
                left -= min(left, self.together)
                if left == 0:
                    return
            epoch += 1


class DealtBatches(Sampler[list[int]]):
    """The batches of one of `ranks` processes: batch number `rank`, `rank + ranks`, ... of `order` cut into batches.

    With `accumulation` batches a step, step s of all processes together sees the places s G to (s + 1) G of the order,
    G = ranks x size x accumulation: the same windows however G is made up. A last part that doesn't give every process
    a whole batch is left out.
    """

    def __init__(self, order: Sampler[int], size: int, rank: int = 0, ranks: int = 1) -> None:
        self.order, self.size, self.rank, self.ranks = order, size, rank, ranks

    def __len__(self) -> int:
        return len(self.order) // (self.size * self.ranks)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        left, batch = len(self), []
        for place, index in enumerate(self.order):
            if left == 0:
                return
            if place // self.size % self.ranks == self.rank:
                batch.append(index)
                if len(batch) == self.size:
                    yield batch
                    batch, left = [], left - 1


class HeldOutBatches(Sampler[list[int]]):
    """`count` items in batches of `size`, dealt to `ranks` processes, which all get as many batches.

    A process for which no item is left gets the last item again, which `counts` leaves out: every item counts once.
    """

    def __init__(self, count: int, size: int, rank: int = 0, ranks: int = 1) -> None:
        self.count, self.size, self.rank, self.ranks = count, size, rank, ranks

    def __len__(self) -> int:
        return -(-self.count // (self.size * self.ranks))

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            first = (step * self.ranks + self.rank) * self.size
            yield list(range(first, min(first + self.size, self.count))) or [self.count - 1]

    def counts(self, step: int) -> list[int]:
        """The items that count in batch number `step` of each process."""
        firsts = ((step * self.ranks + rank) * self.size for rank in range(self.ranks))
        return [min(self.size, max(0, self.count - first)) for first in firsts]


class NumberedWindows(Dataset[dict[str, Tensor]]):
    """A dataset whose items carry their number as `window`, so that an error can name the batch.

    `reading` `[workers]`, in memory that processes share, holds the window that each reading process is at.
    """

    def __init__(self, windows: Dataset[dict[str, Tensor]], workers: int = 0) -> None:
        self.windows = windows
        self.reading = torch.full((workers,), NOTHING, dtype=torch.int64)
        if workers:
            self.reading.share_memory_()

    def __len__(self) -> int:
        return len(self.windows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        worker = get_worker_info()
        if worker is not None and worker.id < len(self.reading):
            self.reading[worker.id] = index
        item = {**self.windows[index], "window": torch.tensor(index)}
        if worker is not None and worker.id < len(self.reading):
            self.reading[worker.id] = NOTHING
        return item

    def where(self, index: int) -> str:
        """The window of this number and, of a set of shards, the shard that it is in."""
        place: Any = getattr(self.windows, "place", None)
        if place is None:
            return f"window {index}"
        shard, number = place(index)
        tokens: Any = getattr(self.windows, "tokens")  # noqa: B009
        return f"window {index} (number {number} of {tokens.path / tokens.entries[shard].name})"


@contextmanager
def naming(windows: NumberedWindows, seconds: float) -> Iterator[None]:
    """Around all that takes batches: where a worker died or hung, a `ReadError` names what each was reading."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        text = str(error)
        cut_off = not isinstance(error, RuntimeError)  # a batch was on its way from a worker that died
        if isinstance(error, BrokenPipeError) or not len(windows.reading) or not (cut_off or LOST.match(text)):
            raise
        at = {worker: index for worker, index in enumerate(windows.reading.tolist()) if index != NOTHING}
        was = "; ".join(f"worker {worker} was reading {windows.where(index)}" for worker, index in at.items())
        what = f"did not answer for {seconds:g} s (data.worker_timeout)" if "timed out" in text else "died"
        raise ReadError(
            f"a process that reads the data {what}: {was or 'none was at a window'}. Nothing was lost: the run goes on "
            "from its newest checkpoint; data.workers=0 reads without further processes"
        ) from error
