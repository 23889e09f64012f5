import pytest
import torch

from subquad.attention import build
from subquad.ops import documents
from subquad.state import State
from subquad.testing import AttentionContract, assert_exact, assert_same_maths


class TestLuna(AttentionContract):
    name = "luna"
    options = {"memory_tokens": 5}


class TestLunaBidirectional(AttentionContract):
    """Two heads read what four heads pack."""

    name = "luna"
    options = {"memory_tokens": 5, "causal": False, "pack_heads": 4}


def make(**options):
    torch.manual_seed(0)
    return build("luna", dim=16, num_heads=2, memory_tokens=5, **options).double()


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def given(layer, memory):
    """A state that holds nothing but the memory of the layer below."""
    return State({"handed": memory}, layer.config_hash)


def test_the_memory_goes_from_layer_to_layer():
    first, second = make(causal=False), make(causal=False, own_memory=False)
    x = rows(3, 9, 16)
    y, state = first(x)
    memory = state["handed"]
    assert memory.shape == (3, 5, 16)
    z, after = second(y, given(second, memory))
    for b in range(3):
        z_b, after_b = second(y[b : b + 1], given(second, memory[b : b + 1]))
        assert_same_maths(z[b : b + 1], z_b, f"row {b}")
        assert_same_maths(after["handed"][b : b + 1], after_b["handed"], f"memory of row {b}")
    (gradient,) = torch.autograd.grad(z.sum(), first.memory)
    assert gradient.abs().max() > 0
    with pytest.raises(ValueError, match="this luna layer is not causal: it reads whole sequences and takes no state"):
        first(x, state)


@pytest.mark.parametrize("causal", [True, False])
def test_one_memory_serves_all_rows(causal):
    layer, x, memory = make(causal=causal), rows(3, 9, 16), rows(1, 5, 16)
    together, apart = (
        layer(x, given(layer, all_rows)) for all_rows in (memory.expand(3, -1, -1), memory.repeat(3, 1, 1))
    )
    assert_same_maths(together[0], apart[0], "outputs")
    assert_same_maths(together[1]["handed"], apart[1]["handed"], "memory")
    own = layer(x, given(layer, layer.memory.expand(3, -1, -1)))
    y, state = layer(x)
    assert state.seen == 9
    assert_exact(own[0], y, "its own memory, handed to it")
    assert not torch.equal(own[0], together[0])


def test_a_causal_state_goes_on_with_the_memory_that_was_handed_to_it():
    layer, x, memory = make(own_memory=False), rows(2, 9, 16), rows(2, 5, 16)
    first, state = layer(x[:, :4], given(layer, memory))
    assert_exact(state["handed"], memory)
    rest, _ = layer(x[:, 4:], state)
    assert_same_maths(torch.cat([first, rest], 1), layer(x, given(layer, memory))[0], "cut")
    other = build("latte", dim=16, num_heads=2).double()
    with pytest.raises(ValueError, match="the state of a latte layer counts its tokens"):
        other(x, given(other, memory))


@pytest.mark.parametrize(("options", "of_memory", "of_tokens"), [
    ({}, 1, 4), ({"tied": False}, 1, 5), ({"causal": False}, 2, 3), ({"causal": False, "tied": False}, 3, 4),
])  # fmt: skip
def test_the_cost_counts_each_projection_where_it_is_used(options, of_memory, of_tokens):
    assert make(**options).cost(100).projection_flops == 2 * 16 * 16 * (5 * of_memory + 100 * of_tokens)


def test_no_memory_at_all_is_refused():
    layer = make(own_memory=False)
    assert "memory" not in dict(layer.named_parameters())
    for call in (layer, layer.weights):
        with pytest.raises(ValueError, match=r"no memory of its own \(own_memory=False\): the layer below hands"):
            call(rows(2, 9, 16))


def test_a_memory_of_another_shape_is_refused():
    layer = make()
    for shape in ((2, 5, 8), (2, 4, 16), (3, 5, 16)):
        with pytest.raises(
            ValueError, match=r"handed, the memory, must have shape \(2, 5, 16\), got|holds 3 sequences"
        ):
            layer(rows(2, 9, 16), given(layer, rows(*shape)))


def test_packed_documents_have_the_memory_of_their_row():
    layer, x, memory = make(), rows(2, 6, 16), rows(2, 5, 16)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [4, 4, 4, 4, 4, 4]])
    for doc_ids in (ids, documents.lay_out(ids, None, 2, 6), documents.lay_out(ids, None, 2, 6, last_apart=False)):
        y, state = layer(x, given(layer, memory), doc_ids=doc_ids)
        assert_exact(state["handed"], memory)
        assert_same_maths(y[:1, 3:], layer(x[:1, 3:], given(layer, memory[:1]))[0])
        assert_same_maths(y[1:], layer(x[1:], given(layer, memory[1:]))[0])
    with pytest.raises(ValueError, match="hands on a memory of each sequence and takes no packed documents"):
        make(causal=False)(x, doc_ids=ids)
