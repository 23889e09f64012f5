"""memory-efficient-attention-pytorch: Rabe and Staats, our backend `sequential`."""

import pytest
import torch

from subquad.ops import block_attention
from subquad.ops._sequential import attend as sequential
from subquad.ops.patterns import Causal, Full
from subquad.testing import assert_exact, assert_same_maths

NAME = "memory-efficient-attention-pytorch"


@pytest.fixture
def module(peer):
    return peer("memory_efficient_attention_pytorch.memory_efficient_attention")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(sequential, "QUERY_CHUNK", 16)
    monkeypatch.setattr(sequential, "KEY_CHUNK", 24)


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
@pytest.mark.parametrize("causal", [True, False])
def test_outputs_and_gradients(module, agree, random, causal):
    q, k, v = (random(2, 3, 70, 8, seed=n).requires_grad_() for n in range(3))
    ours = block_attention(q, k, v, Causal() if causal else Full(), backend="sequential")
    theirs = module.memory_efficient_attention(q, k, v, causal=causal, q_bucket_size=16, k_bucket_size=24, eps=0.0)
    what = "causal" if causal else "bidirectional"
    agree(NAME, f"{what}, eps 0", ours, theirs)
    gradients = []
    for y in (ours, theirs):  # by backward(): its reentrant checkpoints refuse torch.autograd.grad
        (y * random(*y.shape, seed=5)).sum().backward()
        gradients.append([x.grad for x in (q, k, v)])
        q.grad = k.grad = v.grad = None
    for name, a, b in zip("qkv", *gradients, strict=True):
        agree(NAME, f"{what}, gradient of {name}", a, b)


def test_its_causal_mask_with_more_keys_than_queries_is_not_that_of_its_plain_form(module, agree, note, random):
    q, k, v = (random(2, 3, tokens, 8, seed=n) for n, tokens in enumerate((20, 50, 50)))
    ours = block_attention(q, k, v, Causal(), q_start=30, backend="sequential")
    plain = module.attention(q, k, v, causal=True)
    agree(NAME, "plain form, last 20 queries", ours, plain)
    chunked = module.memory_efficient_attention(q, k, v, causal=True, q_bucket_size=16, k_bucket_size=24, eps=0.0)
    note(NAME, "error: chunked form, last 20 queries", (chunked - ours).abs().max())
    # It treats the queries as the first of the keys.
    first = block_attention(q, k, v, Causal(), backend="sequential")
    agree(NAME, "chunked form, as if the first 20 queries", first, chunked)


def test_its_dropout_acts_before_normalisation_and_ours_after(module, random):
    q, k = (random(2, 3, 70, 8, seed=n) for n in range(2))
    ones = torch.ones_like(q)
    torch.manual_seed(0)
    theirs = module.memory_efficient_attention(q, k, ones, dropout=0.5, training=True, eps=0.0)
    assert_same_maths(theirs, ones, "remaining weights are renormalised")
    ours = block_attention(q, k, ones, Full(), dropout_p=0.5, backend="sequential")
    assert (ours - 1).abs().mean() > 0.05


def test_a_query_without_keys_gives_the_mean_of_all_values_there_and_zeros_here(module, agree, random):
    q, k, v = (random(2, 3, 20, 8, seed=n) for n in range(3))
    nothing = torch.zeros(2, 20, dtype=torch.bool)
    theirs = module.memory_efficient_attention(q, k, v, mask=nothing, eps=0.0)
    agree(NAME, "error: no key gives the mean", v.mean(2, keepdim=True).expand_as(v), theirs)
    ours = block_attention(q, k, v, Full(), lengths=torch.tensor([0, 0]), backend="sequential")
    assert_exact(ours, torch.zeros_like(ours))
