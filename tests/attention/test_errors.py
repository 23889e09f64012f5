"""What a mechanism refuses, and how it says so."""

import pytest
import torch

from subquad.attention import Attention, build, mechanism, names
from subquad.attention.blocked import BlockedAttention
from subquad.attention.scanned import ScannedAttention

each = pytest.mark.parametrize("name", names())
BLOCKED = [name for name in names() if issubclass(mechanism(name), BlockedAttention)]
blocked = pytest.mark.parametrize("name", BLOCKED)
SIZES = {"dim": 16, "num_heads": 2}
X = torch.zeros(2, 5, 16)


@pytest.mark.parametrize("make", [mechanism, lambda name: build(name, **SIZES)], ids=["mechanism", "build"])
def test_an_unknown_name_is_answered_with_the_valid_ones(make):
    with pytest.raises(
        ValueError, match=r"unknown attention 'windwo'; did you mean 'window'\? valid: bigbird, dilated, elita, full"
    ):
        make("windwo")


@each
def test_an_unknown_option_is_answered_with_the_valid_ones(name):
    match = rf"attention '{name}' has no option 'dropuot'; did you mean 'dropout'\? valid: "
    with pytest.raises(ValueError, match=match):
        build(name, **SIZES, dropuot=0.1)


@each
def test_an_option_of_the_wrong_type_is_refused(name):
    with pytest.raises(TypeError, match=r"^bias must be bool, got 'yes'$"):
        build(name, **SIZES, bias="yes")


@each
@pytest.mark.parametrize(("dim", "heads"), [(16, 3), (0, 1), (16, 0), (-16, 2), (16, -2)])
def test_heads_must_share_the_width(name, dim, heads):
    match = f"dim must be a positive multiple of num_heads, got dim={dim}, num_heads={heads}"
    with pytest.raises(ValueError, match=match):
        build(name, dim=dim, num_heads=heads)


@each
@pytest.mark.parametrize("dropout", [1.0, -0.1])
def test_dropout_must_be_a_probability_below_one(name, dropout):
    with pytest.raises(ValueError, match=f"dropout must be at least 0 and below 1, got {dropout}"):
        build(name, **SIZES, dropout=dropout)


@blocked
@pytest.mark.parametrize("kv_heads", [3, 0, -1])
def test_key_heads_must_divide_the_heads(name, kv_heads):
    match = f"num_kv_heads must divide num_heads, got num_kv_heads={kv_heads}, num_heads=2"
    with pytest.raises(ValueError, match=match):
        build(name, **SIZES, num_kv_heads=kv_heads)


@blocked
def test_rotary_positions_need_an_even_head(name):
    with pytest.raises(ValueError, match="rope needs an even head size, got dim / num_heads = 3"):
        build(name, dim=6, num_heads=2, rope=True)


@blocked
@pytest.mark.parametrize("base", [0.0, -1.0])
def test_the_rotary_base_must_be_positive(name, base):
    with pytest.raises(ValueError, match=f"rope_base must be positive, got {base}"):
        build(name, **SIZES, rope_base=base)


