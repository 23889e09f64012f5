"""Sequences with one label each: what a classifier learns from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True)
class LabelledCorpus:
    """A classification task, split in two.

    Items are `{"input_ids": [length], "attention_mask": [length], "labels": []}`, all int64; the attention mask is 0 at
    padding. `fingerprint` differs where any item does.
    """

    train: Dataset[dict[str, Tensor]]
    held_out: Dataset[dict[str, Tensor]]
    vocab_size: int
    classes: tuple[str, ...]
    """What each label means, label 0 first."""
    fingerprint: str
