import torch

from subquad import attention
from subquad.attention.base import split
from subquad.testing import AttentionContract, assert_same_maths
from tests.attention.kept import kept
from tests.attention.oracles import heads, recurrence, rms, silu


class TestGla(AttentionContract):
    name = "gla"

    def oracle(self, layer, x_TD):
        config = layer.config
        H = config.num_heads
        q, k, v = (heads(project(x_TD), H) for project in (layer.query, layer.key, layer.value))
        f = heads((1 / (1 + (-layer.decay_up(layer.decay_down(x_TD))).exp())) ** (1 / 16), H)
        o = [recurrence(q[h] / config.keys**0.5, k[h], v[h], f[h]) for h in range(H)]
        o = [rms(o_TV, config.norm_eps) * layer.norm_weight for o_TV in o]
        return layer.out(torch.cat(o, -1) * silu(layer.gating(x_TD)))


def test_a_channel_fades_by_the_sixteenth_root_of_its_gates():
    torch.manual_seed(0)
    layer = attention.build("gla", dim=16, num_heads=2).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    (gates,) = split(4, layer.decay_up(layer.decay_down(x)).sigmoid() ** (1 / 16))
    q, k = split(4, layer.query(x) / 2, layer.key(x))
    expected = (q[0, 1, 4] * gates[0, 1, 2:].prod(0) * k[0, 1, 1]).sum()
    assert_same_maths(layer.weights(x)[0, 1, 4, 1], expected)
    sums, queries = kept(layer, x)
    assert queries.shape == (1, 2, 5, 4)
    assert sums.v.shape == (1, 2, 5, 8)
