import pytest
import torch

from subquad import attention
from subquad.attention.base import split
from subquad.layers.positions import rotate
from subquad.testing import AttentionContract, assert_same_maths
from tests.attention.kept import kept
from tests.attention.oracles import heads, recurrence, silu, standardised, turned


class TestRetnet(AttentionContract):
    name = "retnet"

    def oracle(self, layer, x_TD):
        config, o = layer.config, []
        q, k, v = (heads(project(x_TD), config.num_heads) for project in (layer.query, layer.key, layer.value))
        for h in range(config.num_heads):
            q_TK, k_TK = turned(q[h]) / config.keys**0.5, turned(k[h])
            o_TV = recurrence(q_TK, k_TK, v[h], torch.full_like(k_TK, 1 - 2.0 ** (-5 - h)))
            o.append(standardised(o_TV, config.norm_eps))
        return layer.out(torch.cat(o, -1) * silu(layer.gating(x_TD)))


def test_a_head_forgets_half_of_what_its_neighbour_forgets():
    layer = attention.build("retnet", dim=16, num_heads=2).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    q, k = (rotate(split(8, project(x))[0], 0, 10000.0) for project in (layer.query, layer.key))
    ages = (torch.arange(9)[:, None] - torch.arange(9)).double()
    for head, left in enumerate((1 - 1 / 32, 1 - 1 / 64)):
        expected = (left ** ages.clamp(min=0) * (q[0, head] @ k[0, head].T) / 8**0.5).tril()
        assert_same_maths(layer.weights(x)[0, head], expected)
    assert kept(layer, x)[0].v.shape == (1, 2, 9, 16)


@pytest.mark.parametrize(("options", "match"), [
    ({"key_channels": 3}, "retnet rotates queries and keys: key_channels must be even, got 3"),
    ({"value_channels": 0}, "value_channels must be at least 1, got 0"),
    ({"norm_eps": 0.0}, r"norm_eps must be above 0, got 0\.0"),
    ({"rope_base": -1.0}, r"rope_base must be positive, got -1\.0"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        attention.build("retnet", dim=16, num_heads=2, **options)
