"""A run's task: its items and what follows from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

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

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import EvalPrediction

    from subquad.hf import SubquadForCausalLM, SubquadForImages, SubquadForPreTraining, SubquadForSequenceClassification
    from subquad.training.trainer import SubquadTrainer

logger = logging.getLogger(__name__)

Items = Dataset[dict[str, Tensor]]
Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Task:
    """The data of a run and what follows from it."""

    config: TrainConfig
    """The run's configuration with what the data decides filled in."""
    data: Corpus | ImageSet | LabelledCorpus | ProbeCorpus
    train: Items
    count: int
    """Items in `train`."""
    held_out: Items
    """The items of the periodic evaluation: always the same."""
    make_model: Callable[
        [], SubquadForCausalLM | SubquadForImages | SubquadForPreTraining | SubquadForSequenceClassification
    ]
    """Make the model, with first weights from the present random numbers."""
    identity: dict[str, Any]
    """What must stay the same for a run to go on, beside the configuration."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What the run's folder keeps, by name."""
    augment: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    """Change a training batch at random, by torch's random numbers."""
    together: int = 1
    """Items that follow one another in the order of a run, from a multiple of this number on."""
    measure: Callable[[EvalPrediction], dict[str, float]] | None = None
    """Numbers beside the loss, from the logits and labels of the periodic evaluation."""
    trainer: type[SubquadTrainer] | None = None
    """What trains the model, where that is not `SubquadTrainer` (with `lora.rank` its `LoraTrainer`)."""
    settings: Config | None = None
    """What the run's `config.yaml` holds, where that is not `config`."""


def fitted(model: DecoderConfig, size: int, source: str) -> DecoderConfig:
    """The model with the data's vocabulary."""
    if size != model.vocab_size:
        logger.info("model.vocab_size is %d, %s (it was %d)", size, source, model.vocab_size)
    return model.replace(vocab_size=size)


def spread(items: Items, size: int, wanted: int) -> Items:
    """`wanted` items, evenly spread over all `size` of them (all where there are fewer)."""
    count = min(wanted, size)
    return Subset(items, [i * size // count for i in range(count)])


def preparing(console: Console | None, what: str, prepare: Callable[[Progress | None], Prepared]) -> Prepared:
    """What `prepare(progress)` gives; the console, if there is one, hears how far it is."""
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
