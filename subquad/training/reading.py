"""One order of windows for the whole run, distributed over the processes in batches.

Items carry their window numbers, so an error can name the window that a data worker was reading when it died or hung.
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
"""PyTorch's messages for a worker that died or hangs; messages of other errors in workers begin with `Caught`."""


class RunOrder(Sampler[int]):
    """The windows of a whole run as one sequence: shuffled epochs, one after another, cut to `total`.

    The window at each place depends only on the seed and the place. So trained batches can be skipped exactly, within
    an epoch too, and a shorter run is a prefix of a longer one. With `together = P`, the `windows / P` groups of
    windows P i, ..., P i + P - 1 are shuffled as wholes.
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
                    yield index * self.together + part
                left -= min(left, self.together)
                if left == 0:
                    return
            epoch += 1


class DealtBatches(Sampler[list[int]]):
    """Batches `rank`, `rank + ranks`, ... of `order`, cut into batches of `size`.

    With `accumulation` batches per step, step s of all processes sees places s G to (s + 1) G of the order, where
    G = ranks x size x accumulation: only the product matters. A remainder without a whole batch for each process is
    dropped.
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
    """`count` items in batches of `size`, distributed over `ranks` processes, which all get the same number of batches.

    A process without items left gets the last item again, which `counts` excludes: every item counts once.
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
        """Return how many items count in batch `step` of each process."""
        firsts = ((step * self.ranks + rank) * self.size for rank in range(self.ranks))
        return [min(self.size, max(0, self.count - first)) for first in firsts]


class NumberedWindows(Dataset[dict[str, Tensor]]):
    """A dataset that adds each item's number as `window`, so that errors can name it.

    `reading` `[workers]`, in shared memory, holds the window that each worker reads now.
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
        """Describe window `index`, with its shard if the windows come from a set of shards."""
        place: Any = getattr(self.windows, "place", None)
        if place is None:
            return f"window {index}"
        shard, number = place(index)
        tokens: Any = getattr(self.windows, "tokens")  # noqa: B009
        return f"window {index} (number {number} of {tokens.path / tokens.entries[shard].name})"


@contextmanager
def naming(windows: NumberedWindows, seconds: float) -> Iterator[None]:
    """Raise `ReadError`, naming the windows being read, if a worker dies or hangs for `seconds` inside the block."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        text = str(error)
        cut_off = not isinstance(error, RuntimeError)  # the worker died while sending a batch
        if isinstance(error, BrokenPipeError) or not len(windows.reading) or not (cut_off or LOST.match(text)):
            raise
        at = {worker: index for worker, index in enumerate(windows.reading.tolist()) if index != NOTHING}
        was = "; ".join(f"worker {worker} was reading {windows.where(index)}" for worker, index in at.items())
        what = f"did not answer for {seconds:g} s (data.worker_timeout)" if "timed out" in text else "died"
        raise ReadError(
            f"a data worker {what}: {was or 'no worker was reading a window'}. Run the same command again to resume "
            "from the newest checkpoint; data.workers=0 reads without workers"
        ) from error
