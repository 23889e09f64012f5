"""Perceiver (Jaegle et al. 2021, arXiv:2103.03206) and Perceiver IO (Jaegle et al. 2021, arXiv:2107.14795).

    Z <- Z + Attn(norm(Z), norm(X));  Z <- Z + FF(norm(Z))    L learned latents read S inputs
    Z <- layers(Z)                                            self-attention over the latents, repeated with one weight
    Y  = Q + Attn(norm(Q), norm(Z));  Y <- Y + FF(norm(Y))    Perceiver IO: O output queries read the latents

Attn(A, B) = softmax((A W_q)(B W_k)^T / sqrt(K)) (B W_v) W_o. The cost is linear in S and in O. As in the authors' code,
both inputs are normalised first, the latents start from a normal of standard deviation 0.02 truncated at two of them,
and the queries' residual is optional. Queries and keys have the latents' width D, in the authors' code the inputs'.

Shape letters: B batch, T tokens, S inputs, C channels, L latents, D their width, O output queries, H heads.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad import attention
from subquad.config import check_at_least
from subquad.layers.feedforward import build_feedforward
from subquad.layers.norm import build_norm
from subquad.models.blocks import (
    Block,
    ResidualBlock,
    branch_outputs,
    check_options,
    initialise,
    token_embedding,
)
from subquad.models.encoder import EncoderConfig, embedded
from subquad.models.stacks import PerceiverIOOptions, PerceiverOptions
from subquad.ops import block_attention
from subquad.ops.counting import Cost, cost_of, one_sequence
from subquad.ops.padding import Compaction, check_mask, compaction, real_slots, scatter
from subquad.ops.patterns import Full

LATENT_STD = 0.02


class CrossBlock(ResidualBlock):
    """`x + Attn(norm(x), norm(inputs))`, then `x + FF(norm(x))`; without `residual`, `Attn` replaces x."""

    def __init__(
        self, config: EncoderConfig, *, query_dim: int, input_dim: int, num_heads: int, residual: bool
    ) -> None:
        super().__init__()
        if config.dim % num_heads:
            raise ValueError(f"cross_heads must divide dim, got cross_heads={num_heads}, dim={config.dim}")
        config.check_default("a Perceiver, whose readings normalise both sides first", "norm_position")
        check_at_least(1, input_dim=input_dim, query_dim=query_dim)
        self.num_heads, self.residual, self.attention_dropout = num_heads, residual, config.attention_dropout
        self.query_norm = build_norm(config.norm, query_dim)
        self.input_norm = build_norm(config.norm, input_dim)
        self.query = nn.Linear(query_dim, config.dim, bias=config.bias)
        self.key = nn.Linear(input_dim, config.dim, bias=config.bias)
        self.value = nn.Linear(input_dim, config.dim, bias=config.bias)
        self.out = nn.Linear(config.dim, query_dim, bias=config.bias)
        self.feedforward_norm = build_norm(config.norm, query_dim)
        self.feedforward = build_feedforward(config.feedforward, query_dim, mult=config.ff_mult, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BOC: Tensor, inputs_BSC: Tensor, start: int | Tensor = 0) -> Tensor:
        """Return `x` `[B, O, C]` after it has read `inputs` `[B, S, C']`.

        `start` is the position of the first input slot, an int or `[B]`; slots at negative positions are padding.
        """
        z_BSC = self.input_norm(inputs_BSC)
        projected = (self.query(self.query_norm(x_BOC)), self.key(z_BSC), self.value(z_BSC))
        q_BHOK, k_BHSK, v_BHSK = (p.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in projected)
        dropout = self.attention_dropout if self.training else 0.0
        y_BHOK = block_attention(q_BHOK, k_BHSK, v_BHSK, Full(), k_start=start, dropout_p=dropout)
        y_BOC = self.dropout(self.out(y_BHOK.transpose(1, 2).flatten(2)))
        x_BOC = x_BOC + y_BOC if self.residual else y_BOC
        return x_BOC + self.dropout(self.feedforward(self.feedforward_norm(x_BOC)))

    def output_projections(self) -> list[nn.Linear]:
        """Return the linear layers of both branches that write into the residual stream."""
        return [self.out, self.feedforward.down]


class Perceiver(nn.Module):
    """Learned latents that read any array, then attend to one another: `[B, S, C]` to `[B, L, D]`, with C =
    `input_dim`.

    `config` gives the width D, the layers over the latents and, in `options.perceiver`, the rest (`PerceiverOptions`).
    Positions must be among the channels, as from `fourier_features`. (The norm of a single channel keeps only its
    sign.)
    """

    reads_whole_sequences = True
    """Outputs may depend on later tokens, unlike those of a causal language model."""

    def __init__(self, config: EncoderConfig, *, input_dim: int) -> None:
        super().__init__()
        self.config = config
        self.options = perceiver_options(config)
        self.latents = nn.Parameter(torch.empty(self.options.latents, config.dim))
        options = self.options
        self.readings = nn.ModuleList(
            CrossBlock(
                config,
                query_dim=config.dim,
                input_dim=input_dim,
                num_heads=options.cross_heads,
                residual=options.query_residual,
            )
            for _ in range(2 if options.reads == "each" and options.repeats > 1 else 1)
        )
        self.layers = nn.ModuleList(
            Block(
                config,
                attention.build(
                    "full",
                    dim=config.dim,
                    num_heads=config.num_heads,
                    causal=False,
                    bias=config.bias,
                    dropout=config.attention_dropout,
                ),
            )
            for _ in range(config.num_layers)
        )
        self.input_dim = input_dim
        nn.init.trunc_normal_(self.latents, std=LATENT_STD, a=-2 * LATENT_STD, b=2 * LATENT_STD)
        self.branch_outputs = branch_outputs(self)
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """Set one module's initial weights (`subquad.models.blocks.initialise`); the depth counts each repeat."""
        branches = 2 * (len(self.schedule()) + len(self.layers) * self.options.repeats)
        initialise(module, self.config.init_std, self.branch_outputs, branches)

    def schedule(self) -> list[int]:
        """Return the index in `readings` of the reading before each repeat that has one."""
        return [min(i, 1) for i in range(self.options.repeats if self.options.reads == "each" else 1)]

    def forward(self, inputs_BSC: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """Return the latents `[B, L, D]` after they have read `inputs` `[B, S, C]`.

        `mask` is a bool `[B, S]`, True for a real input; others have no effect. Raises `ValueError` or `TypeError` for
        wrong shapes and dtypes.
        """
        if inputs_BSC.ndim != 3 or inputs_BSC.shape[-1] != self.input_dim:
            raise ValueError(f"inputs must have shape [B, S, {self.input_dim}], got {list(inputs_BSC.shape)}")
        start: int | Tensor = 0
        if mask is not None:
            # Zeroed padding moves before each row's real inputs, to negative positions, which attention ignores.
            check_mask(mask, *inputs_BSC.shape[:2])
            moved = compaction(~mask)
            inputs_BSC = inputs_BSC.masked_fill(~mask[..., None], 0.0)
            inputs_BSC = inputs_BSC.gather(1, moved.order_BT[..., None].expand_as(inputs_BSC))
            start = -moved.lengths_B
        z_BLD = self.latents.expand(len(inputs_BSC), -1, -1)
        schedule = self.schedule()
        for repeat in range(self.options.repeats):
            if repeat < len(schedule):
                z_BLD = self.readings[schedule[repeat]](z_BLD, inputs_BSC, start)
            for block in self.layers:
                z_BLD = block(z_BLD)[0]
        return z_BLD


class PerceiverIO(nn.Module):
    """A `Perceiver` and output queries that read its latents: `[B, S, C]` and `[B, O, Q]` to `[B, O, Q]`, Q =
    `query_dim`.

    `config` is a Perceiver's, with `options.perceiver_io` (`PerceiverIOOptions`).
    """

    reads_whole_sequences = True
    """Outputs may depend on later tokens, unlike those of a causal language model."""

    def __init__(self, config: EncoderConfig, *, input_dim: int, query_dim: int) -> None:
        super().__init__()
        self.perceiver = Perceiver(config, input_dim=input_dim)
        options = self.perceiver.options
        if not isinstance(options, PerceiverIOOptions):
            raise ValueError(f"a PerceiverIO needs attention='perceiver_io', got {config.attention!r}")
        self.query_dim = query_dim
        self.reader = CrossBlock(
            config,
            query_dim=query_dim,
            input_dim=config.dim,
            num_heads=options.cross_heads,
            residual=options.output_residual,
        )
        self.branch_outputs = branch_outputs(self.reader)
        self.reader.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """Set one module's initial weights; the reader writes into a residual stream of its own, one block deep."""
        if module in self.branch_outputs:
            initialise(module, self.perceiver.config.init_std, self.branch_outputs, 2)
        else:
            self.perceiver.initialise(module)

    def forward(self, inputs_BSC: Tensor, queries_BOC: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """Return the outputs `[B, O, Q]` of `queries` `[B, O, Q]` or `[O, Q]` (for all rows) on `inputs` `[B, S, C]`.

        `mask` is a bool `[B, S]`, True for a real input. No output depends on another query. Raises as `Perceiver`
        does.
        """
        B = inputs_BSC.shape[0]
        shape = list(queries_BOC.shape)
        if queries_BOC.ndim == 2:
            queries_BOC = queries_BOC.expand(B, -1, -1)
        if queries_BOC.ndim != 3 or queries_BOC.shape[0] != B or queries_BOC.shape[-1] != self.query_dim:
            wanted = f"[O, {self.query_dim}] or [{B}, O, {self.query_dim}]"
            raise ValueError(f"queries must have shape {wanted}, got {shape}")
        return self.reader(queries_BOC, self.perceiver(inputs_BSC, mask))


class PerceiverEncoder(nn.Module):
    """`norm(Z)`: the latents of a `Perceiver` that reads tokens, or the answer of a `PerceiverIO` to one query.

    The inputs are the embeddings, followed by the Fourier features of positions if `fourier_bands` is set.
    """

    vector_per_token = False

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        if config.position == "rope":
            raise ValueError(
                f"position='rope' needs a layer that rotates queries and keys, and {config.attention} does not; "
                "choose auto, sinusoidal, learned or none (--model.position auto)"
            )
        if config.causal:
            raise ValueError(f"{config.attention} reads whole sequences and has no causal form; set causal=false")
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
        """Set one module's initial weights."""
        self.core.initialise(module)

    def forward(
        self, tokens_BT: Tensor, /, mask: Tensor | None = None, *, pooled: bool = False, queries: Tensor | None = None
    ) -> Any:
        """Return the vectors `[B, L, D]` of the latents (Perceiver IO: `[B, 1, D]`) after reading `tokens` `[B, T]`.

        With `pooled` return these and their mean, `[B, D]`. `queries` `[P, D]` of `perceiver_io`, one a position, give
        its answers to them instead, `[B, T, D]`, with zeros at padding. `mask` is a bool `[B, T]`, True for a real
        token; padding may stand anywhere and changes nothing. Raises as `Encoder` does and, with Fourier features or
        queries, for more tokens than they have positions.
        """
        T = tokens_BT.shape[-1]
        if queries is not None and len(queries) < T:
            raise ValueError(f"there are queries for {len(queries)} tokens, got {T}; raise max_positions")
        x_BTC, mask, moved = self._inputs(tokens_BT, mask)
        asked = () if self.query is None else (self.query if queries is None else queries[:T],)
        h_BLD = self.norm(self.core(x_BTC, *asked, mask))
        if queries is not None and moved is not None:
            h_BLD = scatter(h_BLD, moved)
        return (h_BLD, h_BLD.mean(1)) if pooled else h_BLD

    def _inputs(self, tokens_BT: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Compaction | None]:
        """Return the inputs with real tokens leading each row, which slots are real, and how tokens were moved."""
        x_BTC, moved = embedded(self.embedding, tokens_BT, mask)
        B, T, _ = x_BTC.shape
        mask = None if moved is None else real_slots(moved.lengths_B, T)
        if self.bands:
            rows = self.config.max_positions
            if rows < T:
                raise ValueError(f"fourier_bands supports max_positions={rows} tokens, got {T}; raise max_positions")
            places_T1 = torch.linspace(-1, 1, rows, device=x_BTC.device, dtype=torch.float32)[:T, None]
            features_TC = fourier_features(places_T1, self.bands, rows).to(x_BTC.dtype)
            x_BTC = torch.cat([x_BTC, features_TC.expand(B, -1, -1)], -1)
        return x_BTC, mask, moved

    def cost(self, tokens: int) -> Cost:
        """Return the cost of all readings, layers and the output query for one sequence of `tokens` tokens."""
        return cost_of(self, tokens, lambda tokens_BT: (self(tokens_BT), None), partial(one_sequence, tokens))


def perceiver_options(config: EncoderConfig) -> PerceiverOptions:
    """Return the options of the Perceiver that `config.attention` names; `ValueError` if it names something else.

    Options of other mechanisms in `config.options` are checked and otherwise ignored, as in the decoder.
    """
    check_options(config)
    if config.attention == "perceiver":
        return PerceiverOptions.from_dict(config.options.get("perceiver", {}), where="options.perceiver")
    if config.attention == "perceiver_io":
        return PerceiverIOOptions.from_dict(config.options.get("perceiver_io", {}), where="options.perceiver_io")
    raise ValueError(f"a Perceiver needs attention='perceiver' or 'perceiver_io', got {config.attention!r}")


def fourier_features(positions: Tensor, bands: int, resolution: int, /) -> Tensor:
    """`[p, sin(pi f p), cos(pi f p)]` for `bands` frequencies f, evenly spaced from 1 to `resolution / 2`.

    `positions` `[..., P]` are P coordinates in [-1, 1]; the result is `[..., P * (2 * bands + 1)]`. `resolution` is the
    number of places along a coordinate: the highest frequency has a period of two places (Perceiver, appendix D).
    """
    f_F = torch.linspace(1.0, resolution / 2, bands, device=positions.device, dtype=positions.dtype)
    angles = math.pi * positions[..., None] * f_F
    return torch.cat([positions[..., None], angles.sin(), angles.cos()], -1).flatten(-2)
