"""perceiver-ar-pytorch: the whole model with the same weights, and what it cannot do."""

import pytest
import torch
from torch.nn import functional as F

from subquad.models.build import build_model
from subquad.models.config import DecoderConfig
from subquad.testing import assert_same_maths

VOCAB, HEADS, PREFIX, LATENTS, LAYERS = 50, 2, 20, 12, 3
WHAT = "perceiver-ar-pytorch"


def ours(head=32, latents=LATENTS):
    sizes = {"vocab_size": VOCAB, "dim": HEADS * head, "num_layers": LAYERS, "num_heads": HEADS}
    kinds = {"attention": "perceiver_ar", "norm": "layer", "feedforward": "gelu", "tie_embeddings": False}
    return build_model(DecoderConfig(**sizes, **kinds, options={"perceiver_ar": {"latents": latents}}))


@pytest.fixture
def theirs(peer, double, exact_rotary):
    def make(head=32):
        model = peer("perceiver_ar_pytorch").PerceiverAR
        shape = {"num_tokens": VOCAB, "dim": HEADS * head, "depth": LAYERS - 1, "heads": HEADS, "dim_head": head}
        shape |= {"max_seq_len": PREFIX + LATENTS, "cross_attn_seq_len": PREFIX, "dropout": 0.0}
        return exact_rotary(double(lambda: model(**shape)))

    return make


@torch.no_grad()
def copied(theirs, ours):
    """Copy the peer's weights to our model, after zeroing its added positions and biases, which ours lacks."""
    theirs.pos_emb.weight.zero_()
    ours.embedding.tokens.weight.copy_(theirs.token_emb.weight)
    ours.head.weight.copy_(theirs.to_logits.weight)
    pairs = zip(ours.layers, [*theirs.perceive_layers, *theirs.layers], strict=True)
    for n, (block, (attention, feedforward)) in enumerate(pairs):
        mixer = block.attention
        if n:
            q, k, v = attention.to_qkv.weight.chunk(3)
        else:
            q, (k, v) = attention.to_q.weight, attention.to_kv.weight.chunk(2)
            attention.to_out.bias.zero_()
        for linear, weight in ((mixer.query, q), (mixer.key, k), (mixer.value, v)):
            linear.weight.copy_(weight)
        mixer.out.weight.copy_(attention.to_out.weight)
        block.feedforward.up.weight.copy_(feedforward[1].weight)
        block.feedforward.down.weight.copy_(feedforward[4].weight)
    theirs.to_logits = torch.nn.Sequential(ours.norm, ours.head)  # it has no norm before the head
    return ours


@pytest.fixture
def tokens():
    return torch.randint(1, VOCAB, (2, PREFIX + LATENTS), generator=torch.Generator().manual_seed(0))


def test_the_whole_model(theirs, double, agree, tokens):
    peer = theirs()
    model = copied(peer, double(ours))
    agree(WHAT, "logits of all latents", model(tokens)[0], peer(tokens))
    agree(WHAT, "loss", model.loss(tokens, tokens), peer(tokens, labels=tokens))
    (gradient,) = torch.autograd.grad(model(tokens)[0].square().sum(), model.embedding.tokens.weight)
    (theirs,) = torch.autograd.grad(peer(tokens).square().sum(), peer.token_emb.weight)
    agree(WHAT, "gradient of the embeddings", gradient, theirs)


def test_token_zero_does_not_count_in_its_loss(theirs, double, agree, tokens):
    peer = theirs()
    model = copied(peer, double(ours))
    labels = tokens.clone()
    labels[:, ::2] = 0
    logits, predicted = model(tokens)[0].flatten(0, 1), labels[:, PREFIX:].flatten()
    expected = F.cross_entropy(logits, predicted)
    assert_same_maths(model.loss(tokens, labels), expected, "our loss counts every token")
    without = F.cross_entropy(logits, predicted, ignore_index=0)
    agree(WHAT, "error: labels of 0 are left out of the loss", peer(tokens, labels=labels), without)
    assert peer(tokens, labels=torch.zeros_like(tokens)).isnan()


def test_it_has_no_prompts_up_to_the_length_of_its_prefix(theirs, double, agree, tokens):
    peer = theirs()
    model = copied(peer, double(ours))
    for length in (1, PREFIX):
        with pytest.raises(AssertionError):
            peer(tokens[:, :length])
        assert model(tokens[:, :length])[0].isfinite().all()
    # One token more is one latent more.
    agree(WHAT, "one latent", model(tokens[:, : PREFIX + 1], latents=1)[0], peer(tokens[:, : PREFIX + 1]))


def test_it_has_no_heads_of_fewer_than_32_channels(theirs, double, tokens):
    with pytest.raises(RuntimeError, match="size of tensor"):
        theirs(head=16)(tokens)
    assert double(lambda: ours(head=16))(tokens)[0].isfinite().all()
