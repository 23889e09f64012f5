"""Each mechanism against literal loops over its paper's equations, which share no code with the library."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from subquad.attention import Attention, build
from subquad.testing import assert_same_maths

APART = {"shared_kv": False, "key_norm": False, "split_output": False}
DIM, HEADS, HALF, TOKENS = 12, 3, 4, 19
K = DIM // HEADS


def make(name: str, **options: object) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    layer = build(name, dim=DIM, num_heads=HEADS, **options).double()
    for module in layer.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return layer, torch.randn(TOKENS, DIM, dtype=torch.float64)


def one_head(projection: nn.Module, x_TD: Tensor, head: int) -> Tensor:
    return projection(x_TD)[:, head * K : (head + 1) * K]


def attend(q_K: Tensor, k_SK: Tensor, v_SK: Tensor) -> Tensor:
    return (k_SK @ q_K / math.sqrt(K)).softmax(0) @ v_SK


def test_llp_is_equations_22_to_29():
    layer, x = make("llp_printed", segment=2 * HALF, first_block_projections=True, **APART)
    rows = []
    for t in range(TOKENS):
        block = t // HALF
        first = block == 0
        query, key, value = (
            (layer.first_query, layer.first_key, layer.first_value) if first else (layer.query, layer.key, layer.value)
        )
        seen = slice(max(0, (block - 1) * HALF), t + 1)
        heads = [
            attend(one_head(query, x, h)[t], one_head(key, x, h)[seen], one_head(value, x, h)[seen])
            for h in range(HEADS)
        ]
        rows.append(layer.out(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), "llp")


def test_llp_is_the_pseudocode_of_figure_5():
    layer, x = make("llp_printed", segment=2 * HALF)
    rows = []
    for t in range(TOKENS):
        block, heads = t // HALF, []
        seen = slice(max(0, (block - 1) * HALF), t + 1)
        for h in range(HEADS):
            kv = one_head(layer.key, x, h)[seen]
            heads.append(attend(one_head(layer.query, x, h)[t], kv if block == 0 else layer.norm(kv), kv))
        rows.append((layer.first_out if block == 0 else layer.out)(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), "llp")


def test_latte_is_equations_10_to_13():
    layer, x = make("latte", num_latents=2 * HEADS)
    q, k = (project(x).view(TOKENS, HEADS, 2) for project in (layer.query, layer.key))
    rows = []
    for t in range(TOKENS):
        heads = []
        for h in range(HEADS):
            v = one_head(layer.value, x, h)[: t + 1]
            p = q[t, h].softmax(0)
            heads.append(sum(p[a] * (k[: t + 1, h, a].softmax(0) @ v) for a in range(2)))
        rows.append(layer.out(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), "latte")


def test_linear_is_the_normalised_sum():
    layer, x = make("linear")
    rows = []
    for t in range(TOKENS):
        heads = []
        for h in range(HEADS):
            q, k = (nn.functional.elu(one_head(project, x, h)) + 1 for project in (layer.query, layer.key))
            w = k[: t + 1] @ q[t]
            heads.append(w @ one_head(layer.value, x, h)[: t + 1] / (w.sum() + 1e-6))
        rows.append(layer.out(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), "linear")


def shifted_group(t: int, head: int) -> int:
    """The group of 8 that token t is in; of three heads the last one has moved groups."""
    return (t + 4) // 8 if head == 2 else t // 8


def shifted_half(t: int, head: int) -> int:
    """The half segment of 4 that token t is in; the last head's first one has 2 tokens."""
    return (t + 2) // 4 if head == 2 else t // 4


