"""Exchanges alone: needed tokens, merged summaries, a ring's outputs and gradients."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.memories.running_softmax import RunningSoftmax
from subquad.ops import block_attention, block_attention_with_lse, gated_scan, running_softmax
from subquad.ops.patterns import Causal
from subquad.parallel.exchange import first_before, held, last_before, prefix
from subquad.parallel.ring import ring_attention
from subquad.testing import assert_same_maths
from subquad.testing.ranks import on_ranks
from tests.parallel.cases import draw

RANKS = st.integers(1, 6)
TOKENS = st.integers(0, 7)


@given(reach=st.integers(0, 20), tokens=TOKENS, ranks=RANKS)
def test_spans_are_the_tokens_that_earlier_ranks_hold(reach, tokens, ranks):
    for spans, expected in (
        (last_before(reach, tokens, ranks), lambda first: range(max(0, first - reach), first)),
        (first_before(reach, tokens, ranks), lambda first: range(min(reach, first))),
    ):
        for rank, span in enumerate(spans):
            parts = [(owner, held(owner, span, tokens)) for owner in range(ranks)]
            found = [owner * tokens + i for owner, (start, stop) in parts for i in range(start, stop)]
            assert found == list(expected(rank * tokens))


@given(sizes=st.lists(st.integers(0, 5), min_size=3, max_size=3), scale=st.sampled_from((1.0, 1e2, 1e4)))
def test_merging_is_associative_and_gives_the_scan_s_state(sizes, scale):
    logits, v = scale * draw(1, 2, sum(sizes), 3), draw(1, 2, sum(sizes), 4, seed=2)
    state = running_softmax(logits.softmax(-1), logits, v).state
    sums = gated_scan(logits, logits, v, None, normalise=True).state
    for memory, expected in ((RunningSoftmax, state), (partial(Recurrence, normalise=True), (sums,))):
        whole = memory(logits, v)
        parts = [memory(*part).summary() for part in zip(logits.split(sizes, 2), v.split(sizes, 2), strict=True)]
        a, b, c = parts
        for merged in (whole.merge(whole.merge(a, b), c), whole.merge(a, whole.merge(b, c)), whole.summary()):
            for actual, entry in zip(whole.begin(merged), expected, strict=True):
                assert_same_maths(actual, entry)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_prefix_merges_the_earlier_ranks_in_order(ranks):
    """Compositions of maps x -> a x + b are associative but don't commute."""
    scales, shifts = draw(ranks, 2).unbind(), draw(ranks, 2, seed=2).unbind()

    def merge(first, then):
        return then[0] * first[0], then[0] * first[1] + then[1]

    found = on_ranks(ranks, lambda g: prefix((scales[g.rank], shifts[g.rank]), merge, (1.0, 0.0), g))
    expected = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for scale, shift, actual in zip(scales, shifts, found, strict=True):
        assert_same_maths(actual[0], expected[0])
        assert_same_maths(actual[1], expected[1])
        expected = merge(expected, (scale, shift))


def attend(q, k, v, q_start, k_start):
    assert k_start <= q_start, "a block of the future"
    return block_attention_with_lse(q, k, v, Causal(), q_start=q_start, k_start=k_start)


@settings(max_examples=12)
@given(ranks=RANKS, tokens=st.integers(1, 5), large=st.booleans())
def test_a_ring_is_attention_with_every_gradient(ranks, tokens, large):
    T = ranks * tokens
    q, k, v = (draw(1, heads, T, 4, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2)))
    q = (1e3 * q).detach().requires_grad_() if large else q
    weight = draw(1, 4, T, 4, seed=9)
    whole = block_attention(q, k, v, Causal())
    expected = torch.autograd.grad((whole * weight).sum(), (q, k, v))

    def work(group):
        own = slice(group.offset(tokens), group.offset(tokens) + tokens)
        leaves = [x[:, :, own].detach().requires_grad_() for x in (q, k, v)]
        out = ring_attention(attend, *leaves, group)
        return out.detach(), *torch.autograd.grad((out * weight[:, :, own]).sum(), leaves)

    for actual, whole_one in zip(zip(*on_ranks(ranks, work), strict=True), (whole, *expected), strict=True):
        assert_same_maths(torch.cat(actual, 2), whole_one)


def test_a_ring_saves_no_more_for_autograd_on_more_ranks():
    def work(group):
        q, k, v = (draw(1, 2, 6, 4, seed=i).requires_grad_() for i in range(3))
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            ring_attention(attend, q, k, v, group)
        return sum(sizes)

    assert set(on_ranks(1, work)) == set(on_ranks(5, work))
