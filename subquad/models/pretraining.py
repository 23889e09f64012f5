"""Pretraining of encoders on unlabelled sequences, by hidden tokens or by the next token.

Self-pretraining on a task's own sequences: Amos, Berant and Gupta 2023, arXiv:2310.02980.

Shape letters: B batch, T tokens, D model width, V vocabulary, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from subquad.layers.criterion import CrossEntropy
from subquad.layers.head import new_head
from subquad.models.build import build_encoder
from subquad.models.decoder import next_tokens
from subquad.models.encoder import Encoder, EncoderConfig
from subquad.models.perceiver import LATENT_STD, PerceiverEncoder

Objective = Literal["denoise", "causal"]
cross_entropy = CrossEntropy()


@dataclass(frozen=True)
class Hiding:
    """How tokens to hide are drawn, and what replaces them."""

    fraction: float
    """Fraction of a sequence's tokens; at least one token is hidden."""
    random_fraction: float
    """Probability that a random token replaces a hidden one, instead of the mask token."""

    def __call__(
        self, tokens_BT: Tensor, mask: Tensor | None, mask_token: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens with some hidden, and a bool `[B, T]` that marks them.

        Of a row's n real tokens `round(fraction * n)` are hidden, at least one; all choices are equally likely.
        """
        device, (B, T) = tokens_BT.device, tokens_BT.shape
        scores_BT = torch.rand(B, T, device=device, generator=generator)
        n_B1 = torch.full((B, 1), T, device=device)
        if mask is not None:
            scores_BT = scores_BT.masked_fill(~mask, 2.0)
            n_B1 = mask.sum(1, keepdim=True)
        count_B1 = (self.fraction * n_B1).round().clamp(min=1).minimum(n_B1)
        hidden_BT = scores_BT.argsort(1).argsort(1) < count_B1
        shown_BT = tokens_BT.masked_fill(hidden_BT, mask_token)
        if self.random_fraction:
            replaced_BT = hidden_BT & (torch.rand(B, T, device=device, generator=generator) < self.random_fraction)
            others_BT = torch.randint(mask_token, (B, T), device=device, generator=generator)
            shown_BT = torch.where(replaced_BT, others_BT.to(tokens_BT.dtype), shown_BT)
        return shown_BT, hidden_BT


class PretrainingModel(nn.Module):
    """`logits = h E^T`: an encoder whose vectors `h` predict tokens by its own table `E`.

    With objective `denoise`, hidden tokens are predicted from all others; the mask token is the table's last row. With
    `causal`, a causal encoder predicts the next token. Nothing is added to the encoder, so its weights fit a
    classifier, except that `perceiver_io` learns a query for each position. Raises `ValueError` for an objective that
    the encoder cannot learn.
    """

    def __init__(self, config: EncoderConfig, objective: Objective) -> None:
        super().__init__()
        if config.attention == "perceiver":
            raise ValueError(
                "attention 'perceiver' keeps no vector for each token and cannot predict tokens; choose perceiver_io "
                "or a mechanism"
            )
        if objective == "causal" and not config.causal:
            raise ValueError("only a causal encoder can predict the next token; set causal=true")
        self.config, self.objective = config, objective
        self.encoder = build_encoder(config)
        self.head = new_head(config.dim, config.vocab_size, bias=False, table=self.encoder.embedding.tokens)
        self.queries = None
        if isinstance(self.encoder, PerceiverEncoder):
            self.queries = nn.Parameter(torch.empty(config.max_positions, config.dim))
            nn.init.trunc_normal_(self.queries, std=LATENT_STD, a=-2 * LATENT_STD, b=2 * LATENT_STD)
            assert self.encoder.query is not None
            self.encoder.query.requires_grad_(False)  # used by classifiers only

    def initialise(self, module: nn.Module) -> None:
        """Set one module's initial weights."""
        if module is not self.head:  # its weights are the table's
            self.encoder.initialise(module)

    @property
    def predicted(self) -> int:
        """Tokens that are predicted: all but the mask token."""
        return self.head.out_features - (self.objective == "denoise")

    def vectors(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """Return one vector for each token, `[B, T, D]`; zeros at padding."""
        if isinstance(self.encoder, PerceiverEncoder):
            assert self.queries is not None
            answers_BTD: Tensor = self.encoder(tokens_BT, mask, queries=self.queries)
            return answers_BTD
        vectors_BTD: Tensor = self.encoder(tokens_BT, mask)
        return vectors_BTD

    def forward(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """Return logits `[B, T, V]` of `tokens` `[B, T]`, none hidden; with `denoise`, V leaves the mask token out."""
        logits_BTV: Tensor = self.head(self.vectors(tokens_BT, mask))
        return logits_BTV[..., : self.predicted]

    def loss(
        self,
        tokens_BT: Tensor,
        hiding: Hiding,
        /,
        mask: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy in nats; `generator` draws the hidden tokens (None: torch's default)."""
        if self.objective == "denoise":
            shown_BT, hidden_BT = hiding(tokens_BT, mask, mask_token(self.encoder), generator)
            return denoising_loss(self.head, self.vectors(shown_BT, mask), tokens_BT, hidden_BT)
        labels_BT = next_tokens(tokens_BT, mask)
        return cross_entropy([self.vectors(tokens_BT, mask)], labels_BT, self.head, None, self.predicted)


def check_hiding(mask_fraction: float, random_fraction: float, group: str = "") -> None:
    """Raise `ValueError` for a fraction of hidden tokens, or of random ones among them, that is out of range."""
    if not 0 < mask_fraction < 1:
        raise ValueError(f"{group}mask_fraction must be above 0 and below 1, got {mask_fraction}")
    if not 0 <= random_fraction <= 1:
        raise ValueError(f"{group}random_fraction must lie between 0 and 1, got {random_fraction}")


def mask_token(encoder: Encoder | PerceiverEncoder) -> int:
    """Return the mask token: the table's last row."""
    return encoder.embedding.tokens.num_embeddings - 1


def denoising_loss(head: nn.Linear, h_BTD: Tensor, tokens_BT: Tensor, hidden_BT: Tensor, /) -> Tensor:
    """Return the mean cross-entropy of the hidden tokens in nats, from vectors `[B, T, D]`; 0 if none is hidden.

    The last row of the head, the mask token's, predicts nothing.
    """
    passes, labels_1N = [h_BTD[hidden_BT][None]], tokens_BT[hidden_BT][None]
    return cross_entropy(passes, labels_1N, head, None, head.out_features - 1)
