import torch

from subquad import attention
from subquad.testing import AttentionContract, assert_same_maths


class TestGla(AttentionContract):
    name = "gla"


def test_a_channel_fades_by_the_sixteenth_root_of_its_gates():
    torch.manual_seed(0)
    layer = attention.build("gla", dim=16, num_heads=2).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    scan, _ = layer.recurrence(x)
    gates = layer.split(layer.decay_up(layer.decay_down(x)).sigmoid() ** (1 / 16))
    q, k = layer.split(layer.query(x)) / 2, layer.split(layer.key(x))
    expected = (q[0, 1, 4] * gates[0, 1, 2:].prod(0) * k[0, 1, 1]).sum()
    assert_same_maths(layer.weights(x)[0, 1, 4, 1], expected)
    assert scan.q_BGTK.shape == (1, 2, 5, 4)
    assert layer.values(x).shape == (1, 2, 5, 8)
