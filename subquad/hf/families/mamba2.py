"""Mamba-2: RMS norms, no positions, no feed-forward networks; z, x, B, C and the steps in one matrix."""

from __future__ import annotations

import math
from typing import Any

import torch

from subquad.hf.families import base
from subquad.hf.families.base import Family, Move
from subquad.models.config import DecoderConfig

_NAMES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_heads",
    "norm_eps": "layer_norm_epsilon",
    "bias": "use_bias",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_MIXER = {
    "num_heads": "num_heads",
    "state_channels": "state_size",
    "expand": "expand",
    "groups": "n_groups",
    "convolution": "conv_kernel",
    "bias": "use_bias",
}


def step_limits(limits: Any) -> list[float] | None:
    """Return the least and largest step, or None if nothing bounds them."""
    return None if limits is None or tuple(limits) == (0, math.inf) else [float(limit) for limit in limits]


def mixer_moves(config: DecoderConfig, theirs: str, ours: str) -> list[Move]:
    """Return the moves of one Mamba-2 mixer, whose tensors' names begin with `theirs` and `ours`."""
    own = base.mixer(config, "mamba2")
    inner, keys = own.values * own.num_heads, own.keys * own.key_heads
    rows = {"gating": inner, "value": inner, "key": keys, "query": keys, "stepping": own.num_heads}

    def turned(x: torch.Tensor, *sizes: int) -> torch.Tensor:
        return torch.cat(x.split(sizes)[::-1])  # x, B, C or C, B, x

    moves = [
        base.parted(f"{theirs}in_proj{tensor}", {f"{ours}{name}{tensor}": size for name, size in rows.items()})
        for tensor in base.with_bias(own.bias)
    ]
    moves += [
        Move(
            f"{theirs}conv1d.weight",
            (f"{ours}convolution.weight",),
            lambda x: (turned(x[:, 0], inner, keys, keys),),
            lambda parts: turned(parts[0], keys, keys, inner)[:, None],
        ),
        Move(
            f"{theirs}conv1d.bias",
            (f"{ours}convolution.bias",),
            lambda x: (turned(x, inner, keys, keys),),
            lambda parts: turned(parts[0], keys, keys, inner),
        ),
    ]
    names = {"dt_bias": "rate.step_bias", "A_log": "rate.log_rate", "D": "skip", "norm.weight": "norm_weight"}
    moves += base.renamed(theirs, ours, {"out_proj": "out"}, base.with_bias(own.bias))
    return moves + base.renamed(theirs, ours, names, ("",))


def _settings(config: Any) -> dict[str, Any]:
    base.require(config, use_conv_bias=True)
    base.activation(config, "hidden_act", {"silu": "", "swish": ""})
    own = {"step_limits": step_limits(config.time_step_limit), "norm_eps": config.layer_norm_epsilon}
    return {
        **base.taken(config, _NAMES),
        "attention": "mamba2",
        "options": {"mamba2": base.taken(config, _MIXER) | own},
        "norm": "rms",
        "feedforward": "none",
        "position": "none",
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    own = base.mixer(config, "mamba2")
    limits = own.step_limits or (0.0, math.inf)
    return {**base.given(config, _NAMES), **base.given(own, _MIXER), "head_dim": own.values, "time_step_limit": limits}


def _moves(config: DecoderConfig) -> list[Move]:
    moves = base.renamed("backbone.", "", {"embeddings": "embedding.tokens", "norm_f": "norm"})
    for i in range(config.num_layers):
        theirs, ours = f"backbone.layers.{i}.", f"layers.{i}."
        moves += base.renamed(theirs, ours, {"norm": "attention_norm"})
        moves += mixer_moves(config, f"{theirs}mixer.", f"{ours}attention.")
    return moves


MAMBA2 = Family(
    name="mamba2",
    model="Mamba2ForCausalLM",
    settings=_settings,
    config=_config,
    moves=_moves,
    mechanisms=("mamba2",),
)
