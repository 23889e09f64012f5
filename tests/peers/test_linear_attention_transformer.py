"""linear-attention-transformer: softmax features of queries and keys, which is bidirectional Latte but for a factor."""

import pytest
import torch

from subquad.attention import build
from subquad.ops import gated_scan
from subquad.testing import assert_exact, assert_same_maths

DIM, HEADS, K, TOKENS = 32, 2, 16, 48


@pytest.fixture
def module(peer):
    return peer("linear_attention_transformer.linear_attention_transformer")


def ours(q, k, v):
    """The same features in our scan: `softmax(q) . sum exp(k) v` over its sum of weights."""
    return gated_scan(q.softmax(-1), k.exp(), v, None, normalise=True).out


def test_bidirectional_is_latte_divided_by_the_root_of_the_head_size(module, agree, double, random):
    layer = double(lambda: build("latte", dim=DIM, num_heads=HEADS, causal=False))
    x = random(2, TOKENS, DIM)
    logits = layer.logits(layer.query, x), layer.logits(layer.key, x)
    theirs = layer.merge(module.linear_attn(*logits, layer.values(x)))
    agree("linear-attention-transformer", "bidirectional, times sqrt(K)", layer(x)[0], theirs * K**0.5)


def test_its_bidirectional_weights_sum_to_one_over_the_root_of_the_head_size(module, agree, random):
    q, k = (random(2, HEADS, TOKENS, K, seed=n) for n in range(2))
    sums = module.linear_attn(q, k, torch.ones_like(q))
    agree("linear-attention-transformer", "error: sum of a row is 1 / sqrt(K)", sums, torch.full_like(sums, K**-0.5))


def test_causal_with_buckets_of_one(module, agree, random):
    q, k, v = (random(2, HEADS, TOKENS, K, seed=n) for n in range(3))
    agree("linear-attention-transformer", "causal", ours(q, k, v), module.causal_linear_attn(q, k, v, bucket_size=1))


def test_its_clamp_shrinks_outputs_where_keys_are_small_and_its_exponential_overflows(module, note, random):
    q, k, v = (random(2, HEADS, TOKENS, K, seed=n) for n in range(3))
    ones = torch.ones_like(v)
    small = module.causal_linear_attn(q, k - 12, ones, bucket_size=1)
    note("linear-attention-transformer", "error: causal, keys - 12: a row's weights sum to", small[:, :, 0].mean())
    assert small[:, :, 0].max() < 0.1
    large = module.causal_linear_attn(q.float(), k.float() + 100, v.float(), bucket_size=1)
    assert not large.isfinite().any()
    # Latte's running softmax takes both; a shift of all keys changes nothing.
    layer = build("latte", dim=DIM, num_heads=HEADS, bias=True).double()
    x, bias = random(2, TOKENS, DIM), layer.key.bias
    outputs = []
    for shift in (0.0, -12.0, 100.0):
        with torch.no_grad():
            bias.fill_(shift)
        outputs.append(layer(x)[0])
    assert_same_maths(outputs[1], outputs[0], "keys - 12")
    assert_same_maths(outputs[2], outputs[0], "keys + 100")


def test_its_buckets_have_a_blind_spot_and_the_first_one_gives_zeros(module, random):
    q, k, v = (random(2, HEADS, TOKENS, K, seed=n) for n in range(3))
    theirs = module.causal_linear_attn(q, k, v, bucket_size=8)
    assert_exact(theirs[:, :, :8], torch.zeros_like(theirs[:, :, :8]), "the first bucket")
    other = v.clone()
    other[:, :, 40:] += 1
    changed = module.causal_linear_attn(q, k, other, bucket_size=8)
    assert_exact(changed[:, :, 40:], theirs[:, :, 40:], "the last bucket does not see itself")
    assert (ours(q, k, other)[:, :, 40:] - ours(q, k, v)[:, :, 40:]).abs().amin() > 0
