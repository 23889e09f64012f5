"""The decoder's configuration as a transformers configuration."""

import dataclasses

import pytest

from subquad.hf import SubquadConfig
from subquad.layers.scaling import RopeScaling
from subquad.models import DecoderConfig


def test_it_holds_every_field_of_the_decoder_with_its_default():
    assert SubquadConfig().decoder_config() == DecoderConfig()
    odd = DecoderConfig(
        vocab_size=77, dim=48, num_layers=6, num_heads=6, num_kv_heads=2, attention=["llp", "full"],
        options={"llp": {"segment": 32}}, max_positions=99, rope_base=5.0, norm="layer",
        feedforward="gelu", ff_mult=2.0, loops=3, loop_loss="all", bias=True, dropout=0.1, attention_dropout=0.2,
        tie_embeddings=False, lookup=64, lookup_residual=False, init_std=0.1, head_dim=10, ff_dim=20, norm_eps=1e-3,
        qk_norm=True, qkv_bias=False, out_bias=False, ff_bias=False, parallel_residual=True, rope_fraction=0.4,
        rope_scaling=RopeScaling(factor=2.0), embedding_scale=2.0, residual_scale=3.0, logit_divisor=4.0,
        head_bias=True,
    )  # fmt: skip
    different = {f.name for f in dataclasses.fields(odd) if getattr(odd, f.name) != getattr(DecoderConfig(), f.name)}
    others = {"position", "position_scale", "norm_position"}  # which rotary positions and parallel branches exclude
    assert different == {f.name for f in dataclasses.fields(odd)} - others
    assert SubquadConfig.from_decoder(odd).decoder_config() == odd
    sines = DecoderConfig(position="sinusoidal", position_scale=1.0, norm_position="post")
    assert SubquadConfig.from_decoder(sines).decoder_config() == sines


@pytest.mark.parametrize(("key", "hint"), [
    ("rope_theta", r"did you mean 'rope_base'\?$"), ("intermediate_size", r"did you mean 'ff_dim'\?$"),
    ("num_local_experts", r"there is no mixture of experts \(docs/limits\.md\)$"),
])  # fmt: skip
def test_names_of_transformers_that_are_no_aliases_are_answered_with_ours(key, hint):
    with pytest.raises(ValueError, match=f"^SubquadConfig has no field '{key}'; {hint}"):
        SubquadConfig(**{key: 8})


def test_the_usual_names_are_aliases_and_fields_of_other_libraries_pass():
    other = {"tokenizer_class": "PreTrainedTokenizerFast", "some_tool": {"a": 1}}
    config = SubquadConfig(hidden_size=64, num_hidden_layers=2, tie_word_embeddings=False, **other)
    assert (config.dim, config.num_layers, config.tie_embeddings) == (64, 2, False)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, None)
    assert config.some_tool == {"a": 1}
    config.options["llp"] = {"segment": 32}
    assert SubquadConfig().options == {}


@pytest.mark.parametrize(("fields", "error", "message"), [
    ({"subquad_version": 2}, ValueError, "has subquad_version 2; this release reads version 1"),
    ({"num_layer": 3}, ValueError, "no field 'num_layer'; did you mean 'num_layers'"),
    ({"dim": 30}, ValueError, "dim must be a multiple of num_heads, got dim=30, num_heads=4"),
    ({"position": "rotary"}, ValueError, "position must be one of its choices, got 'rotary'"),
    ({"dim": "64"}, TypeError, "dim must be int, got '64'"),
])  # fmt: skip
def test_wrong_fields_are_named(fields, error, message):
    with pytest.raises(error, match=message):
        SubquadConfig(**fields)
