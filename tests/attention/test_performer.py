import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.attention import after_step, build, performer
from subquad.attention.laws import Law
from subquad.attention.performer import orthogonal_directions
from subquad.testing import AttentionContract, assert_same_maths, sharpened
from tests.attention.oracles import agrees, heads

SIZES = {"dim": 16, "num_heads": 2}


class TestPerformer(AttentionContract):
    name = "performer"

    def oracle(self, layer, x_TD):
        """Normalised sums of random features, without a stabiliser."""
        H, T, causal = self.num_heads, len(x_TD), layer.config.causal
        q, k, v = (heads(project(x_TD), H) for project in (layer.query, layer.key, layer.value))

        def phi(x_K):
            x_K = x_K / len(x_K) ** 0.25
            along_R = layer.directions @ x_K
            if layer.config.kernel == "relu":
                return along_R.clamp(min=0) + 1e-3
            return (along_R - x_K @ x_K / 2).exp() / math.sqrt(len(along_R))

        rows = []
        for t in range(T):
            row = []
            for h in range(H):
                w_S = torch.stack([phi(q[h][t]) @ phi(k[h][s]) for s in range(t + 1 if causal else T)])
                row.append(w_S @ v[h][: len(w_S)] / w_S.sum())
            rows.append(torch.cat(row))
        return layer.out(torch.stack(rows))


class TestPerformerBidirectional(TestPerformer):
    name = "performer"
    options = {"causal": False, "features": 5}


class TestPerformerRelu(TestPerformer):
    """A scan instead of a running softmax: another state and other roundings."""

    name = "performer"
    options = {"kernel": "relu"}
    laws = (
        Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.PADDING, Law.NO_FUTURE,
        Law.PRECISION, Law.LONG, Law.DOCUMENTS, Law.RANKS,
    )  # fmt: skip


def test_relu_features_of_both_sides():
    agrees(TestPerformerRelu, causal=False, features=7, bias=True)


@given(features=st.integers(1, 20), channels=st.integers(1, 8))
def test_directions_are_orthogonal_in_blocks(features, channels):
    w_RK = orthogonal_directions(features, channels)
    assert w_RK.shape == (features, channels)
    for block in w_RK.split(channels):
        unit = torch.nn.functional.normalize(block)
        assert_same_maths(unit @ unit.T, torch.eye(len(block), dtype=torch.float64), "products within a block")


def test_directions_are_isotropic():
    """Each entry has both signs equally often; QR alone would give the first entry one sign."""
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


@pytest.mark.parametrize(("interval", "steps"), [(3, [3, 6]), (None, [])])
def test_directions_are_drawn_anew_after_every_interval_of_steps(interval, steps):
    layer = build("performer", **SIZES, redraw_interval=interval).to(torch.bfloat16)
    buffer, drawn = layer.directions, []
    for step in range(1, 8):
        before = buffer.clone()
        layer.after_step(step)
        drawn += [step] * (not torch.equal(before, buffer))
    assert drawn == steps
    assert layer.directions is buffer
    assert buffer.dtype == torch.bfloat16


@pytest.mark.parametrize(("told", "warnings"), [(False, 1), (True, 0)])
def test_a_layer_that_hears_of_no_step_says_once_what_to_call(told, warnings, monkeypatch, caplog):
    monkeypatch.setattr(performer, "PATIENCE", 3)
    performer._warn_not_redrawn.cache_clear()
    model, x = torch.nn.Sequential(build("performer", **SIZES, redraw_interval=2)), torch.randn(1, 2, 16)
    for step in range(1, 14):
        model[0](x)
        with torch.no_grad():
            model[0](x)
        assert len(caplog.records) == (warnings if step > 4 * 2 + 3 else 0)
        if told:
            before = model[0].directions.clone()
            after_step(model, step)
            assert torch.equal(before, model[0].directions) == (step % 2 == 1)
    assert ("call subquad.attention.after_step(model, step)" in caplog.text) == bool(warnings)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("causal", [True, False])
def test_large_logits_are_finite_with_their_gradients(kernel, causal):
    torch.manual_seed(0)
    layer = sharpened(build("performer", **SIZES, kernel=kernel, causal=causal), 1e3)
    x = torch.randn(2, 50, 16, requires_grad=True)
    y, _ = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert all(value.isfinite().all() for value in (y, *gradients))
