import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from subquad.attention import build
from subquad.ops import flops
from subquad.testing import AttentionContract, assert_exact, assert_same_maths

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
    y, _, memory = first.mix(x, None, None)
    assert memory.shape == (3, 5, 16)
    z, _, last = second.mix(y, None, None, memory)
    for b in range(3):
        z_b, _, last_b = second.mix(y[b : b + 1], None, None, memory[b : b + 1])
        assert_same_maths(z[b : b + 1], z_b, f"row {b}")
        assert_same_maths(last[b : b + 1], last_b, f"memory of row {b}")
    (gradient,) = torch.autograd.grad(z.sum(), first.memory)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("causal", [True, False])
def test_a_call_returns_two_values_and_uses_the_layers_own_memory(causal):
    layer, x = make(causal=causal), rows(3, 9, 16)
    y, state = layer(x)
    assert state.seen == 9
    assert_exact(y, layer.mix(x, None, None)[0])


@pytest.mark.parametrize("causal", [True, False])
def test_one_memory_serves_all_rows(causal):
    layer, x, memory = make(causal=causal), rows(3, 9, 16), rows(1, 5, 16)
    together, apart = layer.mix(x, None, None, memory), layer.mix(x, None, None, memory.expand(3, -1, -1))
    assert_same_maths(together[0], apart[0], "outputs")
    assert_same_maths(together[2].expand(3, -1, -1), apart[2].expand(3, -1, -1), "memory")
    own = layer.mix(x, None, None, layer.memory[None])
    assert_exact(own[0], layer(x)[0], "its own memory, handed to it")
    assert not torch.equal(own[0], together[0])


def test_a_causal_layer_hands_on_the_memory_it_was_given():
    memory = rows(2, 5, 16)
    assert make().mix(rows(2, 9, 16), None, None, memory)[2] is memory


def test_padding_is_not_packed():
    layer, x, lengths = make(causal=False), rows(3, 9, 16), torch.tensor([7, 4, 0])
    y, _, packed = layer.mix(x, None, lengths)
    for b, n in enumerate(lengths.tolist()[:2]):
        y_b, _, packed_b = layer.mix(x[b : b + 1, :n], None, None)
        assert_same_maths(packed[b : b + 1], packed_b, f"row {b}")
        assert_same_maths(y[b : b + 1, :n], y_b, f"outputs of row {b}")
    assert packed.isfinite().all()
    y, _ = layer(x, mask=torch.zeros(3, 9, dtype=torch.bool))
    assert_exact(y, torch.zeros_like(y), "no token at all")


def test_a_causal_state_goes_on_with_a_memory_handed_to_it():
    layer, x, memory = make(own_memory=False), rows(2, 9, 16), rows(2, 5, 16)
    first, state, _ = layer.mix(x[:, :4], None, None, memory)
    rest, _, _ = layer.mix(x[:, 4:], state, None, memory)
    assert_same_maths(torch.cat([first, rest], 1), layer.mix(x, None, None, memory)[0], "cut")


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
        with pytest.raises(
            ValueError, match=r"this luna layer has no memory of its own \(own_memory=False\): the layer below hands"
        ):
            call(rows(2, 9, 16))


@pytest.mark.parametrize("shape", [(5, 16), (3, 5, 16), (2, 4, 16), (2, 5, 8)])
def test_a_memory_of_another_shape_is_refused(shape):
    match = r"memory must have shape \(2, 5, 16\) or \(1, 5, 16\), got \("
    with pytest.raises(ValueError, match=match):
        make().mix(rows(2, 9, 16), None, None, rows(*shape))


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
