"""How well a classifier labels sequences. Shape letters: B batch, T tokens, C classes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from subquad.evaluation._bag import BagOfTokens
from subquad.models import Classifier


@dataclass(frozen=True)
class ClassEvaluation:
    """What `evaluate_classifier` measured."""

    examples: int
    accuracy: float
    """Share of the examples whose label has the largest logit."""
    loss: float
    """Mean cross-entropy in nats an example."""
    constant: float
    """Accuracy of always giving the label that is most frequent in these examples."""
    bag_of_tokens: float | None
    """Accuracy of logistic regression on the tokens' frequencies, fitted on training examples (None: not asked for)."""
    by_class: dict[str, float]
    """Accuracy on the examples of each class that occurs."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@torch.no_grad()
def evaluate_classifier(
    model: Classifier,
    items: Dataset[dict[str, Tensor]],
    count: int,
    /,
    classes: Sequence[str],
    *,
    batch_size: int = 8,
    baseline: BagOfTokens | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ClassEvaluation:
    """Accuracy and loss on the first `count` of `items` (`input_ids`, `attention_mask`, `labels`; of pairs `pair_*`).

    `classes` names the labels; `baseline` is measured on the same items. Runs where the model is, without dropout.
    `progress(done, batches)` is called after each batch. Raises `ValueError` for a count or a batch size below 1.
    """
    for name, value in (("count", count), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    device, training = next(model.parameters()).device, model.training
    model.eval()
    begin = time.perf_counter()
    logits, labels = [], []
    batches = DataLoader(Subset(items, range(count)), batch_size)
    for done, batch in enumerate(batches, 1):
        batch = {name: value.to(device) for name, value in batch.items()}
        logits.append(_logits(model, batch).double())
        labels.append(batch["labels"])
        if progress:
            progress(done, len(batches))
    model.train(training)
    logits_BC, labels_B = torch.cat(logits), torch.cat(labels)
    right_B = logits_BC.argmax(-1) == labels_B
    present = labels_B.unique().tolist()
    return ClassEvaluation(
        examples=count,
        accuracy=right_B.double().mean().item(),
        loss=F.cross_entropy(logits_BC, labels_B).item(),
        constant=max((labels_B == label).double().mean().item() for label in present),
        bag_of_tokens=None if baseline is None else baseline.accuracy(items, count),
        by_class={classes[label]: right_B[labels_B == label].double().mean().item() for label in present},
        seconds=time.perf_counter() - begin,
    )


def _logits(model: Classifier, batch: dict[str, Tensor]) -> Tensor:
    read = [batch["input_ids"], batch["attention_mask"].bool()]
    if "pair_input_ids" in batch:
        read += [batch["pair_input_ids"], batch["pair_attention_mask"].bool()]
    return model(*read)
