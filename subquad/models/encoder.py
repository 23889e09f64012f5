"""An encoder: a stack of mechanisms that reads whole sequences, bidirectionally or causally.

Shape letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subquad.layers.positions import Embedding
from subquad.models.blocks import (
    Block,
    branch_outputs,
    build_mechanisms,
    check_tokens,
    initialise,
    last_norm,
    run_blocks,
    token_embedding,
)
from subquad.models.config import DecoderConfig, check_choices
from subquad.ops.counting import Cost, cost_of, one_sequence
from subquad.ops.padding import Compaction, Lengths, check_mask, compaction, real_slots, scatter, zero_padding
from subquad.parallel.group import refuse

Pooling = Literal["mean", "last", "class"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """Settings of an encoder, a stack of the decoder's layers, and of a classifier on it.

    The decoder's fields keep their meaning, except that there is no head over the vocabulary (`tie_embeddings` has no
    effect, `lookup` and `head_bias` are refused) and that the layers run once (`loops` is refused).
    """

    labels_sequences = True

    num_classes: int = 2
    """Number of classes."""
    pooling: Pooling = "mean"
    """Vector that represents a sequence: the mean of its vectors, the last one, or that of a class token put before it.
    """
    causal: bool = False
    """Let a token see only itself and earlier ones, by the causal form of the mechanisms."""
    towers: int = 1
    """Sequences in an example: 1, or 2 that one encoder reads separately and the head compares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(num_classes=2)
        check_choices(self, "pooling")
        if self.towers not in (1, 2):
            raise ValueError(f"towers must be 1 or 2, got {self.towers}")
        if self.causal and self.pooling == "class":
            raise ValueError(
                "pooling='class' does not work with causal=true: the class token comes first and would see no other "
                "token; choose pooling mean or last"
            )
        self.check_default("an encoder", "loops", "lookup", "logit_divisor", "head_bias")


class Encoder(nn.Module):
    """`norm(h)`, where `h` are the embeddings after `num_layers` blocks of mechanisms (post-norm: `h`).

    Every mechanism is built with `causal=config.causal`: a token sees all tokens, or those up to itself. Luna's memory
    passes from layer to layer. With `gradient_checkpointing = True`, training keeps only the input of each block.
    """

    reads_whole_sequences = True
    """Outputs may depend on later tokens, unlike those of a causal language model."""
    vector_per_token = True
    """Whether `forward` returns a vector for each token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embedding = token_embedding(config)
        self.class_token = nn.Parameter(torch.empty(config.dim)) if config.pooling == "class" else None
        self.layers = nn.ModuleList(Block(config, mixer) for mixer in build_mechanisms(config, causal=config.causal))
        self.norm = last_norm(config)
        self.branch_outputs = branch_outputs(self)
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=config.init_std)
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """Set one module's initial weights, as in the decoder."""
        initialise(module, self.config.init_std, self.branch_outputs, self.config.branches)

    def forward(self, tokens_BT: Tensor, /, mask: Tensor | None = None, *, pooled: bool = False) -> Any:
        """Return the vectors `[B, T, D]` of `tokens` `[B, T]` after the last norm; zeros at padding.

        With `pooled` return these and one vector a sequence, `[B, D]`, by `config.pooling`; mean and last give zeros if
        no token is real. `mask` is a bool `[B, T]`, True for a real token; padding may stand anywhere and changes
        nothing. Raises `TypeError` or `ValueError` for wrong shapes and dtypes and for a position beyond a learned
        table.
        """
        h_BTD, moved = self._run(tokens_BT, mask)
        vectors_BTD = self._vectors(h_BTD, moved, tokens_BT.shape[1])
        return (vectors_BTD, self._pool(h_BTD, moved)) if pooled else vectors_BTD

    def _vectors(self, h_BTD: Tensor, moved: Compaction | None, tokens: int) -> Tensor:
        h_BTD = h_BTD[:, h_BTD.shape[1] - tokens :]
        return h_BTD if moved is None else scatter(h_BTD, moved)

    def _pool(self, h_BTD: Tensor, moved: Compaction | None) -> Tensor:
        if self.config.pooling == "class":
            return h_BTD[:, 0]
        B, T, _ = h_BTD.shape
        n_B = torch.full((B,), T, device=h_BTD.device) if moved is None else moved.lengths_B
        h_BTD = zero_padding(h_BTD, n_B)
        if self.config.pooling == "mean" or T == 0:
            return h_BTD.sum(1) / n_B.clamp(min=1)[:, None]
        last_B11 = (n_B - 1).clamp(min=0)[:, None, None]
        return h_BTD.gather(1, last_B11.expand(B, 1, h_BTD.shape[2])).squeeze(1)

    def cost(self, tokens: int) -> Cost:
        """Return the cost of one sequence of `tokens` tokens."""
        return cost_of(self, tokens, lambda tokens_BT: (self(tokens_BT), None), partial(one_sequence, tokens))

    def _run(self, tokens_BT: Tensor, mask: Tensor | None) -> tuple[Tensor, Compaction | None]:
        """Return vectors after the last norm, the class token's first; real tokens lead each row."""
        x_BTD, moved = embedded(self.embedding, tokens_BT, mask)
        layout = None if moved is None else Lengths(moved.lengths_B)
        if self.class_token is not None:
            first_B1D = self.class_token.to(x_BTD.dtype).expand(x_BTD.shape[0], 1, -1)
            x_BTD = torch.cat([first_B1D, x_BTD], 1)
            layout = None if layout is None else Lengths(layout.lengths_B + 1)
        return self.norm(run_blocks(self, x_BTD, None, layout)), moved


def embedded(embedding: Embedding, tokens_BT: Tensor, mask: Tensor | None) -> tuple[Tensor, Compaction | None]:
    """Return embeddings with the real tokens leading each row, and how tokens were moved (None: not at all)."""
    check_tokens(tokens_BT)
    refuse("an encoder, which reads whole sequences,")
    if mask is None:
        return embedding(tokens_BT), None
    check_mask(mask, *tokens_BT.shape)
    moved = compaction(mask)
    real_BT = real_slots(moved.lengths_B, tokens_BT.shape[1])
    tokens_BT = tokens_BT.gather(1, moved.order_BT).masked_fill(~real_BT, 0)
    return embedding(tokens_BT, 0, moved.lengths_B), moved
