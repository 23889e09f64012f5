import pytest
import torch

from subquad import attention
from subquad.attention.laws import Law
from subquad.testing import AttentionContract, assert_same_maths
from tests.attention.kept import kept
from tests.attention.oracles import delta_rule


class TestDeltaNet(AttentionContract):
    name = "delta_net"

    def oracle(self, layer, x_TD):
        return layer.out(torch.cat(delta_rule(layer, x_TD), -1))


class TestDeltaNetWithNegativeEigenvalues(TestDeltaNet):
    """Strengths up to 2, and a convolution of one token: larger products, and no state of a convolution."""

    name = "delta_net"
    options = {"beta_range": 2, "convolution": 1}
    laws = (Law.DEFINITION, Law.SPLIT, Law.NO_FUTURE, Law.LONG, Law.RANKS)


def test_weights_are_products_of_transitions():
    torch.manual_seed(0)
    layer = attention.build("delta_net", dim=16, num_heads=2).double()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    sums, q = kept(layer, x)
    row, k, b = q[0, 1, 5], sums.k[0, 1], sums.beta[0, 1]
    for t in (5, 4, 3):
        row = row - b[t] * (row @ k[t]) * k[t]
    assert_same_maths(layer.weights(x)[0, 1, 5, 2], (row @ k[2] * b[2])[0])


@pytest.mark.parametrize(("options", "match"), [
    ({"beta_range": 3}, "beta_range must be 1 or 2, got 3"),
    ({"convolution": 0}, "convolution must be at least 1, got 0"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        attention.build("delta_net", dim=16, num_heads=2, **options)