SEEN = {
    "full": ("full", {}, lambda t, s, h: s <= t),
    "full both ways": ("full", {"causal": False}, lambda t, s, h: True),
    "window": ("window", {"width": 5}, lambda t, s, h: t - 5 < s <= t),
    "window both ways": ("window", {"width": 5, "causal": False}, lambda t, s, h: abs(s - t) <= 2),
    "dilated": ("dilated", {"width": 3, "dilation": 4}, lambda t, s, h: s in (t, t - 4, t - 8)),
    "dilated both ways": (
        "dilated",
        {"width": 3, "dilation": 4, "causal": False},
        lambda t, s, h: s in (t, t - 4, t + 4),
    ),
    "shifted": ("shifted", {"group": 8}, lambda t, s, h: s <= t and shifted_group(s, h) == shifted_group(t, h)),
    "llp, shifted heads": (
        "llp",
        {"segment": 8, "shifted_heads": True},
        lambda t, s, h: s <= t and shifted_half(s, h) >= shifted_half(t, h) - 1,
    ),
    "llp both ways": ("llp", {"segment": 8, "causal": False}, lambda t, s, h: abs(s // 4 - t // 4) <= 1),
    "strided": (
        "strided",
        {"stride": 4},
        lambda t, s, h: s <= t and ((t - s) % 4 == 0 if h == 2 else t - s <= 4),
    ),
    "strided, fixed": (
        "strided",
        {"stride": 4, "kind": "fixed", "columns": 2},
        lambda t, s, h: s <= t and (s % 4 >= 2 if h == 2 else s // 4 == t // 4),
    ),
}


@pytest.mark.parametrize("case", SEEN)
def test_softmax_over_what_is_seen(case):
    name, options, sees = SEEN[case]
    layer, x = make(name, **options)
    rows = []
    for t in range(TOKENS):
        heads = []
        for h in range(HEADS):
            seen = [s for s in range(TOKENS) if sees(t, s, h)]
            q, k, v = (one_head(project, x, h) for project in (layer.query, layer.key, layer.value))
            heads.append(attend(q[t], k[seen], v[seen]) if seen else torch.zeros(K, dtype=torch.float64))
        rows.append(layer.out(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), case)


def test_shifted_as_published_is_a_roll_and_leaks():
    layer, x = make("shifted", group=8, wrap=True)
    x = x[:16]
    order = [*range(4, 16), *range(4)]  # the rolled order of the last head
    rows = []
    for t in range(16):
        heads = []
        for h in range(HEADS):
            place = {token: i for i, token in enumerate(order)} if h == 2 else {token: token for token in range(16)}
            seen = [s for s in range(16) if place[s] // 8 == place[t] // 8 and place[s] <= place[t]]
            q, k, v = (one_head(project, x, h) for project in (layer.query, layer.key, layer.value))
            heads.append(attend(q[t], k[seen], v[seen]))
        rows.append(layer.out(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), "wrapped")
    changed = x.clone()
    changed[15] += 1
    moved = (layer(changed[None])[0] - layer(x[None])[0])[0].abs().sum(-1)
    assert (moved[:4] > 0).all(), "the first half group reads the last token"
    assert (moved[4:15] == 0).all()


@pytest.mark.parametrize("causal", [True, False])
def test_longformer_is_a_window_and_global_tokens_with_projections_of_their_own(causal):
    layer, x = make("longformer", width=3, num_global=2, causal=causal)
    rows = []
    for t in range(TOKENS):
        near = range(t - 2, t + 1) if causal else range(t - 1, t + 2)
        last = t if causal else TOKENS - 1
        heads = []
        for h in range(HEADS):
            if t < 2:
                projections, seen = (layer.global_query, layer.global_key, layer.global_value), [*range(last + 1)]
            else:
                projections = (layer.query, layer.key, layer.value)
                seen = [s for s in range(last + 1) if s in near or s < 2]
            q, k, v = (one_head(project, x, h) for project in projections)
            heads.append(attend(q[t], k[seen], v[seen]))
        rows.append(layer.out(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), "longformer")


@pytest.mark.parametrize("causal", [True, False])
def test_bigbird_is_softmax_over_distinct_blocks(causal):
    layer, x = make("bigbird", block=2, back=1, num_global=1, num_random=2, causal=causal, seed=1)
    w_HTS = layer.weights(x[None])[0]
    blocks, rows = (TOKENS + 1) // 2, []
    for t in range(TOKENS):
        block = t // 2
        own = {b for b in (block - 1, block, block + 1) if 0 <= b < blocks and not (causal and b > block)} | {0}
        seen = [s for s in range(TOKENS) if w_HTS[0, t, s] > 0]
        there = {s // 2 for s in seen}
        candidates = [b for b in range(1, blocks) if b not in own and not (causal and b > block)]
        if not causal and block == 0:
            assert seen == [*range(TOKENS)], "a global row"
        else:
            assert own <= there
            assert len(there - own) == min(2, len(candidates))
            assert seen == [s for s in range(TOKENS) if s // 2 in there and not (causal and s > t)]
        heads = []
        for h in range(HEADS):
            q, k, v = (one_head(project, x, h) for project in (layer.query, layer.key, layer.value))
            heads.append(attend(q[t], k[seen], v[seen]))
        rows.append(layer.out(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), "bigbird")


def test_latte_macchiato_is_one_softmax_over_the_window_and_the_latents():
    layer, x = make("latte_macchiato", num_latents=2 * HEADS, width=3, rope=False)
    q, k = layer.latent_query(x).view(TOKENS, HEADS, 3), layer.latent_key(x).view(TOKENS, HEADS, 2)
    rows = []
    for t in range(TOKENS):
        heads, near = [], slice(max(0, t - 2), t + 1)
        for h in range(HEADS):
            v, p = one_head(layer.value, x, h), q[t, h].softmax(0)
            window = attend(one_head(layer.query, x, h)[t], one_head(layer.key, x, h)[near], v[near])
            latents = (p[a + 1] * (k[: t + 1, h, a].softmax(0) @ v[: t + 1]) for a in range(2))
            heads.append(p[0] * window + sum(latents))
        rows.append(layer.out(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), "latte_macchiato")
