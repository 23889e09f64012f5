"""Each mechanism against literal loops over its paper's equations, which share no code with the library."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from subquad.attention import Attention, build
from subquad.ops.padding import Lengths
from subquad.testing import assert_exact, assert_same_maths

DIM, HEADS, HALF, TOKENS = 12, 3, 4, 19
K = DIM // HEADS
both_forms = pytest.mark.parametrize("causal", [True, False])


def make(name: str, **options: object) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    layer = build(name, dim=DIM, num_heads=HEADS, bias=True, **options).double()
    for module in layer.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return layer, torch.randn(TOKENS, DIM, dtype=torch.float64)


def head(project: nn.Module, x_TD: Tensor, h: int, heads: int = HEADS) -> Tensor:
    width = DIM // heads
    return project(x_TD)[:, h * width : (h + 1) * width]


def last(t: int, causal: bool) -> int:
    return t + 1 if causal else TOKENS


def attend(q_K: Tensor, k_SK: Tensor, v_SK: Tensor) -> Tensor:
    weights = (k_SK @ q_K / math.sqrt(len(q_K))).exp()
    return weights @ v_SK / weights.sum()


def softmax_over(
    seen: slice | list[int] | Tensor, layer: Attention, x: Tensor, t: int, h: int, own: str = ""
) -> Tensor:
    """Return a head's output at token t, which sees `seen`; `own` begins the names of other projections."""
    q, k, v = (head(getattr(layer, f"{own}{name}"), x, h) for name in ("query", "key", "value"))
    return attend(q[t], k[seen], v[seen])


def assert_heads(layer: Attention, x: Tensor, row: Callable[[int, int], Tensor], actual: Tensor | None = None) -> None:
    """Compare the outputs with `row(t, h)`, the output of a head at a token."""
    first_out = getattr(layer, "first_out", layer.out)
    outs = [first_out if t < HALF else layer.out for t in range(len(x))]
    rows = [out(torch.cat([row(t, h) for h in range(HEADS)])) for t, out in enumerate(outs)]
    assert_same_maths(layer(x[None])[0][0] if actual is None else actual, torch.stack(rows), layer.name)


