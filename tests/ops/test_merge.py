"""Softmax over a union of disjoint sets of keys, and queries that are not among the keys."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.ops import block_attention, block_attention_with_lse, merge_attention
from subquad.ops.attend import softmax_weights
from subquad.ops.patterns import Band, Blocks, Causal, DilatedBand, Full, Globals, Segments, Sinks, Window
from subquad.testing import assert_same_maths, largest_allocation
from subquad.testing.tools import LINEAR_GROWTH

B, H, K = 2, 2, 6
UNIONS = {
    "window and sinks": [Window(width=4), Sinks(count=3, back=3)],
    "segments and blocks": [Segments(size=4, back=1), Sinks(count=2, back=1, size=4)],
    "band and globals": [Band(before=2, after=1), Globals(count=3, back=2, ahead_blocks=1)],
    "alone": [Causal()],
    "a set that no query sees": [Window(width=4), Sinks(count=0, back=3)],
}
backends = pytest.mark.parametrize("backend", ["reference", "torch"])


def qkv(random, queries, keys):
    return [random(B, H, n, K, seed=seed) for seed, n in enumerate((queries, keys, keys))]


@backends
@pytest.mark.parametrize("case", UNIONS)
def test_a_merge_is_the_softmax_over_the_union(case, backend, random, differentiated):
    def merged(q, k, v):
        parts = [block_attention_with_lse(q, k, v, p, backend=backend) for p in UNIONS[case]]
        return merge_attention(*zip(*parts, strict=True))

    def whole(q, k, v):
        scores = (q @ k.mT) / K**0.5
        seen = softmax_weights(q, k, *UNIONS[case]) > 0
        return softmax_weights(q, k, *UNIONS[case]) @ v, scores.masked_fill(~seen, -torch.inf).logsumexp(-1)

    inputs = qkv(random, 30, 30)
    for actual, expected in zip(differentiated(merged, inputs), differentiated(whole, inputs), strict=True):
        assert_same_maths(actual, expected, case)


def test_queries_without_any_key_give_zeros_and_no_gradient(random, differentiated):
    def merged(q, k, v):
        parts = [block_attention_with_lse(q, k, v, Sinks(count=c, back=5)) for c in (0, 2)]
        return (merge_attention(*zip(*parts, strict=True))[0],)

    out, *gradients = differentiated(merged, qkv(random, 12, 12))
    assert_same_maths(out[:, :, :6], torch.zeros_like(out[:, :, :6]))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert_same_maths(gradients[0][:, :, :6], torch.zeros_like(gradients[0][:, :, :6]))


def test_the_normaliser_of_a_query_without_keys_has_a_gradient_of_zero():
    lses = [torch.tensor([[[-torch.inf, 0.5]]], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    outs = [torch.zeros(1, 1, 2, 3, dtype=torch.float64) for _ in range(2)]
    _, lse = merge_attention(outs, lses)
    assert_same_maths(lse, torch.tensor([[[-torch.inf, 0.5 + math.log(2)]]], dtype=torch.float64))
    for gradient in torch.autograd.grad(lse[lse.isfinite()].sum(), lses):
        assert_same_maths(gradient, torch.tensor([[[0.0, 0.5]]], dtype=torch.float64))


def test_full_attention_to_a_length_needs_no_square_mask():
    largest = []
    for tokens in (1024, 2048):
        q, k, v = (torch.randn(1, 1, tokens, 8) for _ in range(3))
        attend = functools.partial(block_attention, q, k, v, Full(), lengths=torch.tensor([tokens - 3]))
        largest.append(largest_allocation(attend))
    assert largest[1] < LINEAR_GROWTH * largest[0], largest


def test_outputs_and_normalisers_come_in_pairs():
    x, lse = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match="one lse for each of one or more outs, got 1 and 2"):
        merge_attention([x, x], [lse])
    with pytest.raises(ValueError, match="one lse for each of one or more outs, got 0 and 0"):
        merge_attention([], [])


@backends
@settings(max_examples=20)
@given(queries=st.integers(1, 40), keys=st.integers(1, 40), data=st.data())
def test_key_lengths_cut_each_rows_keys(backend, queries, keys, data):
    lengths = data.draw(st.lists(st.integers(1, keys), min_size=B, max_size=B))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, n, K, dtype=torch.float64, generator=generator) for n in (queries, keys, keys))
    out = block_attention(q, k, v, Full(), key_lengths=torch.tensor(lengths), backend=backend)
    for b, n in enumerate(lengths):
        expected = (q[b] @ k[b, :, :n].mT / K**0.5).softmax(-1) @ v[b, :, :n]
        assert_same_maths(out[b], expected, f"row {b} of {lengths}")


@pytest.mark.parametrize(
    "pattern", [Full(), Band(before=3, after=5), Blocks(size=4, back=1), DilatedBand(2, 1, 3)], ids=repr
)
def test_lengths_cut_the_future_that_is_padding(pattern, random, differentiated):
    lengths = torch.tensor([7, 20])

    def padded(backend):
        return lambda q, k, v: block_attention_with_lse(q, k, v, pattern, lengths=lengths, backend=backend)

    inputs = qkv(random, 20, 20)
    actual, expected = (differentiated(padded(backend), inputs) for backend in ("torch", "reference"))
    for a, e in zip(actual, expected, strict=True):
        assert_same_maths(a, e, repr(pattern))
    short = block_attention(*(x[:1, :, :7] for x in inputs), pattern)
    assert_same_maths(actual[0][:1, :, :7], short, "as if padding were not there")


X = torch.zeros(B, H, 5, K)
LENGTHS = torch.tensor([1, 2])
WRONG = {
    "shape": ({"key_lengths": LENGTHS[:1]}, r"key_lengths must hold integers in the shape \(2,\), got torch\.int64 \(1,\)"),
    "dtype": ({"key_lengths": LENGTHS.float()}, r"key_lengths must hold integers in the shape \(2,\), got torch\.float32"),
    "lengths": ({"key_lengths": LENGTHS, "lengths": LENGTHS}, "and neither lengths, mask nor doc_ids"),
    "starts": ({"key_lengths": LENGTHS, "k_start": LENGTHS}, "a non-causal pattern, integer starts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_go_with_key_lengths_is_refused(case):
    options, match = WRONG[case]
    with pytest.raises(ValueError, match=match):
        block_attention(X, X, X, Full(), **options)


def test_a_causal_pattern_takes_no_key_lengths():
    with pytest.raises(ValueError, match=r"a pattern that is not causal .* got Causal\(\)"):
        block_attention(X, X, X, Causal(), key_lengths=LENGTHS)


SEQUENTIAL = {
    "another backend": ({"chunk_size": (4, 4), "backend": "torch"}, r"chunk_size is for the backend 'sequential', got"),
    "the default backend": ({"chunk_size": (4, 4)}, r"got chunk_size=\(4, 4\) for 'torch'"),
    "nothing": ({"chunk_size": (4, 0), "backend": "sequential"}, r"two numbers of at least 1 .*, got \(4, 0\)"),
    "three": ({"chunk_size": (4, 4, 4), "backend": "sequential"}, r"chunk_size must be two numbers"),
}


@pytest.mark.parametrize("case", SEQUENTIAL)
def test_chunks_are_two_numbers_for_the_sequential_backend(case):
    options, match = SEQUENTIAL[case]
    with pytest.raises(ValueError, match=match):
        block_attention(X, X, X, Causal(), **options)


@settings(max_examples=20)
@given(queries=st.integers(1, 40), keys=st.integers(1, 40))
def test_any_chunks_give_the_same(queries, keys):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, 33, K, dtype=torch.float64, generator=generator) for _ in range(3))
    chunked = block_attention(q, k, v, Window(width=7), chunk_size=(queries, keys), backend="sequential")
    assert_same_maths(chunked, block_attention(q, k, v, Window(width=7)), f"{queries} x {keys}")
