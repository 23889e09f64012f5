"""Perceiver and Perceiver IO over tokens.

Shape letters: B batch, T tokens, D model width, C channels, L latents.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subquad.attention import Cost
from subquad.layers.norm import build_norm
from subquad.models._layers import Block
from subquad.models.encoder import embedded, linear_weights, read_bytes, token_embedding
from subquad.models.encoder_config import EncoderConfig
from subquad.models.perceiver_io import (
    LATENT_STD,
    CrossBlock,
    Perceiver,
    PerceiverIO,
    fourier_features,
    perceiver_options,
)
from subquad.ops.padding import Compaction, real_slots, scatter


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
        if config.causal:
            raise ValueError(f"{config.attention} reads whole sequences: it has no causal form (causal=true)")
        if config.pooling != "mean":
            raise ValueError(f"{config.attention} pools its latents: pooling must be 'mean', got {config.pooling!r}")
        self.config = config
        self.bands = perceiver_options(config).fourier_bands
        channels = config.dim + (2 * self.bands + 1 if self.bands else 0)
        self.embedding = token_embedding(config)
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
        x_BTC, mask, _ = self._inputs(tokens_BT, mask)
        if self.query is None:
            return self.norm(self.core(x_BTC, mask))
        return self.norm(self.core(x_BTC, self.query, mask))

    def answers(self, queries_PD: Tensor, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """Vectors `[B, T, D]` that `perceiver_io` finds for the query of each token's position; zeros at padding.

        `queries` are `[P, D]`, one a position. Raises `ValueError` for more than P tokens, otherwise as `forward`.
        """
        T = tokens_BT.shape[-1]
        if len(queries_PD) < T:
            raise ValueError(f"there are queries for {len(queries_PD)} positions, got {T} tokens; raise max_positions")
        x_BTC, mask, moved = self._inputs(tokens_BT, mask)
        h_BTD = self.norm(self.core(x_BTC, queries_PD[:T], mask))
        return h_BTD if moved is None else scatter(h_BTD, moved)

    def pooled(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """One vector `[B, D]` a sequence: the mean of what `forward` gives."""
        return self(tokens_BT, mask).mean(1)

    def _inputs(self, tokens_BT: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Compaction | None]:
        """What is read, of rows that begin with their real tokens; which slots are real; how the tokens were moved."""
        x_BTC, moved = embedded(self.embedding, tokens_BT, mask)
        B, T, _ = x_BTC.shape
        mask = None if moved is None else real_slots(moved.lengths_B, T)
        if self.bands:
            rows = self.config.max_positions
            if rows < T:
                raise ValueError(f"fourier_bands divides max_positions={rows} positions, got {T} tokens; raise it")
            places_T1 = torch.linspace(-1, 1, rows, device=x_BTC.device, dtype=torch.float32)[:T, None]
            features_TC = fourier_features(places_T1, self.bands, rows).to(x_BTC.dtype)
            x_BTC = torch.cat([x_BTC, features_TC.expand(B, -1, -1)], -1)
        return x_BTC, mask, moved

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
                linear += repeats * (mixer.projection_flops + 2 * latents * linear_weights(block.feedforward))
        return Cost(
            tokens=tokens,
            score_entries=entries,
            unmasked_entries=entries,
            mixing_flops=mixing,
            projection_flops=linear,
            backward_flops=5 * mixing // 2 + 2 * linear,
            parameters=sum(p.numel() for p in self.parameters()),
            activation_bytes=read_bytes(self, tokens),
            state_bytes=0,
        )
