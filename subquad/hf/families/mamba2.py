"""Mamba-2: RMS norms, no positions, no feed-forward networks; z, x, B, C and the steps in one matrix."""

from __future__ import annotations

import math
from typing import Any

import torch

from subquad.hf.families.base import Family, Move, activation, mixer, parted, require, same
from subquad.models.config import DecoderConfig


def step_limits(limits: Any) -> list[float] | None:
    """Return the least and largest step, or None if nothing bounds them."""
    return None if limits is None or tuple(limits) == (0, math.inf) else [float(limit) for limit in limits]


def mixer_moves(config: DecoderConfig, theirs: str, ours: str) -> list[Move]:
    """Return the moves of one Mamba-2 mixer, whose tensors' names begin with `theirs` and `ours`."""
    own = mixer(config, "mamba2")
    inner, keys = own.values * own.num_heads, own.keys * own.key_heads
    rows = {"gating": inner, "value": inner, "key": keys, "query": keys, "stepping": own.num_heads}

    def turned(x: torch.Tensor, *sizes: int) -> torch.Tensor:
        return torch.cat(x.split(sizes)[::-1])  # x, B, C or C, B, x

    moves = [
        parted(f"{theirs}.in_proj.{kind}", {f"{ours}.{name}.{kind}": size for name, size in rows.items()})
        for kind in (("weight", "bias") if own.bias else ("weight",))
    ]
    moves += [
        Move(
            f"{theirs}.conv1d.weight",
            (f"{ours}.convolution.weight",),
            lambda x: (turned(x[:, 0], inner, keys, keys),),
            lambda parts: turned(parts[0], keys, keys, inner)[:, None],
        ),
        Move(
            f"{theirs}.conv1d.bias",
            (f"{ours}.convolution.bias",),
            lambda x: (turned(x, inner, keys, keys),),
            lambda parts: turned(parts[0], keys, keys, inner),
        ),
        same(f"{theirs}.out_proj.weight", f"{ours}.out.weight"),
    ]
    if own.bias:
        moves.append(same(f"{theirs}.out_proj.bias", f"{ours}.out.bias"))
    names = {"dt_bias": "rate.step_bias", "A_log": "rate.log_rate", "D": "skip", "norm.weight": "norm_weight"}
    return moves + [same(f"{theirs}.{their_name}", f"{ours}.{our_name}") for their_name, our_name in names.items()]


def _settings(config: Any) -> dict[str, Any]:
    require(config, use_conv_bias=True)
    activation(config, "hidden_act", {"silu": "", "swish": ""})
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_heads,
        "attention": "mamba2",
        "options": {
            "mamba2": {
                "state_channels": config.state_size,
                "expand": config.expand,
                "groups": config.n_groups,
                "convolution": config.conv_kernel,
                "step_limits": step_limits(config.time_step_limit),
                "norm_eps": config.layer_norm_epsilon,
            }
        },
        "norm": "rms",
        "norm_eps": config.layer_norm_epsilon,
        "feedforward": "none",
        "position": "none",
        "bias": config.use_bias,
        "tie_embeddings": config.tie_word_embeddings,
        "init_std": config.initializer_range,
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    own = mixer(config, "mamba2")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_heads": own.num_heads,
        "head_dim": own.values,
        "state_size": own.state_channels,
        "expand": own.expand,
        "n_groups": own.groups,
        "conv_kernel": own.convolution,
        "time_step_limit": own.step_limits or (0.0, math.inf),
        "layer_norm_epsilon": config.norm_eps,
        "use_bias": own.bias,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }


def _moves(config: DecoderConfig) -> list[Move]:
    moves = [
        same("backbone.embeddings.weight", "embedding.tokens.weight"),
        same("backbone.norm_f.weight", "norm.weight"),
    ]
    for i in range(config.num_layers):
        theirs, ours = f"backbone.layers.{i}", f"layers.{i}"
        moves.append(same(f"{theirs}.norm.weight", f"{ours}.attention_norm.weight"))
        moves += mixer_moves(config, f"{theirs}.mixer", f"{ours}.attention")
    return moves


MAMBA2 = Family(
    name="mamba2",
    model="Mamba2ForCausalLM",
    settings=_settings,
    config=_config,
    moves=_moves,
    mechanisms=("mamba2",),
)
