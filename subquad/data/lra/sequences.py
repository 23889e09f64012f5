"""Items of a stored data set: chosen by seed, cut to a length, padded."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.data.lra.store import Store

logger = logging.getLogger(__name__)


class Sequences(Dataset[dict[str, Tensor]]):
    """The sequences `chosen` of one part of a store, as `LabelledCorpus` describes its items.

    `cut` counts the sequences of which only the first `length` tokens are read.
    """

    def __init__(self, store: Store, part: str, length: int, chosen: np.ndarray) -> None:
        self.shard, self.pairs, self.length, self.chosen = store.tokens[part], store.pairs, length, chosen
        self.labels, self.index = store.labels[part][chosen], store.index[part][chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} is out of range: there are {len(self)}")
        item = {"labels": torch.tensor(int(self.labels[index]))}
        for i, name in enumerate(("", "pair_")[: 1 + self.pairs]):
            tokens = self.sequence(index, i)
            padded = np.zeros(self.length, dtype=np.int64)
            padded[: len(tokens)] = tokens
            item[f"{name}input_ids"] = torch.from_numpy(padded)
            item[f"{name}attention_mask"] = (torch.arange(self.length) < len(tokens)).long()
        return item

    def sequence(self, index: int, second: int = 0) -> np.ndarray:
        """The tokens of sequence `index`, without padding; of a pair the first document, or the second."""
        document = int(self.index[index, second])
        start, end = self.shard.documents[document : document + 2]
        return self.shard.tokens[start : min(int(end), int(start) + self.length)]

    @property
    def full_lengths(self) -> np.ndarray:
        """Tokens of each sequence before it is cut, `[N, 1]`, or `[N, 2]` for pairs."""
        return np.diff(self.shard.documents)[self.index]

    @property
    def cut(self) -> int:
        """Sequences that are longer than `length`."""
        return int((self.full_lengths > self.length).sum())


def choose(labels: np.ndarray, wanted: int | None, seed: int) -> np.ndarray:
    """`wanted` of the examples with these labels (None: all), in their order, each class in its share (rounded).

    Raises `ValueError` where there are fewer.
    """
    if wanted is None or wanted == len(labels):
        return np.arange(len(labels))
    if wanted > len(labels):
        raise ValueError(f"the data set has {len(labels):,} such examples, not {wanted:,}")
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    rank = np.empty(len(labels))
    for label in np.unique(labels):
        mine = order[labels[order] == label]
        rank[mine] = (np.arange(len(mine)) + 0.5) / len(mine)  # in [0, 1): the least of all classes are their shares
    return np.sort(order[np.argsort(rank[order], kind="stable")[:wanted]])
