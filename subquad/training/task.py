"""The base of all tasks: items, a model, the loss of a batch, the periodic measurement, the files that are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_model
from torch import Tensor
from torch.utils.data import Dataset, Subset

from subquad.config import Config
from subquad.data import Corpus
from subquad.data.files import Progress
from subquad.data.images import ImageSet
from subquad.data.labelled import LabelledCorpus
from subquad.data.probes import ProbeCorpus
from subquad.models.config import DecoderConfig
from subquad.training.config import TrainConfig
from subquad.training.errors import CheckpointError, StepMemoryError, reading
from subquad.training.memory import explained

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]
Items = Dataset[Batch]
Data: TypeAlias = Corpus | ImageSet | LabelledCorpus | ProbeCorpus
Prepared = TypeVar("Prepared")


class Adapter(NamedTuple):
    """Trains in place of all weights of a new model: makes the model that it is in, and keeps files of its own."""

    make_model: Callable[[], Any]
    save: Callable[[Any, Path], None]
    load: Callable[[Any, Path], None]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The data of a run and what follows from it; a subclass for each `task` says what is learned from them."""

    config: TrainConfig
    """The run's configuration with what the data decides filled in."""
    data: Data
    train: Items
    held_out: Items
    """The items of the periodic evaluation: always the same."""
    identity: dict[str, Any]
    """What must stay the same for a run to go on, beside the configuration."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What the run's folder keeps, by name."""
    augment: Callable[[Batch], Batch] | None = None
    """Change a training batch at random, by torch's random numbers."""
    together: int = 1
    """Items that follow one another in the order of a run, from a multiple of this number on."""
    adapter: Adapter | None = None
    """What trains in place of all weights of a new model (LoRA)."""
    settings: Config | None = None
    """What the run's `config.yaml` holds, where that is not `config`."""

    unit: ClassVar[str] = "token"
    """What a loss is the mean over, in the words of the curves."""
    begins_another: ClassVar[bool] = False
    """Whether another run begins with the weights of this one, in every process."""

    @classmethod
    def check_source(cls, config: TrainConfig) -> None:
        """Raise `ValueError` for data to read without a path, `FileNotFoundError` for a path that is missing."""

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise `ValueError` or `TypeError` for a model that can't learn the task, before any data is read."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, config: TrainConfig, console: Console | None) -> Self:
        """Read or make the data of `config`. Raises `ValueError` as `train` says."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """Items to learn from."""
        return count_items(self.train)

    def new_model(self) -> Any:
        """Make a model, with first weights from the present random numbers."""
        raise NotImplementedError

    def make_model(self) -> Any:
        """Make the model that trains: a new one, or the adapter's."""
        return self.new_model() if self.adapter is None else self.adapter.make_model()

    def first_phase(self) -> TrainConfig | None:
        """Return the run whose weights this one begins with, where there is one to be done before."""
        return None

    def begun_with(self, model: Any) -> Self:
        """Return the task whose model begins with what the first phase has learned."""
        raise NotImplementedError

    def count_labels(self, batch: Batch) -> Tensor | None:
        """Return how many tokens the batch predicts; None where all batches have as many and losses are means."""
        return None

    def loss(self, model: Any, batch: Batch, labels: Tensor | None) -> Tensor:
        """Return the loss of a training batch: the mean, or the sum divided by `labels`."""
        loss: Tensor = model(**batch).loss
        return loss

    def held_out_size(self, size: int) -> int:
        """Return how many held-out items are read at once, of a batch of `size` in training."""
        return size

    def evaluate(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return numbers of each item of a held-out batch, `[B]`; `loss` is the mean of the batch."""
        return {"loss": rows(model(**batch).loss, batch)}

    def measure(self, values: dict[str, np.ndarray]) -> dict[str, float]:
        """Return what is reported of all held-out items: `eval_loss` and more, from what `evaluate` gave of each."""
        return {"eval_loss": values["loss"].mean().item()}

    def save_weights(self, model: Any, folder: Path, weights: dict[str, Tensor] | None) -> None:
        """Write the model to a folder; with `weights` these in place of its own."""
        if self.adapter is not None:
            self.adapter.save(model, folder)
            return
        from subquad.hf.loading import no_bar

        with no_bar():
            model.save_pretrained(folder, state_dict=weights)

    def load_weights(self, model: Any, folder: Path) -> None:
        """Read the weights of a checkpoint. Raises `CheckpointError` where they do not fit."""
        if self.adapter is not None:
            self.adapter.load(model, folder)
            return
        file = weights_file(folder)
        with reading(file):
            load_model(model, file, strict=True)

    @staticmethod
    def window_bytes(config: TrainConfig, length: int) -> float | None:
        """Bytes that training keeps of a window of `length` tokens, by the model's account; None where it has none."""
        return None

    def explain_memory(self, error: BaseException, device: torch.device) -> StepMemoryError:
        """Return the error that says which step was too large, and which smaller one fits."""
        return explained(error, self.config, device, self.window_bytes)


def count_items(items: Any) -> int:
    """Return how many items a map-style dataset has."""
    return len(items)


def rows(loss: Tensor, batch: Batch) -> Tensor:
    """Return the loss of a batch as that of each of its items, `[B]`."""
    return loss.detach().expand(len(batch["input_ids"]))


def weights_file(folder: Path) -> Path:
    """Return the file of the weights in a checkpoint. Raises `CheckpointError` where it is missing."""
    file = folder / "model.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{folder} lacks model.safetensors")
    return file


def fitted(model: DecoderConfig, size: int, source: str) -> DecoderConfig:
    """Return the model's configuration with the data's vocabulary."""
    if size != model.vocab_size:
        logger.info("model.vocab_size is %d, %s (it was %d)", size, source, model.vocab_size)
    return model.replace(vocab_size=size)


def spread(items: Items, wanted: int) -> Items:
    """Return `wanted` items, evenly spread over all of them (all where there are fewer)."""
    every = count_items(items)
    count = min(wanted, every)
    return Subset(items, [i * every // count for i in range(count)])


def preparing(console: Console | None, what: str, prepare: Callable[[Progress | None], Prepared]) -> Prepared:
    """Return `prepare(progress)`; the console, if there is one, hears how far it is."""
    if console is None:
        return prepare(None)
    with console.status(f"preparing the {what}") as status:
        said = ""

        def show(doing: str, done: int, total: int) -> None:
            nonlocal said
            status.update(f"{doing}: {done:,} of {total:,}")
            if doing != said and not console.is_terminal:
                console.print(doing, highlight=False)
            said = doing

        return prepare(show)
