"""The base class of tasks: data, model, loss, evaluation and files of a run."""

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
from subquad.disk import aside
from subquad.models.config import DecoderConfig
from subquad.training.config import TrainConfig, with_steps
from subquad.training.errors import CheckpointError, StepMemoryError, reading
from subquad.training.memory import explained

logger = logging.getLogger(__name__)
CONFIG = "config.yaml"

Batch = dict[str, Tensor]
Items = Dataset[Batch]
Data: TypeAlias = Corpus | ImageSet | LabelledCorpus | ProbeCorpus
Prepared = TypeVar("Prepared")


class Adapter(NamedTuple):
    """Trainable factors in a frozen model (LoRA), with their own functions to make, save and load."""

    make_model: Callable[[], Any]
    save: Callable[[Any, Path], None]
    load: Callable[[Any, Path], None]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The data of a run and the settings derived from it; each `task` has a subclass."""

    config: TrainConfig
    """The run's configuration, completed from the data (vocabulary size, image size)."""
    data: Data
    train: Items
    held_out: Items
    """The fixed items of the periodic evaluation."""
    identity: dict[str, Any]
    """Settings besides the configuration that must not change when the run is resumed."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Files to keep in the run's folder and in its checkpoints, by name."""
    augment: Callable[[Batch], Batch] | None = None
    """Change a training batch at random, with torch's random numbers."""
    together: int = 1
    """Size of the groups of consecutive items that stay together when items are shuffled."""
    adapter: Adapter | None = None
    """Trainable factors in a frozen model (LoRA); None trains all weights of a new model."""
    settings: Config | None = None
    """Contents of the run's `config.yaml`, if it is not `config`."""

    unit: ClassVar[str] = "token"
    """Unit that a loss is averaged over, for the curves."""
    begins_another: ClassVar[bool] = False
    """Whether a second training phase starts from the weights of this one, in every process."""

    @classmethod
    def check_source(cls, config: TrainConfig) -> None:
        """Raise `ValueError` if data need a path and have none, and `FileNotFoundError` if the path is missing."""

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise `ValueError` or `TypeError` for a model that doesn't fit the task, before any data are read."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, config: TrainConfig, console: Console | None) -> Self:
        """Read or make the data of `config` and return the task. Raises the `ValueError`s of `train`."""
        raise NotImplementedError

    def write_settings(self, steps: int | None) -> None:
        """Write `config.yaml` into the run's folder, with the number of steps (None: not known yet)."""
        settings: Any = self.settings or self.config
        folder = Path(self.config.run.folder)
        with aside(folder / CONFIG) as draft:
            with_steps(settings, steps).to_file(draft)

    @property
    def count(self) -> int:
        """Number of training items."""
        return count_items(self.train)

    def new_model(self) -> Any:
        """Return a new model, initialised from the current random state."""
        raise NotImplementedError

    def make_model(self) -> Any:
        """Return the model to train: a new one, or the adapter's."""
        model = self.new_model() if self.adapter is None else self.adapter.make_model()
        self.config.loss.apply_to(model)
        return model

    def first_phase(self) -> TrainConfig | None:
        """Return the configuration of the pretraining run whose weights this run starts from, or None."""
        return None

    def begun_with(self, model: Any) -> Self:
        """Return the task whose model starts from the weights of the first phase's `model`."""
        raise NotImplementedError

    def count_labels(self, batch: Batch) -> Tensor | None:
        """Return the number of labels in the batch, or None if all batches have equally many and losses are means."""
        return None

    def loss(self, model: Any, batch: Batch, labels: Tensor | None) -> Tensor:
        """Return the loss of a training batch: the mean, or the sum divided by `labels` if given."""
        return model(**batch).loss

    def held_out_size(self, size: int) -> int:
        """Return the batch size of evaluations, given the training batch `size`."""
        return size

    def evaluate(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return values for each item of a held-out batch, `[B]`; every item gets the batch's mean `loss`."""
        return {"loss": rows(model(**batch).loss, batch)}

    def measure(self, values: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the measures to report, `eval_loss` and others, from the `evaluate` values of all items."""
        return {"eval_loss": values["loss"].mean().item()}

    def save_weights(self, model: Any, folder: Path, weights: dict[str, Tensor] | None) -> None:
        """Write the model to `folder`, with `weights` instead of its own if given."""
        if self.adapter is not None:
            self.adapter.save(model, folder)
            return
        from subquad.hf.loading import no_bar

        with no_bar():
            model.save_pretrained(folder, state_dict=weights)

    def load_weights(self, model: Any, folder: Path) -> None:
        """Load the weights of a checkpoint. Raises `CheckpointError` if they don't fit the model."""
        if self.adapter is not None:
            self.adapter.load(model, folder)
            return
        file = weights_file(folder)
        with reading(file):
            load_model(model, file, strict=True)

    @staticmethod
    def window_bytes(config: TrainConfig, length: int) -> float | None:
        """Return the activation bytes for a window of `length` tokens, by the model's estimate, or None without one."""
        return None

    def explain_memory(self, error: BaseException, device: torch.device) -> StepMemoryError:
        """Return an error that names the step's sizes and smaller ones that fit."""
        return explained(error, self.config, device, self.window_bytes)


def count_items(items: Any) -> int:
    """Return the length of a map-style dataset."""
    return len(items)


def rows(loss: Tensor, batch: Batch) -> Tensor:
    """Repeat the loss of a batch for each of its items, `[B]`."""
    return loss.detach().expand(len(batch["input_ids"]))


def weights_file(folder: Path) -> Path:
    """Return the weights file of a checkpoint. Raises `CheckpointError` if it is missing."""
    file = folder / "model.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{folder} lacks model.safetensors")
    return file


def fitted(model: DecoderConfig, size: int, source: str) -> DecoderConfig:
    """Return `model` with the vocabulary `size` of the data; `source` names where it comes from in the log."""
    if size != model.vocab_size:
        logger.info("model.vocab_size is %d, %s (it was %d)", size, source, model.vocab_size)
    return model.replace(vocab_size=size)


def spread(items: Items, wanted: int) -> Items:
    """Return `wanted` items, evenly spread over all, or all if there are fewer."""
    every = count_items(items)
    count = min(wanted, every)
    return Subset(items, [i * every // count for i in range(count)])


def preparing(console: Console | None, what: str, prepare: Callable[[Progress | None], Prepared]) -> Prepared:
    """Return `prepare(progress)` and show its progress on the console, if there is one."""
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
