"""Softmax over a union of disjoint sets of keys, and queries that are not among the keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.ops import block_attention, merge_attention
from subquad.ops.attend import softmax_weights
from subquad.ops.patterns import Band, Blocks, Causal, DilatedBand, Full, Globals, Segments, Sinks, Window
from subquad.testing import assert_same_maths

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
        parts = [block_attention(q, k, v, p, return_lse=True, backend=backend) for p in UNIONS[case]]
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
        parts = [block_attention(q, k, v, Sinks(count=c, back=5), return_lse=True) for c in (0, 2)]
        return (merge_attention(*zip(*parts, strict=True))[0],)

    out, *gradients = differentiated(merged, qkv(random, 12, 12))
    assert_same_maths(out[:, :, :6], torch.zeros_like(out[:, :, :6]))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert_same_maths(gradients[0][:, :, :6], torch.zeros_like(gradients[0][:, :, :6]))


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
        return lambda q, k, v: block_attention(q, k, v, pattern, lengths=lengths, return_lse=True, backend=backend)

    inputs = qkv(random, 20, 20)
    actual, expected = (differentiated(padded(backend), inputs) for backend in ("torch", "reference"))
    for a, e in zip(actual, expected, strict=True):
        assert_same_maths(a, e, repr(pattern))
    short = block_attention(*(x[:1, :, :7] for x in inputs), pattern)
    assert_same_maths(actual[0][:1, :, :7], short, "as if padding were not there")


X = torch.zeros(B, H, 5, K)
LENGTHS = torch.tensor([1, 2])
WRONG = {
    "shape": ({"key_lengths": LENGTHS[:1]}, r"key_lengths must hold whole numbers \(2,\), got torch\.int64 \(1,\)"),
    "dtype": ({"key_lengths": LENGTHS.float()}, r"key_lengths must hold whole numbers \(2,\), got torch\.float32"),
    "lengths": ({"key_lengths": LENGTHS, "lengths": LENGTHS}, "and neither lengths, mask nor doc_ids"),
    "starts": ({"key_lengths": LENGTHS, "k_start": LENGTHS}, "a pattern that is not causal and whole starts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_go_with_key_lengths_is_refused(case):
    options, match = WRONG[case]
    with pytest.raises(ValueError, match=match):
        block_attention(X, X, X, Full(), **options)


def test_a_causal_pattern_takes_no_key_lengths():
    with pytest.raises(ValueError, match=r"a pattern that is not causal .* got Causal\(\)"):
        block_attention(X, X, X, Causal(), key_lengths=LENGTHS)
