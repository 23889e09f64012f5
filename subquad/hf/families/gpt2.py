"""GPT-2: layer norms, learned positions, GELU feed-forward, biases everywhere, matrices stored as `[in, out]`."""

from __future__ import annotations

from typing import Any

from subquad.hf.families import base
from subquad.hf.families.base import Family, Move
from subquad.models.config import DecoderConfig

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_NAMES = {
    "vocab_size": "vocab_size",
    "dim": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}


def _settings(config: Any) -> dict[str, Any]:
    base.require(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    if config.embd_pdrop != config.resid_pdrop:
        raise ValueError(
            f"our decoder has one dropout and does not support gpt2 with embd_pdrop={config.embd_pdrop} and "
            f"resid_pdrop={config.resid_pdrop}; set both to the same value"
        )
    return {
        **base.taken(config, _NAMES),
        "ff_dim": 4 * config.n_embd if config.n_inner is None else config.n_inner,
        "norm": "layer",
        "feedforward": base.activation(config, "activation_function", _ACTIVATIONS),
        "position": "learned",
        "bias": True,
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    return {
        **base.given(config, _NAMES),
        "n_inner": config.ff_dim,
        "activation_function": "gelu" if config.feedforward == "gelu" else "gelu_new",
        "embd_pdrop": config.dropout,
    }


def _moves(config: DecoderConfig) -> list[Move]:
    moves = base.renamed("transformer.", "", {"wte": "embedding.tokens", "wpe": "embedding.position.table"})
    moves += base.renamed("transformer.", "", {"ln_f": "norm"}, base.BOTH)
    linear = {"attn.c_proj": "attention.out", "mlp.c_fc": "feedforward.up", "mlp.c_proj": "feedforward.down"}
    for i in range(config.num_layers):
        theirs, ours = f"transformer.h.{i}.", f"layers.{i}."
        for tensor in base.BOTH:
            parts = [f"{ours}attention.{name}{tensor}" for name in ("query", "key", "value")]
            moves.append(base.stacked(f"{theirs}attn.c_attn{tensor}", parts, transpose=tensor == ".weight"))
        moves += [base.transposed(f"{theirs}{a}.weight", f"{ours}{b}.weight") for a, b in linear.items()]
        moves += base.renamed(theirs, ours, linear, (".bias",))
        moves += base.renamed(theirs, ours, {"ln_1": "attention_norm", "ln_2": "feedforward_norm"}, base.BOTH)
    return moves


GPT2 = Family(
    name="gpt2",
    model="GPT2LMHeadModel",
    settings=_settings,
    config=_config,
    moves=_moves,
    buffers=(".attn.masked_bias",),
)
