"""Reading ahead in processes of its own, and a name for what one of them was reading when it died or hung."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from transformers import Trainer

from subquad.training.config import TrainConfig
from subquad.training.errors import ReadError

NOTHING = -1
LOST = re.compile(r"DataLoader worker \(pid|DataLoader timed out")
"""What PyTorch says of a worker that died or hangs; another error in one begins with `Caught`."""


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


def with_timeout(loader: DataLoader[Any], seconds: float) -> DataLoader[Any]:
    """The loader, which gives up on a worker after so many seconds."""
    if loader.num_workers:
        loader.timeout = seconds
    return loader


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


class ReadingTrainer(Trainer):
    """`transformers.Trainer` whose reading processes have a time limit and a name for what they were at."""

    config: TrainConfig
    train_dataset: NumberedWindows

    def _loader(self, items: Dataset[Any], batches: Sampler[list[int]]) -> DataLoader[Any]:
        """The items in these batches, read by `data.workers` processes."""
        data = self.config.data
        loader: DataLoader[Any] = DataLoader(
            items,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
            num_workers=data.workers,
        )
        return with_timeout(loader, data.worker_timeout)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer does; `ReadError` where a reading process is lost, which a signal may say at any time."""
        with naming(self.train_dataset, self.config.data.worker_timeout):
            return super().train(*args, **kwargs)
