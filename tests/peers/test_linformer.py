"""linformer: attention to learned mixtures of the tokens."""

import pytest
import torch

from subquad.attention import build

DIM, HEADS, TOKENS, PROJECTED = 32, 4, 40, 6


@pytest.mark.parametrize("tokens", [TOKENS, 23])
@pytest.mark.parametrize("share", [False, True])
def test_the_same_weights_give_the_same_outputs(peer, agree, double, random, share, tokens):
    options = {"k": PROJECTED, "heads": HEADS, "share_kv": share}
    theirs = double(lambda: peer("linformer").LinformerSelfAttention(DIM, TOKENS, **options))
    options = {"max_tokens": TOKENS, "projected": PROJECTED, "sharing": "key_value" if share else "heads"}
    ours = double(lambda: build("linformer", dim=DIM, num_heads=HEADS, **options))
    with torch.no_grad():
        ours.query.weight.copy_(theirs.to_q.weight)
        ours.key.weight.copy_(theirs.to_k.weight)
        ours.value.weight.copy_((theirs.to_k if share else theirs.to_v).weight)
        ours.out.weight.copy_(theirs.to_out.weight)
        theirs.to_out.bias.zero_()
        ours.project_keys.copy_(theirs.proj_k.T[None])
        if not share:
            ours.project_values.copy_(theirs.proj_v.T[None])
    x = random(2, tokens, DIM)
    what = f"{'one projection' if share else 'two projections'}, {tokens} of {TOKENS} tokens"
    agree("linformer", what, ours(x)[0], theirs(x))
