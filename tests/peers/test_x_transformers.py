"""x-transformers: a whole decoder with rotary positions."""

from functools import partial

import pytest
import torch

from subquad.models.config import DecoderConfig
from subquad.models.decoder import Decoder

VOCAB, DIM, HEADS, LAYERS, K = 50, 64, 2, 3, 32
TURN = torch.arange(K).view(2, K // 2).T.flatten()  # its rotary pairs are neighbours, ours half a head apart


def turned(weight):
    """Reorder the rows of a query or key projection to our order of channels."""
    rows = weight.unflatten(0, (-1, K))
    return torch.empty_like(rows).index_copy_(1, TURN, rows).flatten(0, 1)


def scale(norm):
    return norm.gamma + float(norm.unit_offset)


@torch.no_grad()
def copied(theirs, ours):
    """Copy the peer's weights to our decoder (its norms have no bias)."""
    ours.embedding.tokens.weight.copy_(theirs.token_emb.emb.weight)
    ours.head.weight.copy_(theirs.to_logits.weight)
    layers = theirs.attn_layers.layers
    blocks = zip(ours.layers, layers[::2], layers[1::2], strict=True)
    for block, (norms, attention, _), (more_norms, feedforward, _) in blocks:
        mixer = block.attention
        mixer.query.weight.copy_(turned(attention.to_q.weight))
        mixer.key.weight.copy_(turned(attention.to_k.weight))
        mixer.value.weight.copy_(attention.to_v.weight)
        mixer.out.weight.copy_(attention.to_out.weight)
        block.attention_norm.weight.copy_(scale(norms[0]))
        block.feedforward_norm.weight.copy_(scale(more_norms[0]))
        linear = [module for module in feedforward.modules() if isinstance(module, torch.nn.Linear)]
        block.feedforward.up.weight.copy_(linear[0].weight)
        block.feedforward.down.weight.copy_(linear[1].weight)
    ours.norm.weight.copy_(scale(theirs.attn_layers.final_norm))
    return ours


@pytest.mark.parametrize("rotary", [True, False])
def test_the_whole_decoder(peer, double, exact_rotary, agree, rotary):
    library = peer("x_transformers")
    options = {"attn_dim_head": K, "rotary_pos_emb": rotary, "rotary_emb_dim": K, "ff_no_bias": True}

    def make():
        layers = library.Decoder(dim=DIM, depth=LAYERS, heads=HEADS, **options)
        shape = {"num_tokens": VOCAB, "max_seq_len": 64, "use_abs_pos_emb": False}
        return library.TransformerWrapper(**shape, attn_layers=layers)

    theirs = exact_rotary(double(make))
    for module in theirs.modules():
        if hasattr(module, "attn_fn"):
            module.attn_fn = partial(torch.softmax, dim=-1)  # instead of a softmax in float32 whatever the input
    sizes = {"vocab_size": VOCAB, "dim": DIM, "num_layers": LAYERS, "num_heads": HEADS}
    kinds = {"attention": "full", "norm": "layer", "feedforward": "gelu", "tie_embeddings": False}
    config = DecoderConfig(**sizes, **kinds, position="rope" if rotary else "none")
    ours = copied(theirs, double(lambda: Decoder(config)))
    tokens = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    what = "decoder with rotary positions" if rotary else "decoder without positions"
    agree("x-transformers", f"{what}, logits", ours(tokens)[0], theirs(tokens))
    (gradient,) = torch.autograd.grad(ours(tokens)[0].square().sum(), ours.embedding.tokens.weight)
    (their_gradient,) = torch.autograd.grad(theirs(tokens).square().sum(), theirs.token_emb.emb.weight)
    agree("x-transformers", f"{what}, gradient of the embeddings", gradient, their_gradient)
