import math

import pytest
import torch

from subquad.attention import build
from subquad.testing import AttentionContract, assert_exact

SIZES = {"dim": 16, "num_heads": 2}


class TestLinformer(AttentionContract):
    name = "linformer"
    with_inductor = False
    options = {"max_tokens": 32_768, "projected": 6}


@pytest.mark.parametrize("call", ["forward", "weights"])
def test_a_longer_sequence_than_it_was_built_for_is_refused(call):
    layer = build("linformer", **SIZES, max_tokens=10)
    match = (
        r"this linformer layer reads at most max_tokens=10 tokens, got 11 \(slots of padding count\); "
        "cut off padding that no row needs, or build it with a larger max_tokens"
    )
    getattr(layer, call)(torch.zeros(1, 10, 16))
    with pytest.raises(ValueError, match=match):
        getattr(layer, call)(torch.zeros(1, 11, 16))


def test_slots_of_padding_count_towards_the_length_until_they_are_cut_off():
    layer, x = build("linformer", **SIZES, max_tokens=10), torch.randn(2, 12, 16)
    mask = torch.arange(12).expand(2, 12) < 7
    with pytest.raises(ValueError, match=r"max_tokens=10 tokens, got 12 \(slots of padding count\)"):
        layer(x, mask=mask)
    assert layer(x[:, :7], mask=mask[:, :7])[0].shape == (2, 7, 16)


@pytest.mark.parametrize(("sharing", "matrices"), [("none", 4), ("heads", 2), ("key_value", 1)])
def test_projections_are_shared_as_asked(sharing, matrices):
    torch.manual_seed(0)
    layer = build("linformer", **SIZES, max_tokens=50, projected=9, sharing=sharing)
    tables = [p for name, p in layer.named_parameters() if name.startswith("project_")]
    assert sum(p.numel() for p in tables) == matrices * 9 * 50
    bound = 1 / math.sqrt(9)
    assert all(bound / 2 < p.abs().max() <= bound for p in tables)


def test_unused_columns_change_nothing():
    layer, x = build("linformer", **SIZES, max_tokens=20), torch.randn(2, 7, 16)
    before, _ = layer(x)
    with torch.no_grad():
        for table in (layer.project_keys, layer.project_values):
            table[..., 7:] = torch.nan
    assert_exact(layer(x)[0], before)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"projected": 0}, "projected must be at least 1, got 0"),
        ({"sharing": "layers"}, "sharing must be one of its choices, got 'layers'.*valid: heads, key_value, none"),
        ({"causal": True}, "attention 'linformer' has no causal form; it has: bidirectional"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        build("linformer", **SIZES, **options)


def test_it_is_bidirectional_by_default():
    assert not build("linformer", **SIZES).causal
