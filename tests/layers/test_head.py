import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from subquad.layers.criterion import chunked_cross_entropy
from subquad.layers.head import Lookup
from subquad.ops import loss
from subquad.testing import assert_in_budget, assert_same_maths
from subquad.testing.tools import largest_allocation

N, D, V, R = 23, 6, 11, 17


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def a_lookup(residual=True, dtype=torch.float64):
    lookup = Lookup(V, R, residual=residual).to(dtype)
    with torch.no_grad():
        lookup.up.weight.copy_(random(R, V, seed=3, dtype=dtype))
        lookup.down.weight.copy_(random(V, R, seed=4, dtype=dtype))
    return lookup


def some_labels(tokens=N):
    labels = torch.arange(tokens) * 5 % V
    labels[2::7] = -100
    return labels


@pytest.mark.parametrize("residual", [True, False])
def test_the_lookup_is_its_equation(residual):
    lookup, logits = a_lookup(residual), random(2, 3, V)
    expected = logits.clone() if residual else torch.zeros_like(logits)
    for r in range(R):
        score = logits @ lookup.up.weight[r]
        expected += (score * score.sigmoid())[..., None] * lookup.down.weight[:, r]
    assert_same_maths(lookup(logits), expected)
    assert not lookup(torch.zeros(1, V, dtype=torch.float64)).any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@given(tokens=st.integers(0, N), entries=st.integers(1, 2 * N * R))
def test_chunks_are_the_plain_cross_entropy_with_every_gradient(reduction, tokens, entries):
    lookup, labels, results = a_lookup(), some_labels(tokens), []
    for chunked in (True, False):
        h, weight = random(tokens, D).requires_grad_(), random(V, D, seed=1).requires_grad_()
        leaves = [h, weight, *lookup.parameters()]

        def logits_of(h_ND, weight=weight):
            return lookup(F.linear(h_ND, weight))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss, "CHUNK_ENTRIES", entries)
            if chunked:
                nats = chunked_cross_entropy(logits_of, h, labels, width=R, reduction=reduction)
            else:
                nats = F.cross_entropy(logits_of(h), labels, reduction="none")
                if reduction != "none":
                    nats = nats.sum() / (max(1, (labels != -100).sum()) if reduction == "mean" else 1)
            results.append([nats, *torch.autograd.grad((nats * random(*nats.shape, seed=2)).sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert_same_maths(actual, expected)


def test_another_ignore_index_and_int32_labels():
    h, weight, labels = random(N, D), random(V, D, seed=1), (torch.arange(N) % V).int()
    actual = chunked_cross_entropy(lambda h: F.linear(h, weight), h, labels, width=V, ignore_index=3)
    assert_same_maths(actual, F.cross_entropy(F.linear(h, weight), labels.long(), ignore_index=3))


def test_the_logits_of_all_tokens_are_never_held(monkeypatch):
    tokens, entries = 512, 64 * R
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", entries)
    lookup = a_lookup(dtype=torch.float32)
    h, weight = (random(*shape, dtype=torch.float32).requires_grad_() for shape in ((tokens, D), (V, D)))

    def run():
        nats = chunked_cross_entropy(lambda h: lookup(F.linear(h, weight)), h, some_labels(tokens), width=R)
        nats.backward()

    assert largest_allocation(run) <= 4 * max(entries, tokens * D)
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", tokens * R)
    assert largest_allocation(run) >= 4 * tokens * R


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_float32(dtype, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", 5 * R)
    h, weight = random(N, D, dtype=dtype), random(V, D, seed=1, dtype=dtype)
    lookup, labels = a_lookup(dtype=dtype), some_labels()
    actual = chunked_cross_entropy(lambda h: lookup(F.linear(h, weight)), h, labels, width=R)
    assert actual.dtype == torch.float32
    plain = F.cross_entropy(lookup(F.linear(h, weight)).float(), labels)
    exact = F.cross_entropy(lookup.double()(F.linear(h.double(), weight.double())), labels)
    assert_in_budget(actual, plain, exact, dtype)


@pytest.mark.parametrize(("h", "options", "message"), [
    (random(N + 1, D), {}, r"h \[N, D\] and labels \[N\] must agree, got \(24, 6\) and \(23,\)"),
    (random(1, N, D), {}, r"must agree, got \(1, 23, 6\)"),
    (random(N, D), {"reduction": "avg"}, "unknown reduction 'avg'; valid: mean, none, sum"),
    (random(N, D), {"width": 0}, r"width must be at least 1 \(channels of the widest tensor.*\), got 0"),
])  # fmt: skip
def test_bad_input_is_named(h, options, message):
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(lambda h: h, h, some_labels(), **{"width": D, **options})
