"""Sequences with one label each: what a classifier learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from subquad.data.files import Progress
    from subquad.data.labelled_config import LabelledConfig


@dataclass(frozen=True)
class LabelledCorpus:
    """A classification task, split in three.

    Items are `{"input_ids": [length], "attention_mask": [length], "labels": []}`, all int64; the attention mask is 0 at
    padding, where the ids are 0. With `pairs` they also have `pair_input_ids` and `pair_attention_mask`, the other
    document. `fingerprint` differs where any item does.
    """

    train: Dataset[dict[str, Tensor]]
    held_out: Dataset[dict[str, Tensor]]
    """Measured while training."""
    test: Dataset[dict[str, Tensor]]
    """Measured at the end."""
    vocab_size: int
    classes: tuple[str, ...]
    """What each label means, label 0 first."""
    fingerprint: str
    pairs: bool = False


def labelled_corpus(
    config: LabelledConfig, length: int, /, *, workers: int | None = None, progress: Progress | None = None
) -> LabelledCorpus:
    """The data set `config.dataset` in sequences of `length` tokens: made, read, or opened where that was done before.

    What is made does not depend on `workers`, the number of processes that make it (None: one for each CPU).

    Raises `FileNotFoundError`, `ImportError` or `ValueError` for data that is missing, damaged, in no known layout, has
    a class without an example, or (too_long=refuse) is longer than `length`; they name the file and the place in it.
    """
    if config.dataset == "toy":
        from subquad.data.toy import toy

        return toy(length, examples=config.examples or 50_000, held_out=config.held_out or 1000, seed=config.seed)
    from subquad.data.lra.corpus import lra_corpus

    return lra_corpus(config, length, workers=workers, progress=progress)
