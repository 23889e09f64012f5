"""The stack of mechanisms that reads whole sequences, bidirectional or causal.

Shape letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subquad.attention import Cost
from subquad.attention._activations import activation_bytes
from subquad.layers.embedding import Embedding
from subquad.layers.norm import build_norm
from subquad.models._initial import initialise
from subquad.models._layers import Block, build_mechanisms, run_blocks
from subquad.models._tokens import check_tokens
from subquad.models.decoder import _added_positions
from subquad.models.encoder_config import EncoderConfig
from subquad.models.perceiver_io import branch_outputs
from subquad.ops.padding import Compaction, check_mask, compaction, real_slots, scatter, zero_padding
from subquad.parallel.group import refuse


class Encoder(nn.Module):
    """`norm(h)`, where `h` are the embeddings after `num_layers` pre-norm blocks of mechanisms.

    Every mechanism is built with causal=`config.causal`: it sees all tokens, or those up to its own. Luna's memory is
    handed from layer to layer. With `gradient_checkpointing = True`, training keeps the input of each block alone.
    """

    reads_whole_sequences = True
    """An output may depend on later tokens: this is no causal language model."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embedding = token_embedding(config)
        self.class_token = nn.Parameter(torch.empty(config.dim)) if config.pooling == "class" else None
        self.layers = nn.ModuleList(Block(config, mixer) for mixer in build_mechanisms(config, causal=config.causal))
        self.norm = build_norm(config.norm, config.dim, config.norm_eps)
        self.branch_outputs = branch_outputs(self)
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=config.init_std)
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """Give one module its first weights, as the decoder's."""
        initialise(module, self.config.init_std, self.branch_outputs, 2 * self.config.num_layers)

    def forward(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """Vectors `[B, T, D]` of `tokens` `[B, T]` after the last norm; zeros at padding.

        `mask` is a bool `[B, T]`, True for a real token. Padding may stand anywhere and does not exist. Raises
        `TypeError` or `ValueError` for wrong shapes and dtypes and for a position outside of a learned table.
        """
        h_BTD, moved = self._run(tokens_BT, mask)
        return self._vectors(h_BTD, moved, tokens_BT.shape[1])

    def pooled(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """One vector `[B, D]` a sequence, as `config.pooling` says; zeros where mean or last find no real token."""
        return self._pool(*self._run(tokens_BT, mask))

    def read(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What `forward` and `pooled` give, from one pass."""
        h_BTD, moved = self._run(tokens_BT, mask)
        return self._vectors(h_BTD, moved, tokens_BT.shape[1]), self._pool(h_BTD, moved)

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
        """What one sequence of `tokens` tokens costs: the mechanisms of all layers and the feed-forward networks."""
        slots = tokens + (self.class_token is not None)
        blocks = [block for block in self.layers if isinstance(block, Block)]
        mixers = [block.attention.cost(slots) for block in blocks]
        linear = sum(2 * slots * linear_weights(block.feedforward) for block in blocks)
        projections = linear + sum(cost.projection_flops for cost in mixers)
        return Cost(
            tokens=tokens,
            score_entries=sum(cost.score_entries for cost in mixers),
            unmasked_entries=sum(cost.unmasked_entries for cost in mixers),
            mixing_flops=sum(cost.mixing_flops for cost in mixers),
            projection_flops=projections,
            backward_flops=sum(cost.backward_flops for cost in mixers) + 2 * linear,
            parameters=sum(p.numel() for p in self.parameters()),
            activation_bytes=read_bytes(self, tokens),
            state_bytes=0,
        )

    def _run(self, tokens_BT: Tensor, mask: Tensor | None) -> tuple[Tensor, Compaction | None]:
        """Vectors after the last norm, the class token's first, of rows that begin with their real tokens."""
        x_BTD, moved = embedded(self.embedding, tokens_BT, mask)
        lengths_B = None if moved is None else moved.lengths_B
        if self.class_token is not None:
            first_B1D = self.class_token.to(x_BTD.dtype).expand(len(x_BTD), 1, -1)
            x_BTD = torch.cat([first_B1D, x_BTD], 1)
            lengths_B = None if lengths_B is None else lengths_B + 1
        return self.norm(run_blocks(self, x_BTD, None, lengths_B)), moved


def token_embedding(config: EncoderConfig) -> Embedding:
    """The table of tokens, with positions added where `config.position` says so (`added_positions`)."""
    return Embedding(config.vocab_size, config.dim, position=_added_positions(config), dropout=config.dropout)


def embedded(embedding: Embedding, tokens_BT: Tensor, mask: Tensor | None) -> tuple[Tensor, Compaction | None]:
    """Vectors of rows that begin with their real tokens, and how they were moved (None: not at all)."""
    check_tokens(tokens_BT)
    refuse("an encoder, which reads whole sequences,")
    if mask is None:
        return embedding(tokens_BT), None
    check_mask(mask, *tokens_BT.shape)
    moved = compaction(mask)
    real_BT = real_slots(moved.lengths_B, tokens_BT.shape[1])
    tokens_BT = tokens_BT.gather(1, moved.order_BT).masked_fill(~real_BT, 0)
    return embedding(tokens_BT, 0, moved.lengths_B), moved


def linear_weights(module: nn.Module) -> int:
    """Entries of the matrices in `module`: multiply-adds for one token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def read_bytes(model: nn.Module, tokens: int) -> int:
    """Bytes that autograd keeps of one sequence."""
    return activation_bytes(model, lambda: torch.zeros(1, tokens, dtype=torch.int64))
