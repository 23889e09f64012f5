"""Accuracy of a sequence classifier, and of a bag-of-tokens baseline that ignores token order.

Shape letters: B batch, N examples, T tokens, V vocabulary, F features, C classes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from subquad.config import Record, check_at_least
from subquad.inference import device_of, inference
from subquad.models import Classifier

EXAMPLES = 10_000
"""The baseline is fitted on at most this many training sequences."""
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)
"""Candidate L2 penalties."""
ITERATIONS = 100
BATCH = 64


@dataclass(frozen=True)
class BagOfTokens:
    """`softmax(z W + b)`: multinomial logistic regression on standardised token frequencies z."""

    mean_F: Tensor
    std_F: Tensor
    weight_FC: Tensor
    bias_C: Tensor
    vocab_size: int
    penalty: float
    """The chosen L2 penalty."""

    def accuracy(self, items: Dataset[dict[str, Tensor]], count: int) -> float:
        """Return the share of the first `count` items that are classified correctly."""
        features_NF, labels_N = bags(items, range(count), self.vocab_size)
        z_NF = (features_NF - self.mean_F) / self.std_F
        return _accuracy(z_NF @ self.weight_FC + self.bias_C, labels_N)


def fit_bag_of_tokens(
    items: Dataset[dict[str, Tensor]], count: int, /, *, vocab_size: int, classes: int
) -> BagOfTokens:
    """Fit the baseline on at most `EXAMPLES` of the first `count` items, evenly spread.

    The penalty is chosen by accuracy on every fifth example of each class, fitting on the rest; the final fit uses all.
    Deterministic: L-BFGS in float64, started at zero, on the features of `bags`. Raises `ValueError` for fewer than 2
    items.
    """
    if count < 2:
        raise ValueError(f"a bag-of-tokens baseline needs at least 2 sequences to learn from, got {count}")
    wanted = min(count, EXAMPLES)
    features_NF, labels_N = bags(items, [i * count // wanted for i in range(wanted)], vocab_size)
    mean_F, std_F = features_NF.mean(0), features_NF.std(0, correction=0)
    std_F = torch.where(std_F > 0, std_F, 1.0)
    z_NF = (features_NF - mean_F) / std_F
    apart_N = torch.zeros(wanted, dtype=torch.bool)
    for label in labels_N.unique():
        apart_N[(labels_N == label).nonzero().flatten()[1::5]] = True
    best = -1.0
    chosen = PENALTIES[0]
    for penalty in PENALTIES:
        weight_FC, bias_C = _fitted(z_NF[~apart_N], labels_N[~apart_N], classes, penalty)
        right = _accuracy(z_NF[apart_N] @ weight_FC + bias_C, labels_N[apart_N])
        if right > best:
            best, chosen = right, penalty
    return BagOfTokens(mean_F, std_F, *_fitted(z_NF, labels_N, classes, chosen), vocab_size, chosen)


def bags(items: Dataset[dict[str, Tensor]], numbers: Any, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return features `[N, F]`, token frequencies and the log of the length, and labels `[N]`.

    A pair of sequences has the features of both, their absolute differences and their products.
    """
    features, labels = [], []
    for batch in DataLoader(Subset(items, numbers), BATCH):
        one = _bag(batch["input_ids"], batch["attention_mask"], vocab_size)
        if "pair_input_ids" in batch:
            other = _bag(batch["pair_input_ids"], batch["pair_attention_mask"], vocab_size)
            one = torch.cat([one, other, (one - other).abs(), one * other], 1)
        features.append(one)
        labels.append(batch["labels"])
    return torch.cat(features), torch.cat(labels)


def _bag(tokens_NT: Tensor, mask_NT: Tensor, vocab_size: int) -> Tensor:
    counts_NV = torch.zeros(len(tokens_NT), vocab_size, dtype=torch.float64)
    counts_NV.scatter_add_(1, tokens_NT, mask_NT.double())
    length_N1 = counts_NV.sum(1, keepdim=True).clamp(min=1)
    return torch.cat([counts_NV / length_N1, length_N1.log()], 1)


def _fitted(z_NF: Tensor, labels_N: Tensor, classes: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Return weights `[F, C]` and biases `[C]` that minimise cross-entropy + `penalty` / 2 * |weights|^2."""
    weight_FC = torch.zeros(z_NF.shape[1], classes, dtype=torch.float64, requires_grad=True)
    bias_C = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_FC, bias_C], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = F.cross_entropy(z_NF @ weight_FC + bias_C, labels_N) + penalty / 2 * weight_FC.square().sum()
            value.backward()
        number = float(value.detach())
        if not math.isfinite(number):
            raise ArithmeticError("the bag-of-tokens baseline could not be fitted: its loss is not finite")
        return number

    optimizer.step(loss)
    return weight_FC.detach(), bias_C.detach()


def _accuracy(logits_NC: Tensor, labels_N: Tensor) -> float:
    return (logits_NC.argmax(1) == labels_N).double().mean().item()


@dataclass(frozen=True)
class ClassEvaluation(Record):
    """The result of `evaluate_classifier`."""

    examples: int
    accuracy: float
    """Share of the examples whose label has the largest logit."""
    loss: float
    """Mean cross-entropy in nats per example."""
    constant: float
    """Accuracy of always predicting the most frequent label of these examples."""
    bag_of_tokens: float | None
    """Accuracy of the bag-of-tokens baseline; None without one."""
    by_class: dict[str, float]
    """Accuracy by class, for classes that occur."""
    seconds: float


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
    """Measure accuracy and loss on the first `count` of `items`.

    Items hold `input_ids`, `attention_mask` and `labels`; pairs of sequences also hold `pair_*`. `classes` names the
    labels; `baseline` is measured on the same items. Runs on the model's device, in eval mode.
    `progress(done, batches)` is called after each batch. Raises `ValueError` for a count or batch size below 1.
    """
    check_at_least(1, count=count, batch_size=batch_size)
    device = device_of(model)
    begin = time.perf_counter()
    logits, labels = [], []
    batches = DataLoader(Subset(items, range(count)), batch_size)
    with inference(model):
        for done, batch in enumerate(batches, 1):
            batch = {name: value.to(device) for name, value in batch.items()}
            read = [batch["input_ids"], batch["attention_mask"].bool()]
            if "pair_input_ids" in batch:
                read += [batch["pair_input_ids"], batch["pair_attention_mask"].bool()]
            logits.append(model(*read).double())
            labels.append(batch["labels"])
            if progress:
                progress(done, len(batches))
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
