"""local-attention: windows made of blocks, the pattern of LLP, and exact windows."""

import pytest
import torch

from subquad.attention import build
from subquad.ops import block_attention
from subquad.ops.patterns import Blocks
from subquad.testing import assert_same_maths

DIM, HEADS, K = 32, 2, 16


@pytest.fixture
def local(peer):
    """The peer's attention, by default without rotary positions and for sequences of any length."""
    attention = peer("local_attention").LocalAttention
    return lambda **options: attention(**{"autopad": True, "use_rotary_pos_emb": False} | options).double()


def parts(layer, x):
    """Queries, keys and values of our layer, without positions."""
    return layer.split(layer.query(x)), layer.split(layer.key(x)), layer.split(layer.value(x))


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("tokens", [5, 24, 61])
def test_llp_is_block_local_attention_with_one_block_back(local, agree, double, exact_rotary, random, rope, tokens):
    layer = double(lambda: build("llp", dim=DIM, num_heads=HEADS, segment=16, rope=rope))
    theirs = exact_rotary(local(window_size=8, causal=True, look_backward=1, use_rotary_pos_emb=rope, dim=K))
    x = random(2, tokens, DIM)
    agree("local-attention", f"llp{' with rope' * rope}", layer(x)[0], layer.merge(theirs(*parts(layer, x))))


@pytest.mark.parametrize("rope", [False, True])
def test_its_exact_window_of_w_sees_w_plus_one_tokens(local, agree, double, exact_rotary, random, rope):
    layer = double(lambda: build("window", dim=DIM, num_heads=HEADS, width=9, rope=rope))
    theirs = exact_rotary(local(window_size=8, causal=True, exact_windowsize=True, use_rotary_pos_emb=rope, dim=K))
    x = random(2, 61, DIM)
    agree("local-attention", f"window{' with rope' * rope}", layer(x)[0], layer.merge(theirs(*parts(layer, x))))


def test_bidirectional_blocks_of_whole_length(local, agree, random):
    q, k, v = (random(2, HEADS, 64, K, seed=n) for n in range(3))
    ours = block_attention(q, k, v, Blocks(size=8, back=1, ahead_blocks=1))
    agree("local-attention", "blocks with a neighbour on each side", ours, local(window_size=8)(q, k, v))


def test_its_own_padding_is_seen_without_a_mask_and_ours_is_not(local, agree, note, random):
    q, k, v = (random(2, HEADS, 61, K, seed=n) for n in range(3))
    ours = block_attention(q, k, v, Blocks(size=8, back=1, ahead_blocks=1))
    theirs = local(window_size=8)
    with_mask = theirs(q, k, v, mask=torch.ones(2, 61, dtype=torch.bool))
    agree("local-attention", "blocks, 61 tokens, with a mask of all true", ours, with_mask)
    # autopad fills up to 64 tokens with zeros and, without a mask, attends to them.
    without = theirs(q, k, v)
    difference = (without - ours).abs().amax((0, 1, 3))
    note("local-attention", "error: autopad without a mask", difference.max())
    assert_same_maths(without[:, :, :48], ours[:, :, :48], "queries that do not see the last block")
    assert difference[48:].min() > 1e-3
