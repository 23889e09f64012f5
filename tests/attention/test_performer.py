import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.attention import build
from subquad.attention.performer import orthogonal_directions
from subquad.testing import AttentionContract, assert_exact, assert_same_maths, sharpened

SIZES = {"dim": 16, "num_heads": 2}


class TestPerformer(AttentionContract):
    name = "performer"
    with_inductor = False


class TestPerformerBidirectional(AttentionContract):
    name = "performer"
    with_inductor = False
    options = {"causal": False, "features": 5}


class TestPerformerRelu(AttentionContract):
    name = "performer"
    with_inductor = False
    options = {"kernel": "relu"}


@given(features=st.integers(1, 20), channels=st.integers(1, 8))
def test_directions_are_orthogonal_in_blocks(features, channels):
    w_RK = orthogonal_directions(features, channels)
    assert w_RK.shape == (features, channels)
    for block in w_RK.split(channels):
        unit = torch.nn.functional.normalize(block)
        assert_same_maths(unit @ unit.T, torch.eye(len(block), dtype=torch.float64), "products within a block")


def test_directions_are_isotropic():
    """Each sign of each entry comes as often as the other; QR alone would give the first entry one sign."""
    torch.manual_seed(0)
    positive = torch.stack([orthogonal_directions(3, 3) > 0 for _ in range(200)]).sum(0)
    assert positive.min() > 0
    assert positive.max() < 200


def test_more_features_come_nearer_to_softmax_attention():
    errors = []
    for features in (4, 64, 1024):
        total = 0.0
        for seed in range(5):
            torch.manual_seed(seed)
            layer, full = build("performer", **SIZES, features=features), build("full", **SIZES)
            full.load_state_dict(layer.state_dict(), strict=False)
            x = torch.randn(1, 20, 16)
            total += (layer.weights(x) - full.weights(x)).square().mean().item()
        errors.append(total)
    assert errors[0] > 2 * errors[1] > 4 * errors[2], errors


def test_the_number_of_features_grows_as_k_ln_k():
    for channels in (1, 2, 4, 8, 64):
        layer = build("performer", dim=channels, num_heads=1)
        assert layer.features == max(channels, int(channels * math.log(channels)))
        assert layer.directions.shape == (layer.features, channels)


def test_directions_are_drawn_anew_after_every_interval_of_steps_and_never_else():
    layer, still = build("performer", **SIZES, redraw_interval=3), build("performer", **SIZES)
    draws = []
    for step in range(1, 8):
        layer.train()(torch.randn(1, 5, 16))[0].sum().backward()
        before = layer.directions.clone()
        layer.after_step(step)
        still.after_step(step)
        draws.append(not torch.equal(before, layer.directions))
    assert draws == [False, False, True, False, False, True, False]
    other = build("performer", **SIZES)
    other.load_state_dict(still.state_dict())
    assert_exact(other.directions, still.directions, "directions are saved with the weights")


def test_redrawing_keeps_dtype_and_orthogonality():
    layer = build("performer", dim=6, num_heads=2, features=3).to(torch.bfloat16)
    before = layer.directions
    layer.redraw()
    assert layer.directions is before
    assert layer.directions.dtype == torch.bfloat16


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("causal", [True, False])
def test_large_logits_are_finite_with_their_gradients(kernel, causal):
    torch.manual_seed(0)
    layer = sharpened(build("performer", **SIZES, kernel=kernel, causal=causal), 1e3)
    x = torch.randn(2, 50, 16, requires_grad=True)
    y, _ = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert all(value.isfinite().all() for value in (y, *gradients))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"features": 0}, "features must be at least 1, got 0"),
        ({"redraw_interval": 0}, "redraw_interval must be at least 1, got 0"),
        ({"kernel": "elu"}, "kernel must be one of its choices, got 'elu'.*valid: relu, softmax"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        build("performer", **SIZES, **options)
