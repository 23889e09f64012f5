import pytest
import torch

from subquad.layers.norm import build_norm
from subquad.testing import assert_exact, assert_same_maths


def test_norms_are_their_equations():
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    layer, rms = build_norm("layer", 8).double(), build_norm("rms", 8).double()
    centred = x - x.mean(-1, keepdim=True)
    assert_same_maths(layer(x), centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert_same_maths(rms(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    unscaled = build_norm("unscaled_layer", 8)
    assert not [*unscaled.parameters()]
    assert_same_maths(unscaled(x), layer(x))


@torch.no_grad()
def test_the_zero_centred_norm_begins_as_rms_and_adds_one_to_its_weights():
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    centred, rms = build_norm("zero_centred_rms", 8, 1e-3).double(), build_norm("rms", 8, 1e-3).double()
    assert_exact(centred(x), rms(x))
    rms.weight.normal_()
    centred.weight.copy_(rms.weight - 1)
    assert_same_maths(centred(x), rms(x))


@torch.no_grad()
def test_the_zero_centred_norm_in_bfloat16_is_the_exact_one_rounded_once():
    """1 + w would lose half of the digits of w in bfloat16."""
    torch.manual_seed(0)
    norm, x = build_norm("zero_centred_rms", 8).bfloat16(), torch.randn(2, 5, 8, dtype=torch.bfloat16)
    norm.weight.normal_(std=0.1)
    y = norm(x)
    assert_exact(y, norm.double()(x.double()).bfloat16())


def test_an_unknown_norm_is_answered_with_the_valid_ones():
    with pytest.raises(ValueError, match="unknown norm 'rmsnorm'; did you mean 'rms'"):
        build_norm("rmsnorm", 8)
