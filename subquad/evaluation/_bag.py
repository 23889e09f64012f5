"""A baseline that sees which tokens a sequence has, and not their order.

Shape letters: N examples, V vocabulary, F features, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

EXAMPLES = 10_000
"""Most training sequences that the baseline is fitted on."""
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)
"""L2 penalties to choose from."""
ITERATIONS = 100
BATCH = 64


@dataclass(frozen=True)
class BagOfTokens:
    """`softmax(z W + b)`, multinomial logistic regression on standardised features z of the tokens' frequencies."""

    mean_F: Tensor
    std_F: Tensor
    weight_FC: Tensor
    bias_C: Tensor
    vocab_size: int
    penalty: float
    """The one that was chosen: the L2 penalty's factor."""

    def accuracy(self, items: Dataset[dict[str, Tensor]], count: int) -> float:
        """Share of the first `count` items whose label is the likeliest."""
        features_NF, labels_N = bags(items, range(count), self.vocab_size)
        return _accuracy(self._logits(features_NF), labels_N)

    def _logits(self, features_NF: Tensor) -> Tensor:
        return (features_NF - self.mean_F) / self.std_F @ self.weight_FC + self.bias_C


def fit_bag_of_tokens(
    items: Dataset[dict[str, Tensor]], count: int, /, *, vocab_size: int, classes: int
) -> BagOfTokens:
    """The baseline, fitted on `EXAMPLES` of the first `count` items, evenly spread (all where there are fewer).

    The penalty is the one that does best on every fifth of each class when the others are learned from; then all are.
    The features are `bags`; L-BFGS in float64 from zeros: nothing is random. Raises `ValueError` for fewer than 2
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
    """Features `[N, F]` and labels `[N]` of some items: the frequency of each token and the logarithm of the length.

    Of a pair: those of both, their absolute differences and their products.
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
    """Weights `[F, C]` and biases `[C]` of least cross-entropy plus `penalty` / 2 times the squares of the weights."""
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
