"""The settings of the projections, in every mechanism that has them: widths, biases, norms, rotary fractions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from subquad import attention
from subquad.attention import Attention
from subquad.attention.parts import HeadedConfig, SoftmaxConfig
from subquad.layers.scaling import RopeScaling
from subquad.models import Decoder, DecoderConfig
from subquad.models.build import build_model
from subquad.testing import assert_same_maths, in_pieces
from tests.models.small import OPTIONS

PROJECTED = [name for name in attention.names() if issubclass(attention.mechanism(name).Config, SoftmaxConfig)]
HEADED = [name for name in attention.names() if issubclass(attention.mechanism(name).Config, HeadedConfig)]
OTHERS = sorted(name for name in set(attention.names()) - set(HEADED) if "causal" in attention.mechanism(name).forms)
APART = {"segment": 8, "first_block_projections": True, "shared_kv": False, "key_norm": False}
SIZES: dict[str, dict[str, Any]] = OPTIONS | {"llp_printed": APART, "longformer": {"width": 4, "num_global": 3}}
SETTINGS: dict[str, Any] = {"head_dim": 10, "qk_norm": True, "norm_eps": 1e-3, "qkv_bias": True, "out_bias": False}
SOFTMAX: dict[str, Any] = {
    "num_kv_heads": 1, "rope": True, "rope_fraction": 0.4, "score_scale": 0.7,
    "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original=8),
}  # fmt: skip
"""Settings that only softmax mechanisms have."""


def layer(name: str) -> Attention:
    torch.manual_seed(0)
    own = SETTINGS | (SOFTMAX if name in PROJECTED else {})
    made = attention.build(name, dim=14, num_heads=2, **SIZES.get(name, {}), **own).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("name", HEADED)
@torch.no_grad()
def test_every_setting_is_in_the_definition_and_in_every_way_to_compute_it(name: str) -> None:
    made, x_BTD = layer(name), torch.randn(2, 21, 14, dtype=torch.float64)
    whole_BTD = made(x_BTD)[0]
    assert_same_maths(whole_BTD, made.definition(x_BTD), name)
    assert_same_maths(in_pieces(made, x_BTD, [13]), whole_BTD, name)
    shapes = {key: list(parameter.shape) for key, parameter in made.named_parameters()}
    assert shapes["query.weight"] == [20, 14]
    assert shapes["key.weight"] == [10 if name in PROJECTED else 20, 14]
    assert shapes["query_norm.weight"] == shapes["key_norm.weight"] == [10]
    assert "query.bias" in shapes
    assert "out.bias" not in shapes


CHANGES = [(name, setting) for name in HEADED for setting in ("qk_norm", "norm_eps")]
CHANGES += [(name, setting) for name in PROJECTED for setting in ("rope_fraction", "rope_scaling", "score_scale")]


@pytest.mark.parametrize(("name", "setting"), CHANGES)
@torch.no_grad()
def test_each_setting_changes_the_outputs(name: str, setting: str) -> None:
    made = layer(name)
    default = type(made.config).__dataclass_fields__[setting].default
    plain = type(made)(made.config.replace(**{setting: default})).double().eval()
    plain.load_state_dict({key: value for key, value in made.state_dict().items() if key in plain.state_dict()})
    x_BTD = torch.randn(1, 21, 14, dtype=torch.float64)
    assert not torch.equal(made(x_BTD)[0], plain(x_BTD)[0])


def test_settings_are_part_of_the_digest() -> None:
    assert len({DecoderConfig(head_dim=width).digest() for width in (None, 32, 64)}) == 3


@pytest.mark.parametrize("name", OTHERS)
def test_a_mechanism_without_them_refuses_them(name: str) -> None:
    shape = {"vocab_size": 9, "dim": 16, "num_layers": 1, "num_heads": 2, "position": "none", "attention": name}
    for setting in ({"head_dim": 8}, {"qk_norm": True}, {"qkv_bias": True}, {"out_bias": True}):
        with pytest.raises(ValueError, match=f"{next(iter(setting))}=.* has no meaning for attention '{name}'"):
            Decoder(DecoderConfig(**shape, **setting))


@pytest.mark.parametrize(("settings", "message"), [
    ({"head_dim": 0}, "head_dim must be at least 1, or None, got 0"),
    ({"ff_dim": 0}, "ff_dim must be at least 1, or None, got 0"),
    ({"norm_eps": -1.0}, r"norm_eps must be above 0, or None, got -1\.0"),
    ({"rope_fraction": 2.0}, "rope_fraction must be above 0 and at most 1"),
    ({"rope_scaling": RopeScaling(), "position": "none"}, "rope_scaling is for rotary positions"),
    ({"rope_fraction": 0.5, "position": "learned"}, "rope_fraction is for rotary positions"),
    ({"ff_dim": 8, "feedforward": "bilinear"}, "feedforward='bilinear' has no hidden width of its own"),
])  # fmt: skip
def test_settings_that_make_no_decoder_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**settings)


@pytest.mark.parametrize("setting", [
    {"head_dim": 8}, {"ff_dim": 8}, {"parallel_residual": True}, {"ff_bias": True}, {"residual_scale": 0.5},
])  # fmt: skip
def test_stacks_refuse_what_only_the_decoders_layers_have(setting: dict[str, Any]) -> None:
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
