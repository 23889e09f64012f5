import torch
from torch.nn import functional as F

from subquad.attention import Full
from subquad.testing import AttentionContract, assert_same_maths


class TestFull(AttentionContract):
    name = "full"


class TestFullWithSharedHeads(AttentionContract):
    """One head of keys and values, rotary positions and biases: they change the cache and depend on positions."""

    name = "full"
    options = {"num_kv_heads": 1, "rope": True, "bias": True}
    laws = (2, 3, 4, 8, 15)


class TestFullWithAnOutputGate(AttentionContract):
    """Shared heads, partly rotated: the layout of Qwen3-Next."""

    name = "full"
    options = {"output_gate": True, "num_kv_heads": 1, "rope": True, "rope_fraction": 0.5}
    laws = (2, 3, 4, 8, 11, 15)


class TestFullBidirectional(AttentionContract):
    name = "full"
    options = {"causal": False, "rope": True}


@torch.no_grad()
def test_the_gate_of_each_channel_comes_before_the_output_projection():
    torch.manual_seed(0)
    layer, x = Full(dim=16, num_heads=2, head_dim=6, output_gate=True).double(), torch.randn(2, 7, 16).double()
    q, k, v = (layer.split(project(x)) for project in (layer.query, layer.key, layer.value))
    o_BTC = layer.join(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert_same_maths(layer(x)[0], layer.out(o_BTC / (1 + (-layer.gating(x)).exp())))
