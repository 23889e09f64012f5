"""Each mechanism against literal loops over its paper's equations, which share no code with the library."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from subquad.attention import Attention, build
from subquad.testing import assert_same_maths

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
    layer, x = make("llp", segment=2 * HALF, first_block_projections=True)
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
    layer, x = make("llp", segment=2 * HALF, shared_kv=True, key_norm=True, split_output=True)
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


@pytest.mark.parametrize(("name", "options"), [("full", {}), ("window", {"width": 5})])
def test_softmax_over_what_is_seen(name, options):
    layer, x = make(name, **options)
    rows = []
    for t in range(TOKENS):
        seen = slice(max(0, t + 1 - options.get("width", TOKENS)), t + 1)
        heads = [
            attend(one_head(layer.query, x, h)[t], one_head(layer.key, x, h)[seen], one_head(layer.value, x, h)[seen])
            for h in range(HEADS)
        ]
        rows.append(layer.out(torch.cat(heads)))
    assert_same_maths(layer(x[None])[0][0], torch.stack(rows), name)
