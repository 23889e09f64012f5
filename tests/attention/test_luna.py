import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from subquad.attention import build
from subquad.ops import flops
from subquad.testing import AttentionContract, assert_exact, assert_same_maths, mask_with

SIZES = {"dim": 16, "num_heads": 2}


class TestLuna(AttentionContract):
    name = "luna"
    with_inductor = False
    options = {"memory_tokens": 5}


class TestLunaBidirectional(AttentionContract):
    """Two heads that read what four pack."""

    name = "luna"
    with_inductor = False
    options = {"memory_tokens": 5, "causal": False, "pack_heads": 4}


def make(**options):
    torch.manual_seed(0)
    return build("luna", **SIZES, memory_tokens=5, **options).double()


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_the_memory_goes_from_layer_to_layer():
    first, second = make(causal=False), make(causal=False, own_memory=False)
    x = rows(3, 9, 16)
    y, _, memory = first(x)
    assert memory.shape == (3, 5, 16)
    z, _, last = second(y, memory=memory)
    for b in range(3):
        z_b, _, last_b = second(y[b : b + 1], memory=memory[b : b + 1])
        assert_same_maths(z[b : b + 1], z_b, f"row {b}")
        assert_same_maths(last[b : b + 1], last_b, f"memory of row {b}")
    (gradient,) = torch.autograd.grad(z.sum(), first.memory)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("causal", [True, False])
def test_one_memory_serves_all_rows(causal):
    layer, x, memory = make(causal=causal), rows(3, 9, 16), rows(1, 5, 16)
    together, apart = layer(x, memory=memory), layer(x, memory=memory.expand(3, -1, -1))
    assert_same_maths(together[0], apart[0], "outputs")
    assert_same_maths(together[2].expand(3, -1, -1), apart[2].expand(3, -1, -1), "memory")
    own = layer(x, memory=layer.memory[None])
    assert_exact(own[0], layer(x)[0], "its own memory, handed to it")
    assert not torch.equal(own[0], together[0])


def test_a_causal_layer_hands_on_the_memory_it_was_given():
    memory = rows(2, 5, 16)
    assert make()(rows(2, 9, 16), memory=memory)[2] is memory


def test_padding_is_not_packed():
    layer, x = make(causal=False), rows(2, 9, 16)
    mask = mask_with([(2, 7, 0), (0, 4, 5)])
    packed = layer(x, mask=mask)[2]
    for b in range(2):
        assert_same_maths(packed[b : b + 1], layer(x[b : b + 1, mask[b]])[2], f"row {b}")
    y, _, memory = layer(x, mask=torch.zeros(2, 9, dtype=torch.bool))
    assert_exact(y, torch.zeros_like(y), "no token at all")
    assert memory.isfinite().all()


def test_a_causal_state_goes_on_with_a_memory_handed_to_it():
    layer, x, memory = make(own_memory=False), rows(2, 9, 16), rows(2, 5, 16)
    first, state, _ = layer(x[:, :4], memory=memory)
    rest, _, _ = layer(x[:, 4:], state, memory=memory)
    assert_same_maths(torch.cat([first, rest], 1), layer(x, memory=memory)[0], "cut")


@pytest.mark.parametrize(
    ("options", "of_memory", "of_tokens"),
    [
        ({}, 1, 4),
        ({"tied": False}, 1, 5),
        ({"causal": False}, 2, 3),
        ({"causal": False, "tied": False}, 3, 4),
    ],
)
def test_the_cost_counts_each_projection_where_it_is_used(options, of_memory, of_tokens):
    flops.register()
    layer = build("luna", **SIZES, memory_tokens=5, **options)
    cost = layer.cost(100)
    assert cost.projection_flops == 2 * 16 * 16 * (5 * of_memory + 100 * of_tokens)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, 100, 16))
    assert counter.get_total_flops() == cost.projection_flops + cost.mixing_flops


def test_no_memory_at_all_is_refused():
    layer = make(own_memory=False)
    assert "memory" not in dict(layer.named_parameters())
    for call in (layer, layer.weights):
        with pytest.raises(ValueError, match=r"this luna layer has no memory of its own \(own_memory=False\): give it"):
            call(rows(2, 9, 16))


@pytest.mark.parametrize("shape", [(5, 16), (3, 5, 16), (2, 4, 16), (2, 5, 8)])
def test_a_memory_of_another_shape_is_refused(shape):
    match = r"memory must have shape \(2, 5, 16\) or \(1, 5, 16\), got \("
    with pytest.raises(ValueError, match=match):
        make()(rows(2, 9, 16), memory=rows(*shape))


def test_a_mask_is_checked():
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 9\)"):
        make()(rows(2, 9, 16), mask=torch.ones(2, 8, dtype=torch.bool))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"memory_tokens": 0}, "memory_tokens must be at least 1, got 0"),
        ({"pack_heads": 3, "causal": False}, "pack_heads must be at least 1 and divide dim, got pack_heads=3, dim=16"),
        ({"pack_heads": 0}, "pack_heads must be at least 1 and divide dim, got pack_heads=0, dim=16"),
        ({"pack_heads": 4}, "packs and unpacks with the same heads, got pack_heads=4, num_heads=2"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        build("luna", **SIZES, **options)
