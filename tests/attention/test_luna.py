import math

import pytest
import torch

from subquad.attention import build
from subquad.ops import documents
from subquad.state import State
from subquad.testing import AttentionContract, assert_exact, assert_same_maths
from tests.attention.oracles import agrees, attend, heads, standardised


class TestLuna(AttentionContract):
    name = "luna"
    options = {"memory_tokens": 5}

    def oracle(self, layer, x_TD):
        """With `f(a, b, z)_t = (1/t) a_t sum_{j <= t} b_j^T z_j`, A = softmax(f(q, k, B)), y = f(A, B, v)."""
        H, K, rows = self.num_heads, self.dim // self.num_heads, []
        k = heads((layer.value if layer.config.tied else layer.key)(x_TD), H)
        q, v, b = (heads(project(x_TD), H) for project in (layer.query, layer.value, layer.pack_value))
        p = heads(layer.pack_query(layer.memory), H)

        def f(a_K, b_TK, z_TV, t):
            return a_K @ sum(torch.outer(b_TK[j], z_TV[j]) for j in range(t + 1)) / (t + 1)

        for t in range(len(x_TD)):
            row = []
            for h in range(H):
                b_TL = (1 + 2 ** (b[h] @ p[h].T / math.sqrt(K))).log2()
                a_L = f(q[h][t] / math.sqrt(K), k[h], b_TL, t).exp()
                row.append(f(a_L / a_L.sum(), b_TL, v[h], t))
            rows.append(torch.cat(row))
        return layer.out(torch.stack(rows))


class TestLunaBidirectional(TestLuna):
    """Two heads read what four heads pack."""

    name = "luna"
    options = {"memory_tokens": 5, "causal": False, "pack_heads": 4}

    def oracle(self, layer, x_TD):
        """The memory attends to the tokens, and the tokens to what it read; the memory plus that, normed, goes on."""
        config = layer.config
        H, G, p, tied = config.num_heads, config.pack_heads or config.num_heads, layer.memory, config.tied
        pack_q = heads(layer.pack_query(p), G)
        pack_v = heads(layer.pack_value(x_TD), G)
        pack_k = pack_v if tied else heads(layer.pack_key(x_TD), G)
        packed_LD = torch.stack([
            torch.cat([attend(pack_q[g][m], pack_k[g], pack_v[g]) for g in range(G)]) for m in range(len(p))
        ])  # fmt: skip
        q, v = heads(layer.query(x_TD), H), heads(layer.value(packed_LD), H)
        k = v if tied else heads(layer.key(packed_LD), H)
        assert_same_maths(layer(x_TD[None])[1]["handed"][0], standardised(packed_LD + p), "the memory handed on")
        rows = [torch.cat([attend(q[h][t], k[h], v[h]) for h in range(H)]) for t in range(len(x_TD))]
        return layer.out(torch.stack(rows))


def test_the_oracles_agree_with_keys_of_their_own():
    agrees(TestLuna, tied=False, bias=True)
    agrees(TestLunaBidirectional, tied=False, bias=True)
    agrees(TestLunaBidirectional, pack_heads=None)


def test_the_bidirectional_weights_are_those_of_each_head_and_pack_head():
    layer = make(causal=False, pack_heads=4, bias=True)
    x = rows(2, 9, 16)
    packed_BGTK = layer.pack_value(x).unflatten(-1, (4, 4)).transpose(1, 2)
    v_BHGTV = torch.einsum("bgtk,hvgk->bhgtv", packed_BGTK, layer.value.weight.view(2, 8, 4, 4))
    # A share of the bias for each pack head, as each of their rows of weights sums to one.
    v_BHGTV = v_BHGTV + layer.value.bias.view(2, 1, 1, 8) / 4
    y_BHTV = (layer.weights(x).unflatten(1, (2, 4)) @ v_BHGTV).sum(2)
    assert_same_maths(layer.out(y_BHTV.transpose(1, 2).flatten(2)), layer(x)[0])


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


def test_ranks_share_a_sequence_where_keys_and_values_are_not_tied():
    class Own(TestLuna):
        options = {"memory_tokens": 5, "tied": False}

    Own().test_ranks_compute_what_one_process_does()
    Own().test_ranks_send_what_communication_says()
