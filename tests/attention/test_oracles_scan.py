"""Mechanisms of the scan against literal loops over their papers' equations, which share no code with the library.

And what the contract, whose padding is zero once it is compacted, can't see: padded slots that hold something.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from subquad.attention import Attention, build
from subquad.testing import assert_exact, assert_same_maths

DIM, HEADS, TOKENS = 12, 3, 11
K = DIM // HEADS


def make(name: str, **options: object) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    layer = build(name, dim=DIM, num_heads=HEADS, bias=True, **options).double()
    return layer, torch.randn(TOKENS, DIM, dtype=torch.float64)


def head(project: nn.Module, x_TD: Tensor, h: int, heads: int = HEADS) -> Tensor:
    width = DIM // heads
    return project(x_TD)[:, h * width : (h + 1) * width]


def seen(t: int, causal: bool) -> range:
    return range(t + 1 if causal else TOKENS)


def from_heads(layer: Attention, row: object) -> Tensor:
    """The output, given `row(t, h)`, the output of a head at a token."""
    return torch.stack([layer.out(torch.cat([row(t, h) for h in range(HEADS)])) for t in range(TOKENS)])


@pytest.mark.parametrize("causal", [True, False])
def test_linear_is_the_normalised_sum(causal):
    layer, x = make("linear", causal=causal)

    def row(t, h):
        q, k = (nn.functional.elu(head(project, x, h)) + 1 for project in (layer.query, layer.key))
        weights = [q[t] @ k[s] for s in seen(t, causal)]
        read = sum(w * head(layer.value, x, h)[s] for s, w in zip(seen(t, causal), weights, strict=True))
        return read / (sum(weights) + 1e-6)

    assert_same_maths(layer(x[None])[0][0], from_heads(layer, row), "linear")


@pytest.mark.parametrize("causal", [True, False])
def test_latte_is_equations_5_to_13(causal):
    layer, x = make("latte", num_latents=2 * HEADS, causal=causal)
    q, k = (project(x).view(TOKENS, HEADS, 2) for project in (layer.query, layer.key))

    def row(t, h):
        read = torch.zeros(K, dtype=torch.float64)
        for latent in range(2):
            p = q[t, h, latent].exp() / q[t, h].exp().sum()
            total = sum(k[s, h, latent].exp() for s in seen(t, causal))
            for s in seen(t, causal):
                read = read + p * k[s, h, latent].exp() / total * head(layer.value, x, h)[s]
        return read

    assert_same_maths(layer(x[None])[0][0], from_heads(layer, row), "latte")


@pytest.mark.parametrize("options", [{}, {"time": "i/(N-1)"}, {"query_term": False}, {"positions": False}], ids=str)
def test_elita_is_attention2(options):
    """A horizon of 6: later tokens are extrapolated."""
    layer, x = make("elita", horizon=6, position_width=5, **options)
    nth = 5 if "time" in options else 6
    if layer.config.positions:
        for parameter in (layer.frequency, layer.phase, layer.amplitude):
            nn.init.normal_(parameter)

    def term(which, i, h):
        if not layer.config.positions:
            return 0.0
        return torch.sin(layer.frequency[which, h] * i / nth + layer.phase[which, h]) @ layer.amplitude[h]

    def row(t, h):
        v, k1, k2 = head(layer.value, x, h), layer.key(x)[:, h], layer.self_key(x)[:, h]
        k3 = layer.query(x)[:, h] if layer.config.query_term else torch.zeros(TOKENS)
        past, own = (term(1, t, h) + k3[t]).exp(), k2[t].exp()
        weights = [(k1[j] + term(0, j, h)).exp() for j in range(t + 1)]
        top = own * v[t] + past * sum(w * v[j] for j, w in enumerate(weights))
        return top / (own + past * sum(weights))

    assert_same_maths(layer(x[None])[0][0], from_heads(layer, row), f"elita {options}")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["softmax", "relu"])
def test_performer_is_the_normalised_sum_of_features(kernel, causal):
    layer, x = make("performer", kernel=kernel, causal=causal, features=7)

    def phi(y_K):
        y_K = y_K * K**-0.25
        if kernel == "relu":
            return (layer.directions @ y_K).relu() + 1e-3
        return (layer.directions @ y_K - y_K @ y_K / 2).exp() / math.sqrt(7)

    def row(t, h):
        q, k, v = (head(project, x, h) for project in (layer.query, layer.key, layer.value))
        weights = [phi(q[t]) @ phi(k[s]) for s in seen(t, causal)]
        return sum(w * v[s] for s, w in zip(seen(t, causal), weights, strict=True)) / sum(weights)

    assert_same_maths(layer(x[None])[0][0], from_heads(layer, row), "performer")


@pytest.mark.parametrize("sharing", ["none", "heads", "key_value"])
def test_linformer_projects_keys_and_values_over_the_sequence(sharing):
    layer, x = make("linformer", sharing=sharing, max_tokens=TOKENS + 3, projected=4)

    def row(t, h):
        e = layer.project_keys[h if sharing == "none" else 0]
        f = e if sharing == "key_value" else layer.project_values[h if sharing == "none" else 0]
        q, k, v = (head(project, x, h) for project in (layer.query, layer.key, layer.value))
        keys = [sum(e[j, s] * k[s] for s in range(TOKENS)) for j in range(4)]
        values = [sum(f[j, s] * v[s] for s in range(TOKENS)) for j in range(4)]
        scores = [(q[t] @ key / math.sqrt(K)).exp() for key in keys]
        return sum(a * value for a, value in zip(scores, values, strict=True)) / sum(scores)

    assert_same_maths(layer(x[None])[0][0], from_heads(layer, row), f"linformer {sharing}")


def attend(q_K: Tensor, k_SK: Tensor, v_SV: Tensor) -> Tensor:
    scores = [(q_K @ k / math.sqrt(len(q_K))).exp() for k in k_SK]
    return sum(a * v for a, v in zip(scores, v_SV, strict=True)) / sum(scores)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pack_heads", [2, None])
def test_luna_packs_and_unpacks(pack_heads, tied):
    layer, x = make("luna", causal=False, memory_tokens=5, pack_heads=pack_heads, tied=tied)
    G = pack_heads or HEADS
    p = layer.memory
    pack_key, key = (layer.pack_value, layer.value) if tied else (layer.pack_key, layer.key)

    def packed(m, g):
        return attend(head(layer.pack_query, p, g, G)[m], head(pack_key, x, g, G), head(layer.pack_value, x, g, G))

    pack = torch.stack([torch.cat([packed(m, g) for g in range(G)]) for m in range(5)])
    y, _, memory = layer.mix(x[None], None, None)

    def row(t, h):
        return attend(head(layer.query, x, h)[t], head(key, pack, h), head(layer.value, pack, h))

    assert_same_maths(y[0], from_heads(layer, row), "luna")
    total = pack + p
    centred = total - total.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_same_maths(memory[0], normed, "the memory handed on")


@pytest.mark.parametrize("tied", [True, False])
def test_causal_luna_accumulates(tied):
    layer, x = make("luna", memory_tokens=5, tied=tied)
    key = layer.value if tied else layer.key

    def f(a, b, z, t):
        """`(1/t) a_t sum_{j <= t} b_j^T z_j`, t from 0."""
        return a @ sum(torch.outer(b[j], z[j]) for j in range(t + 1)) / (t + 1)

    def row(t, h):
        q, k, v = (head(project, x, h) for project in (layer.query, key, layer.value))
        scores = head(layer.pack_value, x, h) @ head(layer.pack_query, layer.memory, h).T / math.sqrt(K)
        b = (1 + 2**scores).log2()
        return f(f(q[t] / math.sqrt(K), k, b, t).softmax(0), b, v, t)

    assert_same_maths(layer(x[None])[0][0], from_heads(layer, row), "causal luna")


FORMS = [
    ("linear", {}),
    ("linear", {"causal": False}),
    ("latte", {}),
    ("latte", {"causal": False}),
    ("elita", {}),
    ("performer", {}),
    ("performer", {"causal": False}),
    ("performer", {"kernel": "relu"}),
    ("performer", {"kernel": "relu", "causal": False}),
    ("linformer", {}),
    ("luna", {}),
    ("luna", {"causal": False}),
]


@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_slots_of_padding_hold_nothing(name, options):
    """Models compact rows once; in later layers their padded slots hold what the layers before made there."""
    layer, x = make(name, **options)
    lengths = torch.tensor([TOKENS, 4, 0])
    real = torch.arange(TOKENS) < lengths[:, None]
    results = []
    for seed in (1, 2):
        rubbish = 100 * torch.randn(3, TOKENS, DIM, generator=torch.Generator().manual_seed(seed)).double()
        rows = torch.where(real[..., None], x, rubbish).requires_grad_()
        y, state, _ = layer.mix(rows, None, lengths)
        assert y.isfinite().all()
        gradient = torch.autograd.grad(y[real].square().sum(), rows)[0]
        results.append([y[real], gradient, *(entry for entry in state.entries.values() if isinstance(entry, Tensor))])
    for one, other in zip(*results, strict=True):
        assert_exact(one, other)
    for b, length in enumerate(lengths.tolist()):
        assert_same_maths(y[b, :length], layer(x[None, :length])[0][0], f"row of {length} tokens")
