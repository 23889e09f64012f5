"""A classification task that is made up, seeded and needs no download: which way did the marked symbols vote?"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.data.windows import check_index

VERSION = 1
ZERO, ONE, MARK = range(3)
MARKED = 5
"""Marked symbols of a sequence."""
SHORTEST = 3 * MARKED
"""Tokens of the shortest sequence: five marks, five marked symbols, and as many that balance them."""
CLASSES = ("marked zeros", "marked ones")


class MarkedVotes(Dataset[dict[str, Tensor]]):
    """Zeros and ones, five of them after a mark; the label is what most of the marked ones are.

    Each sequence has as many zeros as ones, so the tokens without their order say nothing about the label: each marked
    symbol has to be told apart by the token before it. Lengths are odd, from half of `length` to `length`; padding
    follows. Both labels are equally likely. An item depends on the seed, the part and its index alone: `held_out` items
    come from another stream of random numbers than the others.

    Raises `ValueError` for a length below 15 and for no examples.
    """

    def __init__(self, length: int, examples: int, *, seed: int = 0, held_out: bool = False) -> None:
        if length < SHORTEST:
            raise ValueError(f"the toy task needs sequences of at least {SHORTEST} tokens, got length={length}")
        if examples < 1:
            raise ValueError(f"the toy task needs at least one example, got examples={examples}")
        self.length, self.examples, self.seed, self.held_out = length, examples, seed, held_out

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        check_index(self, index, "example")
        rng = np.random.default_rng([self.seed, self.held_out, index])
        tokens, label = votes(rng, int(rng.integers(max(SHORTEST, self.length // 2), self.length + 1)))
        padded = np.zeros(self.length, dtype=np.int64)
        padded[: len(tokens)] = tokens
        return {
            "input_ids": torch.from_numpy(padded),
            "attention_mask": (torch.arange(self.length) < len(tokens)).long(),
            "labels": torch.tensor(label),
        }


def votes(rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, int]:
    """Make one sequence of `tokens` tokens, or one less where that is even, and its label."""
    half = (tokens - MARKED) // 2
    label = int(rng.integers(2))
    winners = int(rng.integers(MARKED // 2 + 1, MARKED + 1))
    marked = np.repeat([label, 1 - label], [winners, MARKED - winners])
    ones = half - int(marked.sum())
    plain = np.repeat([ZERO, ONE], [2 * half - MARKED - ones, ones])
    symbols = np.concatenate([marked, plain])
    order = rng.permutation(2 * half)
    pairs = np.stack([np.where(order < MARKED, MARK, -1), symbols[order]], 1).ravel()
    return pairs[pairs >= 0], label
