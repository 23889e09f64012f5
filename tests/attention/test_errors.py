"""Each refusal of a mechanism names the value, the rule and the valid choices."""

import pytest
import torch

from subquad.attention import Attention, build, mechanism, names
from subquad.attention.parts import SoftmaxConfig

each = pytest.mark.parametrize("name", names())
CAUSAL = [name for name in names() if "causal" in mechanism(name).forms]
SIZES = {"dim": 16, "num_heads": 2}
X = torch.zeros(2, 5, 16)


def refuses(match, error=ValueError):
    return pytest.raises(error, match=match)


@pytest.mark.parametrize("make", [mechanism, lambda name: build(name, **SIZES)], ids=["mechanism", "build"])
def test_an_unknown_name_is_answered_with_the_valid_ones(make):
    with refuses(rf"unknown attention 'windwo'; did you mean 'window'\? valid: window, .* and {len(names()) - 8} more"):
        make("windwo")


@pytest.mark.parametrize(("name", "hint"), [
    *((name, r"did you mean 'full'\?") for name in ("sdpa", "softmax", "mha", "attention", "flash")),
    ("mamba", r"did you mean 'mamba2'\?"),
    ("rwkv", r"there is no RWKV, 'gla' \(version 6\) and 'kda' \(version 7\) are nearest"),
    ("gqa", "grouped queries are an option: 'full' with num_kv_heads"),
])  # fmt: skip
def test_names_of_other_libraries_are_answered_with_ours(name, hint):
    with refuses(rf"unknown attention '{name}'; {hint}.* valid: "):
        build(name, **SIZES)


@each
def test_options_by_position_are_answered_with_their_names(name):
    cls, config = mechanism(name), build(name, **SIZES).config
    assert cls(config).config == config
    for given, options, shown in (
        ((64, 4), {}, "dim=64, num_heads=4"), ((64,), {"num_heads": 4}, "dim=64, num_heads=4"),
        ((config,), {"bias": True}, "bias=True"),
    ):  # fmt: skip
        match = rf"^{cls.__name__} takes its options by name, as in {cls.__name__}\({shown}\), or a finished conf"
        with refuses(match, TypeError):
            cls(*given, **options)


@each
def test_what_stands_in_another_arguments_place_is_named(name):
    layer = build(name, **SIZES)
    mask, pair = torch.ones(2, 5, dtype=torch.bool), layer(X)
    for given, kind in ((mask, "Tensor"), (pair, "tuple")):
        with refuses(
            rf"state must be a State .*, got {kind}; give a mask by its name: layer\(x, mask=mask\)", TypeError
        ):
            layer(X, given)
    with refuses(r"mask must be a bool tensor .*, got State", TypeError):
        layer(X, mask=pair[1])
    with refuses(r"x must be a tensor \[B, T, 16\], got tuple; .* y, state = layer\(x\)", TypeError):
        layer(pair)


@each
def test_common_options_are_checked(name):
    with refuses(rf"attention '{name}' has no option 'dropuot'; did you mean 'dropout'\? valid: "):
        build(name, **SIZES, dropuot=0.1)
    with refuses(r"^bias must be bool, got 'yes'$", TypeError):
        build(name, **SIZES, bias="yes")
    for dim, heads in ((16, 3), (0, 1), (16, 0), (-16, 2), (16, -2)):
        with refuses(f"dim must be a positive multiple of num_heads, got dim={dim}, num_heads={heads}"):
            build(name, dim=dim, num_heads=heads)
    for dropout in (1.0, -0.1):
        with refuses(f"dropout must be at least 0 and below 1, got {dropout}"):
            build(name, **SIZES, dropout=dropout)


@pytest.mark.parametrize("name", [name for name in names() if issubclass(mechanism(name).Config, SoftmaxConfig)])
def test_options_of_softmax_mechanisms_are_checked(name):
    for heads in (3, 0, -1):
        with refuses(f"num_kv_heads must divide num_heads, got num_kv_heads={heads}, num_heads=2"):
            build(name, **SIZES, num_kv_heads=heads)
    for base in (0.0, -1.0):
        with refuses(f"rope_base must be positive, got {base}"):
            build(name, **SIZES, rope_base=base)
    with refuses("score_scale must be above 0, or None, got 0.0"):
        build(name, **SIZES, score_scale=0.0)
    with refuses("rope needs an even head size, got dim / num_heads = 3"):
        build(name, dim=6, num_heads=2, rope=True)


