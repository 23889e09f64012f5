"""Bamba: Mamba-2 and full attention by layer, which rotates a part of each head; SwiGLU."""

from __future__ import annotations

from typing import Any

from subquad.hf.families import rope
from subquad.hf.families.base import Family, Move, same
from subquad.hf.families.granite_hybrid import hybrid_config, hybrid_settings, layer_moves
from subquad.models.config import DecoderConfig

_OWN = {"ff_dim": "intermediate_size", "ff_bias": "mlp_bias"}


def _settings(config: Any) -> dict[str, Any]:
    values = hybrid_settings(config, _OWN)
    if "full" in values["attention"]:
        values |= {"position": "rope", **rope.read(config, partial=True)}
    return values


def _config(config: DecoderConfig) -> dict[str, Any]:
    values = hybrid_config(config, _OWN)
    if "rope_parameters" in values:
        values["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return values | {"attn_layer_indices": [i for i, name in enumerate(config.layer_mechanisms) if name == "full"]}


def _moves(config: DecoderConfig) -> list[Move]:
    moves = [
        same("model.embed_tokens.weight", "embedding.tokens.weight"),
        same("model.final_layernorm.weight", "norm.weight"),
    ]
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        moves += [*layer_moves(config, i), same(f"{theirs}.pre_ff_layernorm.weight", f"{ours}.feedforward_norm.weight")]
        for part in ("gate", "up", "down"):
            for kind in ("weight", "bias") if config.ff_bias else ("weight",):
                moves.append(same(f"{theirs}.feed_forward.{part}_proj.{kind}", f"{ours}.feedforward.{part}.{kind}"))
    return moves


BAMBA = Family(
    name="bamba",
    model="BambaForCausalLM",
    settings=_settings,
    config=_config,
    moves=_moves,
    mechanisms=("full", "mamba2"),
)
