"""Configurations of models: values that are refused, and digests that stay."""

import pytest

from subquad.models import DecoderConfig


@pytest.mark.parametrize(("fields", "message"), [
    ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    ({"dim": 10, "num_heads": 4}, "dim must be a multiple of num_heads, got dim=10, num_heads=4"),
    ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got num_kv_heads=3, num_heads=4"),
    ({"num_kv_heads": 0}, "num_kv_heads must divide num_heads, got num_kv_heads=0"),
    ({"ff_mult": 0.0}, "ff_mult must be a positive number, got 0.0"),
    ({"init_std": float("nan")}, "init_std must be a positive number, got nan"),
    ({"embedding_scale": float("inf")}, "embedding_scale must be a positive number, got inf"),
    ({"position": "sinusoidal", "position_scale": -1.0}, "position_scale must be a positive number, got -1.0"),
    ({"position": "sinusoidal", "position_scale": float("inf")}, "position_scale must be a positive number, got inf"),
    ({"position": "sinusoidal", "position_scale": float("nan")}, "position_scale must be a positive number, got nan"),
    ({"position_scale": 1.0}, "position_scale=1.0 has no meaning for position='rope'; leave it out"),
    ({"residual_scale": 0.0}, "residual_scale must be a positive number, got 0.0"),
    ({"norm_position": "both"}, "unknown norm_position 'both'; valid: post, pre"),
    ({"norm_position": "post", "parallel_residual": True}, "True has no meaning for norm_position='post'; leave it"),
    ({"feedforward": "none", "ff_dim": 8}, "feedforward='none' has no hidden width of its own, got ff_dim=8"),
    ({"feedforward": "none", "parallel_residual": True}, "True has no meaning for feedforward='none'"),
    ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ({"attention_dropout": -0.1}, "attention_dropout must be at least 0 and below 1, got -0.1"),
    ({"position": "rotary"}, "unknown position 'rotary'; valid: auto, learned, none, rope, sinusoidal"),
    ({"norm": "rmsnorm"}, "unknown norm 'rmsnorm'; did you mean 'rms'"),
    ({"lookup": 0}, "lookup must be at least 1, or None for no look-up, got 0"),
    ({"attention": []}, r"a list whose length divides num_layers, got \[\] for 4 layers"),
    ({"attention": ["llp"] * 3}, r"a list whose length divides num_layers, got \['llp', 'llp', 'llp'\]"),
])  # fmt: skip
def test_wrong_values_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**fields)