def test_llp_is_equations_22_to_29() -> None:
    apart = {"shared_kv": False, "key_norm": False, "split_output": False}
    layer, x = make("llp_printed", segment=2 * HALF, first_block_projections=True, **apart)

    def row(t, h):
        seen = slice(max(0, (t // HALF - 1) * HALF), t + 1)
        return softmax_over(seen, layer, x, t, h, "first_" if t < HALF else "")

    assert_heads(layer, x, row)


def test_llp_is_the_pseudocode_of_figure_5() -> None:
    layer, x = make("llp_printed", segment=2 * HALF)

    def row(t, h):
        block = t // HALF
        kv = head(layer.key, x, h)[max(0, (block - 1) * HALF) : t + 1]
        return attend(head(layer.query, x, h)[t], kv if block == 0 else layer.norm(kv), kv)

    assert_heads(layer, x, row)


@both_forms
def test_latte_is_equations_5_to_21(causal: bool) -> None:
    layer, x = make("latte", num_latents=2 * HEADS, causal=causal)
    q, k = (project(x).view(TOKENS, HEADS, 2) for project in (layer.query, layer.key))

    def row(t, h):
        v, p, end = head(layer.value, x, h), q[t, h].softmax(0), last(t, causal)
        return sum(p[a] * (k[:end, h, a].softmax(0) @ v[:end]) for a in range(2))

    assert_heads(layer, x, row)


def test_latte_macchiato_is_one_softmax_over_the_window_and_the_latents() -> None:
    layer, x = make("latte_macchiato", num_latents=2 * HEADS, width=3, rope=False)
    q, k = layer.latent_query(x).view(TOKENS, HEADS, 3), layer.latent_key(x).view(TOKENS, HEADS, 2)

    def row(t, h):
        v, p, near = head(layer.value, x, h), q[t, h].softmax(0), slice(max(0, t - 2), t + 1)
        window = softmax_over(near, layer, x, t, h)
        return p[0] * window + sum(p[a + 1] * (k[: t + 1, h, a].softmax(0) @ v[: t + 1]) for a in range(2))

    assert_heads(layer, x, row)


def performer_features(layer: Attention, y_TK: Tensor) -> Tensor:
    y_TK = y_TK * K**-0.25
    along = y_TK @ layer.directions.T
    if layer.config.kernel == "relu":
        return along.relu() + 1e-3
    return (along - y_TK.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(7)


FEATURES = {
    "linear": ({}, lambda layer, y: nn.functional.elu(y) + 1, 1e-6),
    "performer": ({"kernel": "softmax", "features": 7}, performer_features, 0.0),
    "performer relu": ({"kernel": "relu", "features": 7}, performer_features, 0.0),
}


@both_forms
@pytest.mark.parametrize("case", FEATURES)
def test_linear_attention_is_the_normalised_sum_of_features(case: str, causal: bool) -> None:
    options, phi, eps = FEATURES[case]
    layer, x = make(case.partition(" ")[0], causal=causal, **options)

    def row(t, h):
        q, k = (phi(layer, head(project, x, h)) for project in (layer.query, layer.key))
        w = k[: last(t, causal)] @ q[t]
        return w @ head(layer.value, x, h)[: last(t, causal)] / (w.sum() + eps)

    assert_heads(layer, x, row)


@pytest.mark.parametrize("options", [{}, {"time": "i/(N-1)"}, {"query_term": False}, {"positions": False}], ids=str)
def test_elita_is_attention2(options: dict[str, object]) -> None:
    layer, x = make("elita", horizon=6, position_width=5, **options)  # tokens beyond the horizon are extrapolated
    nth = 5 if "time" in options else 6
    if layer.config.positions:
        for parameter in (layer.frequency, layer.phase, layer.amplitude):
            nn.init.normal_(parameter)

    def term(which, i, h):
        if not layer.config.positions:
            return torch.tensor(0.0)
        return torch.sin(layer.frequency[which, h] * i / nth + layer.phase[which, h]) @ layer.amplitude[h]

    def row(t, h):
        v, k1, k2 = head(layer.value, x, h), layer.key(x)[:, h], layer.self_key(x)[:, h]
        k3 = layer.query(x)[:, h] if layer.config.query_term else torch.zeros(TOKENS)
        past, own = (term(1, t, h) + k3[t]).exp(), k2[t].exp()
        w = (k1[: t + 1] + torch.stack([term(0, j, h) for j in range(t + 1)])).exp()
        return (own * v[t] + past * (w @ v[: t + 1])) / (own + past * w.sum())

    assert_heads(layer, x, row)


@pytest.mark.parametrize("positions", [True, False])
def test_elita_on_the_diagonal_is_the_intuition(positions: bool) -> None:
    layer, x = make("elita", horizon=6, position_width=5, self_term="diagonal", positions=positions)
    if positions:
        for parameter in (layer.frequency, layer.phase, layer.amplitude):
            nn.init.normal_(parameter)

    def row(t, h):
        v, k1, k2 = head(layer.value, x, h), layer.key(x)[:, h], layer.self_key(x)[:, h]
        logits = k1[: t + 1] + 1.7 * t  # whatever the reading token adds to its whole row cancels
        for s in range(t + 1 if positions else 0):
            logits[s] += torch.sin(layer.frequency[0, h] * s / 6 + layer.phase[0, h]) @ layer.amplitude[h]
        logits[t] += k2[t]
        return logits.softmax(0) @ v[: t + 1]

    assert_heads(layer, x, row)


@pytest.mark.parametrize("sharing", ["none", "heads", "key_value"])
def test_linformer_projects_keys_and_values_over_the_sequence(sharing: str) -> None:
    layer, x = make("linformer", sharing=sharing, max_tokens=TOKENS + 3, projected=4)

    def row(t, h):
        e = layer.project_keys[h if sharing == "none" else 0]
        f = e if sharing == "key_value" else layer.project_values[h if sharing == "none" else 0]
        q, k, v = (head(project, x, h) for project in (layer.query, layer.key, layer.value))
        return attend(q[t], e[:, :TOKENS] @ k, f[:, :TOKENS] @ v)

    assert_heads(layer, x, row)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pack_heads", [2, None])
def test_luna_packs_and_unpacks(pack_heads: int | None, tied: bool) -> None:
    layer, x = make("luna", causal=False, memory_tokens=5, pack_heads=pack_heads, tied=tied)
    G = pack_heads or HEADS
    p = layer.memory
    pack_key, key = (layer.pack_value, layer.value) if tied else (layer.pack_key, layer.key)

    def packed(m, g):
        return attend(head(layer.pack_query, p, g, G)[m], head(pack_key, x, g, G), head(layer.pack_value, x, g, G))

    pack = torch.stack([torch.cat([packed(m, g) for g in range(G)]) for m in range(5)])
    y, state = layer(x[None])

    def row(t, h):
        return attend(head(layer.query, x, h)[t], head(key, pack, h), head(layer.value, pack, h))

    assert_heads(layer, x, row, y[0])
    total = pack + p
    centred = total - total.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_same_maths(state["handed"][0], normed, "the memory handed on")


@pytest.mark.parametrize("tied", [True, False])
def test_causal_luna_accumulates(tied: bool) -> None:
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

    assert_heads(layer, x, row)


def shifted(t: int, h: int, size: int) -> int:
    """Return token t's group of `size` tokens; the last of three heads has groups moved by half a group."""
    return (t + size // 2) // size if h == 2 else t // size


BOTH = {"causal": False}
SEEN = {
    "full": ({}, lambda t, s, h: s <= t),
    "full both ways": (BOTH, lambda t, s, h: True),
    "window": ({"width": 5}, lambda t, s, h: t - 5 < s <= t),
    "window both ways": ({"width": 5, **BOTH}, lambda t, s, h: abs(s - t) <= 2),
    "dilated": ({"width": 3, "dilation": 4}, lambda t, s, h: s in (t, t - 4, t - 8)),
    "dilated both ways": ({"width": 3, "dilation": 4, **BOTH}, lambda t, s, h: s in (t, t - 4, t + 4)),
    "shifted": ({"group": 8}, lambda t, s, h: s <= t and shifted(s, h, 8) == shifted(t, h, 8)),
    "llp of shifted heads": ({"segment": 8, "shifted_heads": True},
                             lambda t, s, h: s <= t and shifted(s, h, 4) >= shifted(t, h, 4) - 1),
    "llp both ways": ({"segment": 8, **BOTH}, lambda t, s, h: abs(s // 4 - t // 4) <= 1),
    "strided": ({"stride": 4}, lambda t, s, h: s <= t and ((t - s) % 4 == 0 if h == 2 else t - s <= 4)),
    "strided fixed": ({"stride": 4, "kind": "fixed", "columns": 2},
                      lambda t, s, h: s <= t and (s % 4 >= 2 if h == 2 else s // 4 == t // 4)),
}  # fmt: skip


@pytest.mark.parametrize("case", SEEN)
def test_softmax_over_what_a_token_sees(case: str) -> None:
    options, sees = SEEN[case]
    layer, x = make(case.partition(" ")[0], **options)

    def row(t, h):
        seen = [s for s in range(TOKENS) if sees(t, s, h)]
        return softmax_over(seen, layer, x, t, h) if seen else torch.zeros(K, dtype=torch.float64)

    assert_heads(layer, x, row)


def test_shifted_as_published_is_a_roll_and_leaks() -> None:
    layer, x = make("shifted", group=8, wrap=True)
    x = x[:16]
    rolled = [*range(12, 16), *range(12)]  # places of tokens 0 to 15 in the rolled order of the last head

    def row(t, h):
        place = rolled if h == 2 else range(16)
        seen = [s for s in range(16) if place[s] // 8 == place[t] // 8 and place[s] <= place[t]]
        return softmax_over(seen, layer, x, t, h)

    assert_heads(layer, x, row)
    changed = x.clone()
    changed[15] += 1
    moved = (layer(changed[None])[0] - layer(x[None])[0])[0].abs().sum(-1)
    assert (moved[:4] > 0).all(), "the first half group reads the last token"
    assert (moved[4:15] == 0).all()


@both_forms
def test_longformer_is_a_window_and_global_tokens_with_projections_of_their_own(causal: bool) -> None:
    layer, x = make("longformer", width=3, num_global=2, causal=causal)

    def row(t, h):
        near = range(t - 2, t + 1) if causal else range(t - 1, t + 2)
        seen = [s for s in range(last(t, causal)) if t < 2 or s < 2 or s in near]
        return softmax_over(seen, layer, x, t, h, "global_" if t < 2 else "")

    assert_heads(layer, x, row)


@both_forms
def test_bigbird_is_softmax_over_distinct_blocks(causal: bool) -> None:
    layer, x = make("bigbird", block=2, back=1, num_global=1, num_random=2, causal=causal, seed=1)
    w_TS = layer.weights(x[None])[0, 0]
    blocks = (TOKENS + 1) // 2
    for t in range(TOKENS):
        block = t // 2
        own = {b for b in (block - 1, block, block + 1) if 0 <= b < blocks and not (causal and b > block)} | {0}
        seen = w_TS[t].nonzero()[:, 0].tolist()
        there = {s // 2 for s in seen}
        candidates = [b for b in range(1, blocks) if b not in own and not (causal and b > block)]
        if not causal and block == 0:
            assert seen == [*range(TOKENS)], "a global row"
        else:
            assert own <= there
            assert len(there - own) == min(2, len(candidates))
            assert seen == [s for s in range(last(t, causal)) if s // 2 in there]
    assert_heads(layer, x, lambda t, h: softmax_over(w_TS[t] > 0, layer, x, t, h))


FORMS = [
    *((name, {"causal": causal}) for name in ("linear", "latte", "performer", "luna") for causal in (True, False)),
    *(("performer", {"kernel": "relu", "causal": causal}) for causal in (True, False)),
    *(("elita", {"self_term": term}) for term in ("slot", "diagonal")),
    ("linformer", {}),
]


@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_slots_of_padding_hold_nothing(name: str, options: dict[str, object]) -> None:
    """Models compact rows once, so padded slots of later layers hold what earlier layers left there, not zeros."""
    layer, x = make(name, **options)
    lengths = torch.tensor([TOKENS, 4, 0])
    real = torch.arange(TOKENS) < lengths[:, None]
    results = []
    for seed in (1, 2):
        rubbish = 1e6 * torch.randn(3, TOKENS, DIM, generator=torch.Generator().manual_seed(seed)).double()
        rows = torch.where(real[..., None], x, rubbish).requires_grad_()
        y, state = layer(rows, mask=Lengths(lengths))
        assert y.isfinite().all()
        gradient = torch.autograd.grad(y[real].square().sum(), rows)[0]
        results.append([y[real], gradient, *(entry for entry in state.entries.values() if isinstance(entry, Tensor))])
    for one, other in zip(*results, strict=True):
        assert_exact(one, other)
    for b, length in enumerate(lengths.tolist()):
        assert_same_maths(y[b, :length], layer(x[None, :length])[0][0], f"row of {length} tokens")
