"""What stands in the new decoder, and how far it is the old one."""

from contextlib import ExitStack, nullcontext

import pytest
import torch

from subquad.adaptation.replace import replace_attention, replaced_layers
from subquad.adaptation.transfer import attention_errors, silenced, windows_dropped, without_branch
from subquad.layers.scaling import RopeScaling
from subquad.models import Decoder, DecoderConfig
from subquad.testing import assert_same_maths

SHAPE = {"vocab_size": 31, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "init_std": 0.3}


def decoder(**changes):
    torch.manual_seed(0)
    config = DecoderConfig(**{**SHAPE, "num_layers": 4, "attention": "full", **changes})
    return Decoder(config).double().eval()


@pytest.fixture
def tokens():
    return torch.randint(0, 31, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("layers", "every", "expected"),
    [(5, 4, (0, 1, 2, 4)), (5, 0, (0, 1, 2, 3, 4)), (4, 2, (0, 2)), (4, 4, (0, 1, 2)), (1, 0, (0,))],
)
def test_every_so_many_layers_one_is_kept(layers, every, expected):
    assert replaced_layers(layers, every) == expected


@pytest.mark.parametrize(
    ("name", "options"), [("window", {"width": 24}), ("llp", {"segment": 48})], ids=["window", "llp"]
)
@pytest.mark.parametrize("keep_every", [0, 2, 4])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_within_reach_of_a_window_nothing_changes(tokens, name, options, keep_every, position):
    old = decoder(position=position)
    found = replace_attention(old, name, keep_every=keep_every, options=options)
    assert found.new == ()
    assert not found.decoder.training
    assert_same_maths(found.decoder.double()(tokens)[0], old(tokens)[0], "logits within the reach")


def test_latte_macchiato_without_latents_is_the_original_within_its_window(tokens):
    old = decoder()
    found = replace_attention(old, "latte_macchiato", keep_every=0, options={"width": 24})
    assert {name.split(".")[-2] for name in found.new} == {"latent_query", "latent_key"}
    new = found.decoder.double()
    with without_branch(new, "latents"):
        assert_same_maths(new(tokens)[0], old(tokens)[0], "logits without the latents")
    assert not torch.equal(new(tokens)[0], old(tokens)[0])


@pytest.mark.parametrize(("probability", "closed"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_windows_are_closed_as_often_as_asked(tokens, probability, closed):
    new = replace_attention(decoder(), "latte_macchiato", keep_every=0, options={"width": 8}).decoder.double()
    outputs, generator = [], torch.Generator().manual_seed(1)
    draws = (torch.rand(4, generator=generator) < probability).tolist()
    assert sum(draws) == closed
    with windows_dropped(new, probability, torch.Generator().manual_seed(1)):
        outputs.append(new(tokens)[0])
    with ExitStack() as stack:
        for block, drawn in zip(new.blocks(), draws, strict=True):
            stack.enter_context(block.attention.without("window") if drawn else nullcontext())
        outputs.append(new(tokens)[0])
    assert_same_maths(*outputs, "the windows that were drawn")
    assert torch.equal(outputs[0], new(tokens)[0]) == (closed == 0)


def test_linear_takes_shared_heads_apart(tokens):
    old = decoder(bias=True)
    new = replace_attention(old, "linear", keep_every=2).decoder
    assert new.config.num_kv_heads == 2, "kept layers have theirs"
    before, after = old.blocks()[0].attention, new.double().blocks()[0].attention
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    assert_same_maths(after.values(x), before.values(x), "values")
    keys = before.shared(before.split(before.key(x), 2))
    assert_same_maths(after.split(after.key(x)), keys, "keys")
    assert after.config.rotary
    assert replace_attention(old, "linear", keep_every=0).decoder.config.num_kv_heads is None
    assert (
        not replace_attention(decoder(position="none"), "linear", keep_every=2)
        .decoder.blocks()[0]
        .attention.config.rotary
    )


@pytest.mark.parametrize("name", ["latte_macchiato", "linear", "llp", "window"])
def test_settings_of_other_families_find_their_place(tokens, name):
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
        assert all(torch.isfinite(error) for error in attention_errors(old, found.decoder, found.layers, tokens))


def test_errors_are_those_of_each_layer_alone(tokens):
    old = decoder()
    found = replace_attention(old, "window", keep_every=0, options={"width": 3})
    new, layers = found.decoder.double(), (0, 1, 2, 3)
    x = old.embedding(tokens, 0)
    for i, error in zip(layers, attention_errors(old, new, layers, tokens), strict=True):
        block = old.blocks()[i]
        z = block.attention_norm(x)
        y, own = (mixer(z)[0] for mixer in (block.attention, new.blocks()[i].attention))
        assert_same_maths(error, (own - y).square().sum() / y.square().sum(), f"error of layer {i}")
        x = block(x, None, None)[0]
    same = replace_attention(old, "window", keep_every=0, options={"width": 24}).decoder.double()
    for error in attention_errors(old, same, layers, tokens):
        assert_same_maths(error, torch.zeros_like(error), "within reach")


def test_silenced_layers_leave_the_residual_stream(tokens):
    new = decoder()
    x = new.embedding(tokens, 0)
    for i, block in enumerate(new.blocks()):
        y = torch.zeros_like(x) if i < 2 else block.attention(block.attention_norm(x))[0]
        x = x + y
        x = x + block.feedforward(block.feedforward_norm(x))
    with silenced([block.attention for block in new.blocks()[:2]]):
        assert_same_maths(new.vectors(tokens), new.norm(x), "two layers without attention")
    assert not torch.equal(new.vectors(tokens), new.norm(x))


@pytest.mark.parametrize(
    ("old", "name", "settings", "match"),
    [
        ({}, "llp", {"keep_every": 5}, "keep_every must lie between 0 .* and the model's 4 layers, got 5"),
        ({}, "llp", {"keep_every": -1}, "keep_every must lie between 0 .* and the model's 4 layers, got -1"),
        ({}, "llp", {"keep_every": 1}, "keep_every=1 keeps full attention in all 4 layers: nothing to replace"),
        ({"attention": ["full", "llp"]}, "llp", {}, "layer 2 has attention 'llp': full attention alone is replaced"),
        ({"loops": 2}, "llp", {}, "a conversion takes a plain Decoder with one pass, got Decoder of 2 passes"),
        ({}, "lpp", {}, r"unknown attention 'lpp'; did you mean 'llp'\?"),
        ({}, "llp", {"options": {"segments": 4}}, "attention 'llp' has no option 'segments'; did you mean 'segment'"),
        ({}, "luna", {}, r"layers.0.attention.key.weight, of shape \[8, 16\], has .* cannot take over"),
    ],
)  # fmt: skip
def test_what_cannot_be_replaced(old, name, settings, match):
    with pytest.raises(ValueError, match=match):
        replace_attention(decoder(**old), name, **settings)
