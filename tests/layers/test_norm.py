import pytest
import torch

from subquad.layers.norm import build_norm
from subquad.testing import assert_same_maths


def test_norms_are_their_equations():
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    layer, rms = build_norm("layer", 8).double(), build_norm("rms", 8).double()
    centred = x - x.mean(-1, keepdim=True)
    assert_same_maths(layer(x), centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert_same_maths(rms(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_an_unknown_norm_is_answered_with_the_valid_ones():
    with pytest.raises(ValueError, match="unknown norm 'rmsnorm'; did you mean 'rms'"):
        build_norm("rmsnorm", 8)
