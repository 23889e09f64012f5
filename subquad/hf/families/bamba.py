"""Bamba: Mamba-2 and full attention by layer, which rotates a part of each head; SwiGLU."""

from __future__ import annotations

from typing import Any

from subquad.hf.families import base, rope
from subquad.hf.families.base import Family, Move
from subquad.hf.families.granite_hybrid import hybrid_config, hybrid_settings, layer_moves
from subquad.models.config import DecoderConfig

_OWN = {"ff_dim": "intermediate_size", "ff_bias": "mlp_bias"}


def _settings(config: Any) -> dict[str, Any]:
    values = hybrid_settings(config, _OWN)
    if "full" in values["attention"]:
        values |= {"position": "rope", **rope.read(config, partial=True)}
    return values


def _config(config: DecoderConfig) -> dict[str, Any]:
    values = hybrid_config(config, _OWN, partial=True)
    return values | {"attn_layer_indices": [i for i, name in enumerate(config.layer_mechanisms) if name == "full"]}


def _moves(config: DecoderConfig) -> list[Move]:
    moves = base.renamed("model.", "", {"embed_tokens": "embedding.tokens", "final_layernorm": "norm"})
    tensors = base.with_bias(config.ff_bias)
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        moves += layer_moves(config, i) + base.renamed(theirs, ours, {"pre_ff_layernorm": "feedforward_norm"})
        moves += base.renamed(f"{theirs}feed_forward.", f"{ours}feedforward.", base.GATE_UP_DOWN, tensors)
    return moves


BAMBA = Family(
    name="bamba",
    model="BambaForCausalLM",
    settings=_settings,
    config=_config,
    moves=_moves,
    mechanisms=("full", "mamba2"),
)
