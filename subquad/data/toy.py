"""Generate a toy classification task: the majority of the marked symbols."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.data.windows import check_index

VERSION = 1
ZERO, ONE, MARK = range(3)
MARKED = 5
"""Number of marked symbols in a sequence."""
SHORTEST = 3 * MARKED
"""Length of the shortest sequence: five marks, five marked symbols and five more that balance them."""
CLASSES = ("marked zeros", "marked ones")


class MarkedVotes(Dataset[dict[str, Tensor]]):
    """Zeros and ones, five of them after a mark; the label is the majority of the marked symbols.

    Each sequence has as many zeros as ones, so the label does not follow from counts: a marked symbol differs from
    others only by the mark before it. Lengths are odd, from half of `length` to `length`, followed by padding. Both
    labels are equally likely. An item depends only on the seed, the part and its index; `held_out` items come from
    another random stream.

    Raises `ValueError` for a length below 15 or no examples.
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
    """Make one sequence of `tokens` tokens, or one less if that is even, and its label."""
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