OPTIONS = {
    "width": ("window", {"width": 0}, "width must be at least 1, got 0"),
    "odd segment": ("llp", {"segment": 7}, r"segment must be even and at least 2 \(two half segments\), got 7"),
    "no segment": ("llp", {"segment": 0}, r"segment must be even and at least 2 \(two half segments\), got 0"),
    "latents": (
        "latte",
        {"num_latents": 5},
        r"num_latents must be a positive multiple of num_heads .*, got num_latents=5, num_heads=2",
    ),
    "no latents": ("latte", {"num_latents": 0}, "num_latents must be a positive multiple of num_heads"),
    "feature map": (
        "linear",
        {"feature_map": "rellu"},
        r"unknown feature_map 'rellu'; did you mean 'relu'\? valid: elu, learned, relu, softmax, softplus, squ",
    ),
    "eps": ("linear", {"eps": -1e-6}, "eps must be at least 0, got -1e-06"),
    "feature dim": (
        "linear",
        {"feature_dim": 4},
        "feature_dim must be at least 1 and is for feature_map=learned, got 4",
    ),
    "no features": (
        "linear",
        {"feature_dim": 0, "feature_map": "learned"},
        "feature_dim must be at least 1 and is for feature_map=learned, got 0 with feature_map=learned",
    ),
    "rotary": (
        "linear",
        {"rotary": True, "num_heads": 16},
        "rotary needs an even number of channels to turn, got 1 of 1 in a head",
    ),
    "rotary part": ("linear", {"rope_fraction": 1.5}, "rope_fraction must be above 0 and at most 1, got 1.5"),
    "rotary base": ("linear", {"rope_base": 0.0}, "rope_base must be positive, got 0.0"),
    "dilated width": ("dilated", {"width": 0}, "width must be at least 1, got 0"),
    "dilation": ("dilated", {"dilation": 0}, "dilation must be at least 1, got 0"),
    "stride": ("strided", {"stride": 0}, "stride must be at least 1, got 0"),
    "kind": (
        "strided",
        {"kind": "fixd"},
        r"kind must be one of its choices, got 'fixd'; did you mean 'fixed'\? valid: fixed, strided",
    ),
    "columns": (
        "strided",
        {"kind": "fixed", "stride": 4, "columns": 5},
        "columns must be from 1 to stride=4, got 5",
    ),
    "one head": ("strided", {"num_heads": 1}, "needs at least 2 heads, got num_heads=1"),
    "no half": ("shifted", {"num_heads": 1}, "half of the heads: num_heads=1 has no half"),
    "odd group": ("shifted", {"group": 7}, r"group must be even and at least 2 \(two halves\), got 7"),
    "longformer width": ("longformer", {"width": 0}, "width must be at least 1, got 0"),
    "no global": ("longformer", {"num_global": 0}, r"num_global must be at least 1 \(else use window\), got 0"),
    "block": ("bigbird", {"block": 0}, "block must be at least 1, got 0"),
    "seed": ("bigbird", {"seed": 2**32}, r"seed must be below 2\*\*32, got 4294967296"),
    "random": ("bigbird", {"num_random": -1}, "num_random must be at least 0, got -1"),
    "macchiato width": ("latte_macchiato", {"width": 0}, "width must be at least 1, got 0"),
    "macchiato latents": (
        "latte_macchiato",
        {"num_latents": 3},
        r"num_latents must be a positive multiple of num_heads .*, got num_latents=3, num_heads=2",
    ),
    "odd segment as printed": ("llp_printed", {"segment": 7}, r"segment must be even and at least 2 .*, got 7"),
    "shifted both ways": ("llp", {"shifted_heads": True, "causal": False}, "shifted_heads is a causal form"),
    "quarter": (
        "llp",
        {"shifted_heads": True, "segment": 6},
        "at least 2 heads and a multiple of 4, got num_heads=2, segment=6",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_out_of_range_is_refused(case):
    name, options, match = OPTIONS[case]
    with pytest.raises(ValueError, match=match):
        build(name, **(SIZES | options))


@pytest.mark.parametrize(("tokens", "padded"), [(9, False), (8, True)])
def test_a_published_shift_takes_whole_groups_only(tokens, padded):
    layer, x = build("shifted", **SIZES, group=8, wrap=True), torch.zeros(1, tokens, 16)
    with pytest.raises(ValueError, match=f"whole groups of 8 tokens without padding, got {tokens} tokens"):
        layer(x, mask=torch.ones(1, tokens, dtype=torch.bool) if padded else None)
    with pytest.raises(ValueError, match="this shifted layer is not causal"):
        layer(x[:, :8], layer(x[:, :8])[1])


@each
@pytest.mark.parametrize("shape", [(5, 16), (2, 5, 8), (2, 2, 5, 16)])
def test_inputs_of_another_shape_are_refused(name, shape):
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 16\], got \("):
        build(name, **SIZES)(torch.zeros(shape))


@pytest.mark.parametrize("name", [name for name in names() if "causal" in mechanism(name).forms])
def test_another_configurations_state_is_refused(name):
    layer, other = build(name, **SIZES), build(name, **SIZES, bias=True)
    state = other(X)[1]
    match = f"the state was made by configuration '{other.config_hash}' but this {name} layer has '{layer.config_hash}'"
    with pytest.raises(ValueError, match=match):
        layer(X, state)


@each
@pytest.mark.parametrize("call", ["forward", "weights"])
def test_a_mask_that_does_not_fit_is_refused(name, call):
    function = getattr(build(name, **SIZES), call)
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        function(X, mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 5\), one entry per token, got \(2, 4\)"):
        function(X, mask=torch.ones(2, 4, dtype=torch.bool))


@each
def test_a_cost_of_fewer_than_no_tokens_is_refused(name):
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        build(name, **SIZES).cost(-1)


class Bare(Attention):
    """A mechanism that defines nothing; it has no name, so it is not registered."""


class BareScan(ScannedAttention):
    """A recurrence without its own part."""


ABSTRACT = {
    "mix_tokens": (X, None, None),
    "dense_weights": (X,),
    "values": (X,),
    "merge": (X[:, None],),
}


@pytest.mark.parametrize("method", ABSTRACT)
def test_what_a_mechanism_must_define_is_named(method, monkeypatch):
    monkeypatch.setattr(Bare, "name", "bare", raising=False)
    layer = Bare(Attention.Config(**SIZES))
    with pytest.raises(NotImplementedError, match=rf"Bare must define {method} \(Attention is abstract\)"):
        getattr(layer, method)(*ABSTRACT[method])


def test_a_shared_base_defines_its_part_only(monkeypatch):
    monkeypatch.setattr(BareScan, "name", "bare_scan", raising=False)
    layer = BareScan(Attention.Config(**SIZES))
    assert layer.merge(layer.values(X)).shape == X.shape
    with pytest.raises(NotImplementedError, match="BareScan must define mix_tokens"):
        layer(X)
