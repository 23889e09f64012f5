import pytest
import torch
from torch.nn import functional as F

from subquad.layers.feedforward import GELU, SwiGLU, build_feedforward
from subquad.testing import assert_same_maths


def test_feedforwards_are_their_equations():
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    gelu, swiglu = (
        build_feedforward("gelu", 12, bias=True).double(),
        build_feedforward("swiglu", 12, bias=True).double(),
    )
    assert isinstance(gelu, GELU)
    assert isinstance(swiglu, SwiGLU)
    assert_same_maths(gelu(x), gelu.down(F.gelu(gelu.up(x))))
    gate = swiglu.gate(x)
    assert_same_maths(swiglu(x), swiglu.down(gate * gate.sigmoid() * swiglu.up(x)))


@pytest.mark.parametrize(
    ("dim", "mult", "gelu", "swiglu"), [(256, 4.0, 1024, 680), (96, 4.0, 384, 256), (4, 0.5, 2, 8)]
)
def test_hidden_widths(dim, mult, gelu, swiglu):
    assert GELU(dim, mult=mult).up.out_features == gelu
    assert SwiGLU(dim, mult=mult).gate.out_features == swiglu


def test_an_unknown_feedforward_is_answered_with_the_valid_ones():
    with pytest.raises(ValueError, match="unknown feed-forward 'swigl'; did you mean 'swiglu'"):
        build_feedforward("swigl", 12)