OPTIONS = [
    ("bigbird", {"block": 0}, "block must be at least 1, got 0"),
    ("bigbird", {"seed": 2**32}, r"seed must be below 2\*\*32, got 4294967296"),
    ("bigbird", {"num_random": -1}, "num_random must be at least 0, got -1"),
    ("dilated", {"width": 0}, "width must be at least 1, got 0"),
    ("dilated", {"dilation": 0}, "dilation must be at least 1, got 0"),
    ("elita", {"horizon": 1}, "horizon must be at least 2, got 1"),
    ("elita", {"position_width": 0}, "position_width must be at least 1, got 0"),
    ("elita", {"time": "i"}, r"time must be one of its choices, got 'i'.*valid: i/\(N-1\), i/N"),
    ("elita", {"self_term": "own"}, r"self_term must be one of its choices, got 'own'.*valid: diagonal, slot"),
    ("elita", {"self_term": "diagonal", "query_term": False}, "query_term=False has no effect with self_term='diago"),
    ("latte", {"num_latents": 5}, "num_latents must be a positive multiple of num_heads .*, got num_latents=5, num_he"),
    ("latte_macchiato", {"num_latents": 0}, "num_latents must be a positive multiple of num_heads"),
    ("latte_macchiato", {"width": 0}, "width must be at least 1, got 0"),
    ("linear", {"feature_map": "rellu"}, r"unknown feature_map 'rellu'; did you mean 'relu'\? valid: elu, learned, "),
    ("linear", {"eps": -1e-6}, "eps must be at least 0, got -1e-06"),
    ("linear", {"feature_dim": 4}, "feature_dim must be at least 1 and is for feature_map=learned, got 4"),
    ("linear", {"feature_dim": 0, "feature_map": "learned"}, "feature_map=learned, got 0 with feature_map=learned"),
    ("linear", {"rotary": True, "num_heads": 16}, "rotary needs an even number of channels .*, got 1 of 1 in a head"),
    ("linear", {"rope_fraction": 1.5}, "rope_fraction must be above 0 and at most 1, got 1.5"),
    ("linear", {"rope_base": 0.0}, "rope_base must be positive, got 0.0"),
    ("linformer", {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ("linformer", {"projected": 0}, "projected must be at least 1, got 0"),
    ("llp", {"segment": 7}, r"segment must be even and at least 2 \(two half segments\), got 7"),
    ("llp", {"segment": 0}, r"segment must be even and at least 2 \(two half segments\), got 0"),
    ("llp", {"shifted_heads": True, "causal": False}, "shifted_heads is a causal form"),
    ("llp", {"shifted_heads": True, "segment": 6}, "at least 2 heads and a multiple of 4, got num_heads=2, segment=6"),
    ("llp", {"shared_kv": True}, "attention 'llp' has no option 'shared_kv'"),
    ("llp_printed", {"segment": 7}, r"segment must be even and at least 2 .*, got 7"),
    ("longformer", {"width": 0}, "width must be at least 1, got 0"),
    ("longformer", {"num_global": 0}, r"num_global must be at least 1 \(else use window\), got 0"),
    ("luna", {"memory_tokens": 0}, "memory_tokens must be at least 1, got 0"),
    ("luna", {"pack_heads": 3, "causal": False}, "pack_heads must be at least 1 and divide dim, got pack_heads=3"),
    ("luna", {"pack_heads": 0}, "pack_heads must be at least 1 and divide dim, got pack_heads=0, dim=16"),
    ("luna", {"pack_heads": 4}, "packs and unpacks with the same heads, got pack_heads=4, num_heads=2"),
    ("performer", {"features": 0}, "features must be at least 1, got 0"),
    ("performer", {"redraw_interval": 0}, "redraw_interval must be at least 1, got 0"),
    ("shifted", {"num_heads": 1}, "half of the heads: num_heads=1 has no half"),
    ("shifted", {"group": 7}, r"group must be even and at least 2 \(two halves\), got 7"),
    ("strided", {"stride": 0}, "stride must be at least 1, got 0"),
    ("strided", {"kind": "fixd"}, r"kind must be one of its choices, got 'fixd'; did you mean 'fixed'\? valid: "),
    ("strided", {"kind": "fixed", "stride": 4, "columns": 5}, "columns must be from 1 to stride=4, got 5"),
    ("strided", {"num_heads": 1}, "needs at least 2 heads, got num_heads=1"),
    ("window", {"width": 0}, "width must be at least 1, got 0"),
    ("window", {"sinks": -1}, "sinks must be at least 0, got -1"),
    ("llp", {"sinks": 3, "causal": False}, "sinks are for the causal form, .* longformer, got sinks=3, causal=False"),
    *((name, {option: 1}, f"attention '{name}' has no option '{option}'")
      for name in ("full", "shifted", "llp_printed") for option in ("sinks", "learned_sink")),
    # Settings of the projections, which every softmax mechanism has.
    ("full", {"head_dim": 0}, "dim, num_heads and head_dim must be at least 1"),
    ("full", {"norm_eps": 0.0}, r"norm_eps must be above 0, got 0\.0"),
    ("full", {"rope_fraction": 0.0}, r"rope_fraction must be above 0 and at most 1, got 0\.0"),
    ("full", {"rope": True, "head_dim": 5}, r"rope needs an even head size, got rope_fraction \* head_dim = 5"),
    ("full", {"rope": True, "rope_fraction": 0.1}, r"got rope_fraction \* head_dim = 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "match"), OPTIONS, ids=[f"{name}-{o}" for name, o, _ in OPTIONS])
def test_an_option_out_of_range_is_refused(name, options, match):
    with refuses(match):
        build(name, **(SIZES | options))


@each
def test_wrong_inputs_are_refused(name):
    layer = build(name, **SIZES)
    for shape in ((5, 16), (2, 5, 8), (2, 2, 5, 16)):
        with refuses(r"x must have shape \[B, T, 16\], got \("):
            layer(torch.zeros(shape))
    for call in (layer.forward, layer.weights):
        with refuses("mask must be a bool tensor", TypeError):
            call(X, mask=torch.ones(2, 5))
        with refuses(r"mask must have shape \(2, 5\), one entry per token, got \(2, 4\)"):
            call(X, mask=torch.ones(2, 4, dtype=torch.bool))
    with refuses("tokens must be at least 0, got -1"):
        layer.cost(-1)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_state_of_another_configuration_or_batch_is_refused(name):
    layer, other = build(name, **SIZES), build(name, **SIZES, bias=True)
    made, own = f"made by configuration '{other.config_hash}'", f"this {name} layer has '{layer.config_hash}'"
    with refuses(f"the state was {made} but {own}"):
        layer(X, other(X)[1])
    with refuses(f"the state holds 1 sequences but this {name} layer was given 2"):
        layer(X, layer(X[:1])[1])


def test_packed_documents_have_no_state_before_them():
    layer = build("latte", **SIZES)
    with refuses("doc_ids begin new documents, and these have no state before them"):
        layer(X, layer(X)[1], doc_ids=torch.zeros(2, 5, dtype=torch.int64))


@each
@pytest.mark.parametrize("form", ["causal", "bidirectional"])
def test_a_form_that_a_mechanism_lacks_is_refused_and_so_is_a_state_where_it_keeps_none(name, form):
    forms, options = mechanism(name).forms, SIZES | {"causal": form == "causal"}
    if form not in forms:
        with refuses(f"attention '{name}' has no {form} form; it has: {', '.join(forms)}"):
            build(name, **options)
        return
    layer = build(name, **options)
    assert layer.causal == options["causal"]
    if not layer.causal:
        with refuses(f"this {name} layer is not causal: it reads whole sequences and takes no state"):
            layer(X, layer(X)[1])


@pytest.mark.parametrize(("tokens", "padded"), [(9, False), (8, True)])
def test_a_published_shift_takes_whole_groups_only(tokens, padded):
    layer, x = build("shifted", **SIZES, group=8, wrap=True), torch.zeros(1, tokens, 16)
    with refuses(f"whole groups of 8 tokens without padding, got {tokens} tokens"):
        layer(x, mask=torch.ones(1, tokens, dtype=torch.bool) if padded else None)
    with refuses("this shifted layer is not causal"):
        layer(x[:, :8], layer(x[:, :8])[1])


class Bare(Attention):
    """Defines nothing; without a name it isn't registered."""


ABSTRACT = {"mix": (X, None)}


def test_what_a_mechanism_must_define_is_named(monkeypatch):
    monkeypatch.setattr(Attention, "name", "bare", raising=False)
    for method, arguments in ABSTRACT.items():
        with refuses(rf"Bare must define {method} \(Attention is abstract\)", NotImplementedError):
            getattr(Bare(Attention.Config(**SIZES)), method)(*arguments)
    with refuses("Bare must define mix", NotImplementedError):
        Bare(Attention.Config(**SIZES))(X)
