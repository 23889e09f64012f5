"""Which windows a process sees: one global order of a run, dealt out in batches."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from subquad.data.order import epoch_order


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
