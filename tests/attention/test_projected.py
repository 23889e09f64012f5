"""The settings of the projections, in every mechanism that has them: widths, biases, norms, rotary fractions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from subquad import attention
from subquad.attention.projected import HeadedAttention, ProjectedAttention
from subquad.layers.scaling import RopeScaling
from subquad.models import Decoder, DecoderConfig
from subquad.testing import assert_same_maths

PROJECTED = [name for name in attention.names() if issubclass(attention.mechanism(name), ProjectedAttention)]
HEADED = [name for name in attention.names() if issubclass(attention.mechanism(name), HeadedAttention)]
OTHERS = sorted(set(attention.names()) - set(HEADED))
SIZES: dict[str, dict[str, Any]] = {
    "bigbird": {"block": 4},
    "dilated": {"width": 4},
    "latte_macchiato": {"width": 4, "num_latents": 8},
    "llp": {"segment": 8},
    "llp_printed": {"segment": 8, "first_block_projections": True, "shared_kv": False, "key_norm": False},
    "longformer": {"width": 4, "num_global": 3},
    "shifted": {"group": 8},
    "strided": {"stride": 4},
    "window": {"width": 4},
}
SETTINGS: dict[str, Any] = {
    "num_kv_heads": 1,
    "rope": True,
    "head_dim": 10,
    "qk_norm": True,
    "norm_eps": 1e-3,
    "qkv_bias": True,
    "out_bias": False,
    "rope_fraction": 0.4,
    "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original=8),
}


def layer(name: str) -> ProjectedAttention:
    torch.manual_seed(0)
    made = attention.build(name, dim=14, num_heads=2, **SIZES.get(name, {}), **SETTINGS).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert isinstance(made, ProjectedAttention)
    return made


@pytest.mark.parametrize("name", PROJECTED)
@torch.no_grad()
def test_every_setting_is_in_the_definition_and_in_every_way_to_compute_it(name: str) -> None:
    made, x_BTD = layer(name), torch.randn(2, 21, 14, dtype=torch.float64)
    whole_BTD, after = made(x_BTD)
    assert_same_maths(whole_BTD, made.definition(x_BTD), name)
    first_BTD, state = made(x_BTD[:, :13])
    second_BTD, state = made(x_BTD[:, 13:], state)
    assert_same_maths(torch.cat((first_BTD, second_BTD), 1), whole_BTD, name)
    float32 = {key: value.float() for key, value in after.entries.items() if torch.is_tensor(value)}
    cost = made.cost(21)
    assert cost.parameters == sum(p.numel() for p in made.parameters())
    keys = [value for key, value in float32.items() if key.endswith(("keys", "values"))]
    assert sum(value[0].numel() * 4 for value in keys) <= cost.state_bytes
    assert made.query.weight.shape == (20, 14)
    assert made.key.weight.shape == (10, 14)
    assert made.query.bias is not None
    assert made.out.bias is None


@pytest.mark.parametrize("name", PROJECTED)
@pytest.mark.parametrize("setting", ["qk_norm", "norm_eps", "rope_fraction", "rope_scaling"])
@torch.no_grad()
def test_each_setting_changes_the_outputs(name: str, setting: str) -> None:
    made = layer(name)
    default = type(made.config).__dataclass_fields__[setting].default
    plain = type(made)(made.config.replace(**{setting: default})).double().eval()
    plain.load_state_dict({key: value for key, value in made.state_dict().items() if key in plain.state_dict()})
    x_BTD = torch.randn(1, 21, 14, dtype=torch.float64)
    assert not torch.equal(made(x_BTD)[0], plain(x_BTD)[0])


@pytest.mark.parametrize("name", sorted(set(HEADED) - set(PROJECTED)))
@torch.no_grad()
def test_scans_over_heads_have_the_widths_biases_and_norms_too(name: str) -> None:
    torch.manual_seed(0)
    own = {key: SETTINGS[key] for key in ("head_dim", "qk_norm", "norm_eps", "qkv_bias", "out_bias")}
    made, x_BTD = attention.build(name, dim=14, num_heads=2, **own).double().eval(), torch.randn(2, 21, 14).double()
    whole_BTD, _ = made(x_BTD)
    assert_same_maths(whole_BTD, made.definition(x_BTD), name)
    first_BTD, state = made(x_BTD[:, :13])
    second_BTD, state = made(x_BTD[:, 13:], state)
    assert_same_maths(torch.cat((first_BTD, second_BTD), 1), whole_BTD, name)
    shapes = {key: list(tensor.shape) for key, tensor in made.named_parameters()}
    assert [shapes[f"{part}.weight"] for part in ("query", "key", "value", "out")] == [*3 * ([20, 14],), [14, 20]]
    assert shapes["query_norm.weight"] == shapes["key_norm.weight"] == [10]
    assert "query.bias" in shapes
    assert "out.bias" not in shapes
    plain = type(made)(made.config.replace(qk_norm=False)).double().eval()
    plain.load_state_dict({key: value for key, value in made.state_dict().items() if "norm" not in key})
    assert not torch.equal(plain(x_BTD)[0], whole_BTD)
    float32 = type(made)(made.config).eval()
    assert float32(x_BTD[:1].float())[1].nbytes == float32.cost(21).state_bytes


def test_defaults_leave_the_digest_as_it_was() -> None:
    """States of releases before these settings are read: the digest was computed by one of them."""
    made = attention.build("full", dim=32, num_heads=2)
    assert made.config_hash == "3f92aff9c2842e45"
    assert DecoderConfig().digest() == "ae83fb5e5ebf3f60"
    assert DecoderConfig(head_dim=64).digest() != DecoderConfig().digest()
    assert DecoderConfig(head_dim=64).digest() != DecoderConfig(head_dim=32).digest()


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("setting", [{"head_dim": 8}, {"qk_norm": True}, {"qkv_bias": True}, {"out_bias": True}])
def test_a_mechanism_without_them_refuses_them(name: str, setting: dict[str, Any]) -> None:
    causal = "causal" in attention.mechanism(name).forms
    if not causal:
        pytest.skip("no layer of a decoder")
    config = DecoderConfig(vocab_size=9, dim=16, num_layers=1, num_heads=2, attention=name, position="none", **setting)
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.* has no meaning for attention '{name}'"):
        Decoder(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 0}, "dim, num_heads and head_dim must be at least 1"),
        ({"norm_eps": 0.0}, r"norm_eps must be above 0, got 0\.0"),
        ({"rope_fraction": 0.0}, r"rope_fraction must be above 0 and at most 1, got 0\.0"),
        ({"rope_fraction": 1.5}, "rope_fraction must be above 0 and at most 1"),
        ({"rope": True, "head_dim": 5}, r"rope needs an even head size, got rope_fraction \* head_dim = 5"),
        ({"rope": True, "rope_fraction": 0.1}, r"got rope_fraction \* head_dim = 0"),
    ],
)
def test_settings_that_make_no_layer_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention.build("full", dim=16, num_heads=2, **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_dim": 0}, "head_dim must be at least 1, or None, got 0"),
        ({"ff_dim": 0}, "ff_dim must be at least 1, or None, got 0"),
        ({"norm_eps": -1.0}, r"norm_eps must be above 0, or None, got -1\.0"),
        ({"rope_fraction": 2.0}, "rope_fraction must be above 0 and at most 1"),
        ({"rope_scaling": RopeScaling(), "position": "none"}, "rope_scaling is for rotary positions"),
        ({"rope_fraction": 0.5, "position": "learned"}, "rope_fraction is for rotary positions"),
        ({"ff_dim": 8, "feedforward": "bilinear"}, "feedforward='bilinear' has no hidden width of its own"),
    ],
)
def test_settings_that_make_no_decoder_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**settings)


@pytest.mark.parametrize("setting", [{"head_dim": 8}, {"ff_dim": 8}, {"parallel_residual": True}, {"ff_bias": True}])
def test_stacks_refuse_what_only_the_decoders_layers_have(setting: dict[str, Any]) -> None:
    from subquad.models.build import build_model

    options = {"perceiver_ar": {"latents": 4}}
    config = DecoderConfig(vocab_size=9, dim=16, num_heads=2, attention="perceiver_ar", options=options, **setting)
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.* has no meaning for attention 'perceiver_ar'"):
        build_model(config)


def test_the_cost_counts_widths_and_biases() -> None:
    config = DecoderConfig(
        vocab_size=9, dim=16, num_layers=1, num_heads=2, attention="full", head_dim=12, ff_dim=20, qkv_bias=True,
        qk_norm=True, tie_embeddings=True,
    )  # fmt: skip
    cost = Decoder(config).cost(7)
    matrices = 4 * 16 * 24 + 3 * 16 * 20
    assert cost.projection_flops == 2 * 7 * (matrices + 9 * 16)
    assert cost.parameters == matrices + 9 * 16 + 3 * 24 + 2 * 12 + 3 * 16
    assert cost.state_bytes == 2 * 4 * 24 * 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "longrope"}, "kind must be one of its choices, got 'longrope'"),
        ({"factor": 0.5}, r"rope_scaling\.factor must be at least 1, got 0\.5"),
        ({"kind": "yarn", "factor": 2.0}, r"rope_scaling\.original, the length trained on, must be at least 1"),
        ({"kind": "dynamic", "original": 8, "length": 4}, "length must be at least original, got length=4, original=8"),
        ({"beta_slow": 33.0}, "beta_slow must be above 0 and at most beta_fast"),
        ({"low_freq_factor": 4.0}, "low_freq_factor must be above 0 and below high_freq_factor"),
        ({"attention_factor": 0.0}, r"attention_factor must be above 0, got 0\.0"),
    ],
)
def test_scalings_that_mean_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling.from_dict(values)
    if "kind" in values and values["kind"] == "longrope":
        with pytest.raises(ValueError, match="unknown rope scaling 'longrope'"):
            RopeScaling(kind="longrope")  # type: ignore[arg-type]


def test_dynamic_scaling_needs_more_than_one_pair() -> None:
    with pytest.raises(ValueError, match="needs more than 2 rotated channels per head, got 2"):
        RopeScaling(kind="dynamic", factor=2.0, original=8, length=16).frequencies(2, 100.0)
