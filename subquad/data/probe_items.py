"""A probe as a data set to train on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.config import digest
from subquad.data.probe_config import ProbeConfig
from subquad.data.probes import VERSION, probe_rows

TRAIN, HELD_OUT, MEASURE = range(3)
"""Streams of random numbers after a seed: what is learned, what training measures, what `subquad probe` measures."""


class ProbeItems(Dataset[dict[str, Tensor]]):
    """Sequences of a probe, made as they are read: `{"input_ids": [length], "labels": [length]}`, int64.

    `labels` are -100 where nothing is asked; a causal language model shifts them. An item depends on the probe, its
    seed, the stream and its index alone. Raises `ValueError` for a length that the probe does not fit in.
    """

    def __init__(self, config: ProbeConfig, length: int, items: int, *, stream: int = TRAIN) -> None:
        config.first_asked(length)
        self.config, self.length, self.items, self.stream = config, length, items, stream

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.items:
            raise IndexError(f"example {index} is out of range: there are {self.items}")
        made = probe_rows(self.config, self.length, 1, first=index, seed=(self.config.seed, self.stream))
        return {"input_ids": torch.from_numpy(made.tokens[0]), "labels": torch.from_numpy(made.labels[0])}


@dataclass(frozen=True)
class ProbeCorpus:
    """A probe at one length, split in two; `fingerprint` differs where any sequence does."""

    config: ProbeConfig
    train: ProbeItems
    held_out: ProbeItems
    fingerprint: str

    @classmethod
    def of(cls, config: ProbeConfig, length: int) -> ProbeCorpus:
        """The sequences of `config`, `length` tokens each. Raises `ValueError` as `ProbeItems` does."""
        return cls(
            config=config,
            train=ProbeItems(config, length, config.examples),
            held_out=ProbeItems(config, length, config.held_out, stream=HELD_OUT),
            fingerprint=digest(["probe", VERSION, length, config.to_dict()]),
        )
