"""Models that read whole sequences: the bidirectional stack, Perceiver over tokens, and the classifier on either.

Shape letters: B batch, T tokens, D model width, C channels, L latents.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subquad.attention import Cost
from subquad.attention._activations import activation_bytes
from subquad.layers.embedding import Embedding
from subquad.layers.norm import build_norm
from subquad.models._initial import initialise
from subquad.models._layers import Block, build_mechanisms
from subquad.models.decoder import _added_positions
from subquad.models.encoder_config import EncoderConfig
from subquad.models.perceiver_io import (
    LATENT_STD,
    CrossBlock,
    Perceiver,
    PerceiverIO,
    branch_outputs,
    fourier_features,
    perceiver_options,
)
from subquad.models.stacks import stack_of
from subquad.ops.padding import Compaction, check_mask, compaction, real_slots, scatter, zero_padding


class Encoder(nn.Module):
    """`norm(h)`, where `h` are the embeddings after `num_layers` pre-norm blocks of mechanisms that see all tokens.

    Every mechanism is built with causal=False. Luna's memory is handed from layer to layer. With
    `gradient_checkpointing = True`, training keeps the input of each block alone.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embedding = _embedding(config)
        self.class_token = nn.Parameter(torch.empty(config.dim)) if config.pooling == "class" else None
        self.layers = nn.ModuleList(Block(config, mixer) for mixer in build_mechanisms(config, causal=False))
        self.norm = build_norm(config.norm, config.dim)
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
        h_BTD = h_BTD[:, h_BTD.shape[1] - tokens_BT.shape[1] :]
        return h_BTD if moved is None else scatter(h_BTD, moved)

    def pooled(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """One vector `[B, D]` a sequence, as `config.pooling` says; zeros where mean or last find no real token."""
        h_BTD, moved = self._run(tokens_BT, mask)
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
        linear = sum(2 * slots * _linear_weights(block.feedforward) for block in blocks)
        projections = linear + sum(cost.projection_flops for cost in mixers)
        return Cost(
            tokens=tokens,
            score_entries=sum(cost.score_entries for cost in mixers),
            unmasked_entries=sum(cost.unmasked_entries for cost in mixers),
            mixing_flops=sum(cost.mixing_flops for cost in mixers),
            projection_flops=projections,
            backward_flops=sum(cost.backward_flops for cost in mixers) + 2 * linear,
            parameters=sum(p.numel() for p in self.parameters()),
            activation_bytes=_activation_bytes(self, tokens),
            state_bytes=0,
        )

    def _run(self, tokens_BT: Tensor, mask: Tensor | None) -> tuple[Tensor, Compaction | None]:
        """Vectors after the last norm, the class token's first, of rows that begin with their real tokens."""
        x_BTD, moved = _embedded(self.embedding, tokens_BT, mask)
        lengths_B = None if moved is None else moved.lengths_B
        if self.class_token is not None:
            first_B1D = self.class_token.to(x_BTD.dtype).expand(len(x_BTD), 1, -1)
            x_BTD = torch.cat([first_B1D, x_BTD], 1)
            lengths_B = None if lengths_B is None else lengths_B + 1
        memory: Tensor | None = None
        for block in self.layers:
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x_BTD, _, memory = checkpoint(block, x_BTD, None, lengths_B, memory, use_reentrant=False)
            else:
                x_BTD, _, memory = block(x_BTD, None, lengths_B, memory)
        return self.norm(x_BTD), moved


class PerceiverEncoder(nn.Module):
    """`norm(Z)`: tokens read by a `Perceiver`, or what the one output query of a `PerceiverIO` finds in it.

    The inputs are the embeddings, with `fourier_bands` the features of each token's position after them.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        if config.position == "rope":
            raise ValueError(
                f"position='rope' needs a layer that rotates queries and keys, and {config.attention} does not; "
                "choose sinusoidal, learned or none"
            )
        if config.pooling != "mean":
            raise ValueError(f"{config.attention} pools its latents: pooling must be 'mean', got {config.pooling!r}")
        self.config = config
        self.bands = perceiver_options(config).fourier_bands
        channels = config.dim + (2 * self.bands + 1 if self.bands else 0)
        self.embedding = _embedding(config)
        self.core: Perceiver | PerceiverIO
        if config.attention == "perceiver":
            self.query = None
            self.core = Perceiver(config, input_dim=channels)
        else:
            self.query = nn.Parameter(torch.empty(1, config.dim))
            nn.init.trunc_normal_(self.query, std=LATENT_STD, a=-2 * LATENT_STD, b=2 * LATENT_STD)
            self.core = PerceiverIO(config, input_dim=channels, query_dim=config.dim)
        self.norm = build_norm(config.norm, config.dim)
        self.embedding.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """Give one module its first weights."""
        self.core.initialise(module)

    def forward(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """Vectors `[B, L, D]` of the latents (Perceiver IO: `[B, 1, D]` of the query) about `tokens` `[B, T]`.

        `mask` is a bool `[B, T]`, True for a real token. Padding may stand anywhere and does not exist. Raises as
        `Encoder` does; with Fourier features also for more than `max_positions` tokens.
        """
        x_BTC, moved = _embedded(self.embedding, tokens_BT, mask)
        B, T, _ = x_BTC.shape
        mask = None if moved is None else real_slots(moved.lengths_B, T)
        if self.bands:
            rows = self.config.max_positions
            if rows < T:
                raise ValueError(f"fourier_bands divides max_positions={rows} positions, got {T} tokens; raise it")
            places_T1 = torch.linspace(-1, 1, rows, device=x_BTC.device, dtype=torch.float32)[:T, None]
            features_TC = fourier_features(places_T1, self.bands, rows).to(x_BTC.dtype)
            x_BTC = torch.cat([x_BTC, features_TC.expand(B, -1, -1)], -1)
        if self.query is None:
            return self.norm(self.core(x_BTC, mask))
        return self.norm(self.core(x_BTC, self.query, mask))

    def pooled(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """One vector `[B, D]` a sequence: the mean of what `forward` gives."""
        return self(tokens_BT, mask).mean(1)

    def cost(self, tokens: int) -> Cost:
        """What one sequence of `tokens` tokens costs: all readings, the layers over the latents, the output query."""
        perceiver = self.core.perceiver if isinstance(self.core, PerceiverIO) else self.core
        latents = perceiver.options.latents
        readings = [perceiver.readings[i] for i in perceiver.schedule()]
        reads = [block.cost(latents, tokens) for block in readings if isinstance(block, CrossBlock)]
        if isinstance(self.core, PerceiverIO):
            reads.append(self.core.reader.cost(1, latents))
        entries, mixing, linear = (sum(parts) for parts in zip(*reads, strict=True))
        repeats = perceiver.options.repeats
        for block in perceiver.layers:
            if isinstance(block, Block):
                mixer = block.attention.cost(latents)
                entries += repeats * mixer.score_entries
                mixing += repeats * mixer.mixing_flops
                linear += repeats * (mixer.projection_flops + 2 * latents * _linear_weights(block.feedforward))
        return Cost(
            tokens=tokens,
            score_entries=entries,
            unmasked_entries=entries,
            mixing_flops=mixing,
            projection_flops=linear,
            backward_flops=5 * mixing // 2 + 2 * linear,
            parameters=sum(p.numel() for p in self.parameters()),
            activation_bytes=_activation_bytes(self, tokens),
            state_bytes=0,
        )


class Classifier(nn.Module):
    """`logits = dropout(pooled) W^T + b`, on an `Encoder` or, where `attention` says so, a Perceiver."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        stack = stack_of(config)
        if stack is not None and "bidirectional" not in stack.forms:
            raise ValueError(f"attention {stack.name!r} has no bidirectional form; it has: {', '.join(stack.forms)}")
        self.encoder = Encoder(config) if stack is None else PerceiverEncoder(config)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.head.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """Give one module its first weights."""
        self.encoder.initialise(module)

    def forward(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """Logits `[B, classes]` of `tokens` `[B, T]`; `mask` is a bool `[B, T]`, True for a real token."""
        return self.head(self.dropout(self.encoder.pooled(tokens_BT, mask)))

    def num_parameters(self) -> int:
        """Numbers that training changes."""
        return sum(p.numel() for p in self.parameters())

    def cost(self, tokens: int) -> Cost:
        """What one sequence of `tokens` tokens costs: the encoder and the head."""
        cost, head = self.encoder.cost(tokens), 2 * self.head.weight.numel()
        return replace(
            cost,
            projection_flops=cost.projection_flops + head,
            backward_flops=cost.backward_flops + 2 * head,
            parameters=self.num_parameters(),
            activation_bytes=_activation_bytes(self, tokens),
        )


def _embedding(config: EncoderConfig) -> Embedding:
    """The table of tokens, with positions added where `config.position` says so (`added_positions`)."""
    return Embedding(config.vocab_size, config.dim, position=_added_positions(config), dropout=config.dropout)


def _embedded(embedding: Embedding, tokens_BT: Tensor, mask: Tensor | None) -> tuple[Tensor, Compaction | None]:
    """Vectors of rows that begin with their real tokens, and how they were moved (None: not at all)."""
    if tokens_BT.ndim != 2:
        raise ValueError(f"tokens must have shape [B, T], got {list(tokens_BT.shape)}")
    if tokens_BT.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens must be int64 or int32, got {tokens_BT.dtype}")
    if mask is None:
        return embedding(tokens_BT), None
    check_mask(mask, *tokens_BT.shape)
    moved = compaction(mask)
    real_BT = real_slots(moved.lengths_B, tokens_BT.shape[1])
    tokens_BT = tokens_BT.gather(1, moved.order_BT).masked_fill(~real_BT, 0)
    return embedding(tokens_BT, 0, moved.lengths_B), moved


def _linear_weights(module: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def _activation_bytes(model: nn.Module, tokens: int) -> int:
    return activation_bytes(model, lambda: torch.zeros(1, tokens, dtype=torch.int64))
