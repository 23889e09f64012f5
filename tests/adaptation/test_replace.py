"""A decoder with replaced attention, and how far it is the old one."""

import pytest
import torch

from subquad.adaptation.replace import replace_attention, replaced_layers
from subquad.adaptation.transfer import attention_errors, without_branch
from subquad.attention.base import split
from subquad.layers.scaling import RopeScaling
from subquad.models import Decoder, DecoderConfig
from subquad.testing import assert_same_maths

SHAPE = {"vocab_size": 31, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "init_std": 0.3}
TOKENS = torch.randint(0, 31, (2, 24), generator=torch.Generator().manual_seed(1))


def decoder(**changes):
    torch.manual_seed(0)
    config = DecoderConfig(**{**SHAPE, "num_layers": 4, "attention": "full", **changes})
    return Decoder(config).double().eval()


@pytest.mark.parametrize(
    ("layers", "every", "expected"),
    [(5, 4, (0, 1, 2, 4)), (5, 0, (0, 1, 2, 3, 4)), (4, 2, (0, 2)), (4, 4, (0, 1, 2)), (1, 0, (0,))],
)
def test_every_nth_layer_is_kept(layers, every, expected):
    assert replaced_layers(layers, every) == expected


@pytest.mark.parametrize(("name", "options", "keep_every", "position"), [
    ("window", {"width": 24}, 0, "rope"),
    ("window", {"width": 24}, 4, "learned"),
    ("llp", {"segment": 48}, 2, "rope"),
    ("llp", {"segment": 48}, 0, "learned"),
])  # fmt: skip
def test_within_reach_of_a_window_nothing_changes(name, options, keep_every, position):
    old = decoder(position=position)
    found = replace_attention(old, name, keep_every=keep_every, options=options)
    assert found.new == ()
    assert not found.decoder.training
    assert_same_maths(found.decoder.double()(TOKENS)[0], old(TOKENS)[0], "logits within the reach")


def test_latte_macchiato_without_latents_is_the_original_within_its_window():
    old = decoder()
    found = replace_attention(old, "latte_macchiato", keep_every=0, options={"width": 24})
    assert {name.split(".")[-2] for name in found.new} == {"latent_query", "latent_key"}
    new = found.decoder.double()
    with without_branch(new, "latents"):
        assert_same_maths(new(TOKENS)[0], old(TOKENS)[0], "logits without the latents")
    assert not torch.equal(new(TOKENS)[0], old(TOKENS)[0])


def test_linear_takes_shared_heads_apart():
    old = decoder(bias=True)
    new = replace_attention(old, "linear", keep_every=2).decoder
    assert new.config.num_kv_heads == 2, "kept layers have theirs"
    plain = replace_attention(decoder(position="none"), "linear", keep_every=2).decoder
    assert [made.blocks()[0].attention.config.rotary for made in (new, plain)] == [True, False], "as the original"
    before, after = old.blocks()[0].attention, new.double().blocks()[0].attention
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for name in ("key", "value"):
        (own,), (shared,) = (split(4, getattr(layer, name)(x)) for layer in (after, before))
        assert_same_maths(own, shared.repeat_interleave(2, 1), name)
    assert replace_attention(old, "linear", keep_every=0).decoder.config.num_kv_heads is None


@pytest.mark.parametrize("name", ["latte_macchiato", "linear", "llp", "window"])
def test_settings_of_other_families_find_their_place(name):
    """Qwen3's and GPT-NeoX's: normalised heads of another width, some biases, half-turned channels, both branches."""
    settings = {"head_dim": 8, "qk_norm": True, "qkv_bias": True, "out_bias": False, "rope_fraction": 0.5}
    scaling = RopeScaling(kind="linear", factor=2.0)
    old = decoder(**settings, parallel_residual=True, rope_scaling=scaling)
    for keep_every in (0, 2):
        found = replace_attention(old, name, keep_every=keep_every)
        new = found.decoder.blocks()[0].attention
        x = torch.randn(2, 3, 16, dtype=torch.float64)
        assert_same_maths(new.query(x), old.blocks()[0].attention.query(x), "queries")
        assert (new.config.rope_fraction, new.config.rope_scaling) == (0.5, scaling)
        assert all(torch.isfinite(error) for error in attention_errors(old, found.decoder, found.layers, TOKENS))


@pytest.mark.parametrize(("old", "name", "settings", "match"), [
    ({}, "llp", {"keep_every": 5}, r"keep_every must be 0 .* or at most 4 \(the layers\), got 5"),
    ({}, "llp", {"keep_every": 1}, "keep_every=1 keeps full attention in all 4 layers: nothing to replace"),
    ({"attention": ["full", "llp"]}, "llp", {}, "layer 2 has attention 'llp': only full attention can be replaced"),
    ({"attention": ["full", "window"]}, "llp", {"keep_every": 2}, "layer 2 has attention 'window': only full"),
    ({"loops": 2}, "llp", {}, "a conversion takes a plain Decoder with loops=1, got Decoder with loops=2"),
    ({}, "llp", {"options": {"rope_base": 500}}, "option 'rope_base' of attention 'llp' must stay as the weights were "
     "trained: leave it out; valid: dropout, "),
    ({}, "luna", {}, r"layers.0.attention.key.weight, of shape \[8, 16\], has .* cannot replace the model's attention"),
])  # fmt: skip
def test_impossible_replacements_are_refused(old, name, settings, match):
    with pytest.raises(ValueError, match=match):
        replace_attention(decoder(**old), name, **settings)
