"""The formulas against counts by hand, and against what torch counts of the same products in plain form."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from subquad.ops import block_attention, delta_scan, flops, gated_scan, running_softmax
from subquad.ops._torch.tiles import static_groups
from subquad.ops.patterns import Causal, Full, Segments, Suffix, Window
from subquad.ops.softmax import gated_mean


def count(f):
    flops.register()
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_total_flops()


def forward_and_backward(f):
    """Count the operations of `f`, and of the backward pass through its output."""
    outs = []
    return count(lambda: outs.append(f())), count(lambda: outs[0].sum().backward())


def inputs(*shapes, grad=False):
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def test_attention_by_hand():
    # T = 8 in segments of 4: a triangle tile 4 x 4, then a tile 4 x 8. A multiply-add counts two, K = 3 and V = 5.
    assert flops.attention_flops(static_groups(Segments(size=4), 0, 8, 0, 8), 3, 5) == 2 * (4 * 4 + 4 * 8) * (3 + 5)
    # Rows before a suffix cost nothing.
    assert flops.attention_flops(static_groups(Suffix(start=6), 0, 8, 0, 8), 3, 5) == 2 * 2 * 8 * (3 + 5)
    assert flops.attention_flops((), 3, 5) == 0


def test_gated_scan_by_hand():
    # Five tokens in chunks of 4 and 1; K = 3, V = 2.
    scores, product = 2 * (16 + 1) * 3, 2 * (16 + 1) * 2
    read, written = 2 * 5 * 3 * 2, 2 * 5 * 3 * 2
    assert flops.gated_scan_flops(5, 3, 2, chunk=4) == scores + product + read + written
    assert flops.gated_scan_flops(5, 3, 2, chunk=4, normalise=True) == scores + product + read + written + 2 * 5 * 3
    assert flops.gated_scan_flops(0, 3, 2) == 0


def test_scores_count_once_a_group():
    heads, groups = (flops.gated_scan_flops(5, 3, 2, chunk=4, heads=6, groups=n) for n in (6, 2))
    assert heads == 6 * flops.gated_scan_flops(5, 3, 2, chunk=4)
    assert heads - groups == 4 * 2 * (16 + 1) * 3


def test_delta_scan_by_hand():
    # Five tokens in chunks of 4 and 1; K = 3, V = 2. A system of C rows takes C (C - 1) / 2 multiply-adds a channel and
    # C factors: C C operations.
    scores, product, system = 2 * 2 * (16 + 1) * 3, 2 * (16 + 1) * 2, (16 + 1) * 2
    states = 3 * 2 * 5 * 3 * 2
    assert flops.delta_scan_flops(5, 3, 2, chunk=4) == scores + product + system + states
    # With what is computed again: four gradients of scores; two systems, u, g and three products of C C V; the state
    # read for u, q and k, written by u, and its gradient three times.
    scores, values, states = 6 * 2 * (16 + 1) * 3, (2 + 4 * 2) * (16 + 1) * 2, 7 * 2 * 5 * 3 * 2
    assert flops.delta_scan_flops(5, 3, 2, chunk=4, products=flops.BACKWARD) == scores + values + states
    assert flops.delta_scan_flops(0, 3, 2) == 0


def test_running_softmax_by_hand():
    # Sixteen tokens in one chunk, L = 3, V = 2.
    scores = 2 * 16 * 16 * 3
    product, read, written = 2 * 16 * 16 * 2, 2 * 16 * 3 * 2, 2 * 16 * 3 * 2
    assert flops.running_softmax_flops(16, 3, 2, chunk=16) == scores + product + read + written
    assert flops.running_softmax_flops(3, 3, 2, chunk=16) == 2 * 3 * 3 * (3 + 2) + 4 * 3 * 3 * 2
    # With one latent each value is weighed and added.
    assert flops.running_softmax_flops(5, 1, 2, chunk=16) == 2 * 2 * 5 * 2
    assert flops.running_softmax_flops(0, 3, 2) == 0


def test_long_scans_cost_in_proportion_to_their_tokens():
    for formula in (flops.gated_scan_flops, flops.delta_scan_flops, flops.running_softmax_flops):
        assert formula(4096, 16, 16) == 2 * formula(2048, 16, 16)


def test_torch_counts_attention_with_the_formula():
    shape, q_k = (2, 3, 40, 8), 2 * 8 * 2
    q, k, v = inputs(shape, shape, shape)
    for pattern in (Full(), Causal(), Window(width=5), Segments(size=16)):
        expected = 2 * 3 * flops.attention_flops(static_groups(pattern, 0, 40, 0, 40), 8, 8)
        assert count(lambda p=pattern: block_attention(q, k, v, p)) == expected > 0
    assert count(lambda: block_attention(q, k, v, Full())) == count(lambda: q @ k.mT @ v) == 2 * 3 * 40 * 40 * q_k
    start = torch.tensor([3, 0])  # ragged
    assert count(lambda: block_attention(q, k, v, Causal(), q_start=start, k_start=start)) == 2 * 3 * 40 * 40 * q_k


def test_torch_counts_the_scans_with_their_formulas():
    q, i, v = inputs((2, 3, 70, 4), (2, 3, 70, 4), (2, 3, 70, 5))
    for normalise in (False, True):
        expected = 6 * flops.gated_scan_flops(70, 4, 5, chunk=16, normalise=normalise)
        assert count(lambda n=normalise: gated_scan(q, i, v, None, normalise=n, chunk_size=16)) == expected
    assert count(lambda: running_softmax(q.softmax(-1), i, v)) == 6 * flops.running_softmax_flops(70, 4, 5)


def test_decays_of_the_values_count_by_hand():
    # Five tokens in chunks of 4 and 1, K = 3, V = 2, six heads in two groups. Forward: products of queries and inputs
    # of a group; of a head their sum over values, and the state read and written.
    q, i, v, g = inputs((2, 1, 5, 3), (2, 1, 5, 3), (2, 3, 5, 2), (2, 3, 5, 2), grad=True)
    expected = 2 * 2 * (16 + 1) * 3 + 6 * (2 * (16 + 1) * 2 + 2 * 2 * 5 * 3 * 2)
    found = forward_and_backward(lambda: gated_scan(q, i, v, None, log_g=-g.abs(), chunk_size=4).out)
    assert found == (expected, expected * 5 // 2)


def test_kernels_count_as_torch_does():
    q, p, v = (2, 1, 70, 4), (2, 3, 70, 4), (2, 3, 70, 5)
    xq, xp, xv = inputs(q, p, v)
    for n in (False, True):
        expected = count(lambda n=n: gated_scan(xq, xq, xv, None, normalise=n))
        assert flops.KERNELS["gated_scan_triton"](q, q, v, None, None, None, n) == expected
    expected = count(lambda: delta_scan(xq, xq, xv, xv[..., :1].sigmoid(), None))
    assert flops.KERNELS["delta_scan_triton"](q, q, v) == expected
    assert flops.KERNELS["running_softmax_triton"](p, p, v) == count(lambda: running_softmax(xp.softmax(-1), xp, xv))


def test_torch_counts_scans_whose_heads_share_queries_and_keys():
    q, k, v = inputs((2, 1, 70, 4), (2, 1, 70, 4), (2, 3, 70, 5))
    sizes = {"groups": 2, "heads": 6, "chunk": 16}
    assert count(lambda: gated_scan(q, k, v, None, chunk_size=16)) == flops.gated_scan_flops(70, 4, 5, **sizes)
    scan = partial(delta_scan, q, k, v, v[..., :1].sigmoid(), None, chunk_size=16)
    forward = flops.delta_scan_flops(70, 4, 5, **sizes)
    assert count(scan) == forward
    q.requires_grad_()
    backward = flops.delta_scan_flops(70, 4, 5, **sizes, products=flops.BACKWARD)
    assert count(lambda: scan().out.sum().backward()) == forward + backward


FORMS = {
    "gated_scan": lambda q, i, v: gated_scan(q, i, v, None).out,
    "running_softmax": lambda q, i, v: running_softmax(q.softmax(-1), i, v).out,
    "block_attention": lambda q, i, v: block_attention(q, i, v, Window(width=7)),
    "torch's attention": torch.nn.functional.scaled_dot_product_attention,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_backward_pass_costs_five_products_where_the_forward_has_two(form):
    q, i, v = inputs((2, 3, 70, 4), (2, 3, 70, 4), (2, 3, 70, 4), grad=True)
    forward, backward = forward_and_backward(lambda: FORMS[form](q, i, v))
    assert 2 * backward == 5 * forward > 0
    if form == "torch's attention":
        assert forward == 2 * 3 * 2 * 70 * 70 * (4 + 4)


@pytest.mark.parametrize(
    ("pattern", "entries"), [(Full(), 100 * 100), (Window(width=17), 16 * 16 + 16 * 32 * 5 + 4 * 20)], ids=repr
)
def test_attention_in_sequence_computes_only_the_chunks_within_reach(pattern, entries):
    (q,) = inputs((2, 3, 100, 4), grad=True)
    options = {"chunk_size": (16, 64), "backend": "sequential"}
    forward, backward = forward_and_backward(lambda: block_attention(q, q, q, pattern, **options))
    assert forward == 2 * 3 * entries * 2 * (4 + 4)
    assert backward == 2 * 3 * entries * 2 * (3 * 4 + 2 * 4)


@pytest.mark.parametrize(("form", "products"), [("scan", 5), ("values", 5), ("mean", 6), ("softmax", 5)])
def test_scans_in_sequence_count_their_products(form, products):
    q, i, v = inputs((2, 3, 20, 4), (2, 3, 20, 4), (2, 3, 20, 5), grad=True)

    def run():
        if form == "softmax":
            return running_softmax(q.softmax(-1), i, v, backend="sequential").out
        options = {"values": {"log_g": -v.abs()}, "mean": {"normalise": True}}.get(form, {})
        return gated_scan(q.exp(), i.exp(), v, None, **options, backend="sequential").out

    forward, backward = forward_and_backward(run)
    assert forward == 2 * 3 * 20 * 4 * 4 * products
    assert 2 * backward == 5 * forward


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("engine", ["block_attention", "gated_mean", "gated_scan", "running_softmax"])
def test_the_kernels_count_as_the_default_does(engine, with_gradients):
    q, k, v = inputs((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8), grad=with_gradients)
    run = {
        "block_attention": lambda backend: block_attention(q, k, v, Segments(size=8), backend=backend),
        "gated_mean": lambda backend: gated_mean(q[..., :1], k[..., :1], v, backend=backend).out,
        "gated_scan": lambda backend: gated_scan(q.exp(), k.exp(), v, None, normalise=True, backend=backend).out,
        "running_softmax": lambda backend: running_softmax(q.softmax(-1), k, v, backend=backend).out,
    }[engine]

    def call(backend):
        out = run(backend)
        if with_gradients:
            torch.autograd.grad(out.sum(), (q, k, v))

    assert count(lambda: call("triton")) == count(lambda: call("torch")) > 0
