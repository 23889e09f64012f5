"""Classifiers of sequences and of pairs of sequences.

Shape letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.models.build import build_encoder
from subquad.models.encoder import EncoderConfig
from subquad.ops.counting import Cost, cost_of, one_sequence


class TowerHead(nn.Module):
    """`GELU([a, b, a - b, a * b] W + c) U + d`: logits of a pair from the vectors of both sequences.

    As in Long Range Arena (Tay et al. 2020, arXiv:2011.04006), where one encoder reads both.
    """

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(4 * dim, dim)
        self.out = nn.Linear(dim, num_classes)

    def forward(self, a_BD: Tensor, b_BD: Tensor) -> Tensor:
        """Return logits `[B, classes]`."""
        joined = torch.cat([a_BD, b_BD, a_BD - b_BD, a_BD * b_BD], -1)
        return self.out(F.gelu(self.hidden(joined)))


class Classifier(nn.Module):
    """`logits = dropout(pooled) W^T + b`, on an `Encoder` or, if `attention` names one, a Perceiver.

    With `towers=2` the encoder reads two sequences and a `TowerHead` reads both vectors, each after dropout.
    """

    reads_whole_sequences = True
    """Outputs may depend on later tokens, unlike those of a causal language model."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_encoder(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head: nn.Module
        if config.towers == 2:
            self.head = TowerHead(config.dim, config.num_classes)
        else:
            self.head = nn.Linear(config.dim, config.num_classes)
        self.head.apply(self.initialise)

    def get_output_embeddings(self) -> nn.Module:
        """Return the layers after the encoder, under the name that transformers uses."""
        return self.head

    def initialise(self, module: nn.Module) -> None:
        """Set one module's initial weights."""
        self.encoder.initialise(module)

    def forward(
        self,
        tokens_BT: Tensor,
        /,
        mask: Tensor | None = None,
        pair_tokens: Tensor | None = None,
        pair_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[B, classes]` of `tokens` `[B, T]`; `mask` is a bool `[B, T]`, True for a real token.

        With `towers=2`, `pair_tokens` `[B, U]` and `pair_mask` are the other sequence. Raises `ValueError` if it is
        missing or, with `towers=1`, given.
        """
        check_pair(self.config, pair_tokens, pair_mask)
        _, a_BD = self.encoder(tokens_BT, mask, pooled=True)
        return self.logits(a_BD, None if pair_tokens is None else self.encoder(pair_tokens, pair_mask, pooled=True)[1])

    def logits(self, a_BD: Tensor, b_BD: Tensor | None = None, /) -> Tensor:
        """Return logits `[B, classes]` from the vector of each sequence, or from both vectors of each pair."""
        vectors = [self.dropout(vector) for vector in (a_BD, b_BD) if vector is not None]
        return self.head(*vectors)

    def num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel() for p in self.parameters())

    def cost(self, tokens: int) -> Cost:
        """Return the cost of encoder and head for one sequence of `tokens` tokens, or for a pair of such sequences."""
        pair = self.config.towers == 2

        def run(tokens_BT: Tensor) -> tuple[Tensor, None]:
            return self(tokens_BT, None, tokens_BT if pair else None), None

        return cost_of(self, tokens, run, partial(one_sequence, tokens))


def check_pair(config: EncoderConfig, pair_tokens: Tensor | None, pair_mask: Tensor | None) -> None:
    """Raise `ValueError` if `towers=2` and the pair is missing, or if `towers=1` and one is given."""
    if config.towers == 2 and pair_tokens is None:
        raise ValueError("this classifier labels pairs of sequences (towers=2), but the second sequence is missing")
    if config.towers == 1 and (pair_tokens is not None or pair_mask is not None):
        raise ValueError("this classifier labels single sequences, but a pair was given; towers=2 makes one for pairs")
