"""The delta scan: what only it promises (its equations: test_scan.py)."""

import re

import pytest
import torch

from subquad.ops import delta_scan, gated_scan
from subquad.ops._torch import delta as module
from subquad.testing import LOW_PRECISION, assert_exact, assert_in_budget, assert_same_maths
from tests.ops.cases import assert_all_in_budget, assert_all_same_maths, delta_by_token, differentiated, normal

BACKENDS = ("torch", "reference", "sequential")
forms = pytest.mark.parametrize("form", BACKENDS)


def unit(*shape, seed):
    x = normal(*shape, seed=seed)
    return x / x.norm(dim=-1, keepdim=True)


def test_the_delta_scan_by_hand():
    # S = 2, decayed to 1, predicts 3 for the key 3; a quarter of the error 7 - 3, times the key, is written.
    q, k, v, beta, log_f, before = (torch.full((1, 1, 1, 1), x).double() for x in (5, 3, 7, 0.25, 0, 2))
    out, state = delta_scan(q, k, v, beta, log_f - torch.tensor(2.0).log(), state=before, backend="reference")
    assert_same_maths(state.flatten(), torch.tensor([1 + 3 * 0.25 * 4], dtype=torch.float64))
    assert_same_maths(out, 5 * state)


@forms
def test_the_decay_comes_before_the_delta(form):
    q, k, v = unit(1, 1, 40, 4, seed=1), unit(1, 1, 40, 4, seed=2), normal(1, 1, 40, 3, seed=3)
    beta, log_f = normal(1, 1, 40, 1, seed=4).sigmoid(), -normal(1, 1, 40, 4, seed=5).abs()
    S = torch.zeros(4, 3, dtype=torch.float64)
    for t in range(40):
        k_t, b = k[0, 0, t, :, None], beta[0, 0, t]
        S = (torch.eye(4) - b * k_t @ k_t.mT) @ (log_f[0, 0, t, :, None].exp() * S) + b * k_t * v[0, 0, t]
    assert_same_maths(delta_scan(q, k, v, beta, log_f, backend=form).state[0, 0], S)


@forms
def test_orthogonal_keys_make_a_gated_scan(form):
    k = torch.eye(8, dtype=torch.float64).expand(1, 2, 8, 8)
    q, v, beta = normal(1, 2, 8, 8, seed=1), normal(1, 2, 8, 5, seed=2), normal(1, 2, 8, 1, seed=3).sigmoid()
    assert_same_maths(delta_scan(q, k, v, beta, None, backend=form).out, gated_scan(q, k, beta * v, None).out)


@forms
def test_a_key_that_is_written_again_is_overwritten(form):
    k = unit(1, 1, 1, 6, seed=1).expand(1, 1, 100, 6)
    v = normal(1, 1, 100, 3, seed=2)
    assert_same_maths(delta_scan(k, k, v, torch.ones_like(v[..., :1]), None, backend=form).out, v)


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_equal_keys_are_solved_by_substitution(beta, dtype):
    k = unit(1, 1, 1, 64, seed=1).expand(1, 1, 128, 64)
    inputs = [x.to(dtype) for x in (normal(1, 1, 128, 64, seed=2), k, normal(1, 1, 128, 64, seed=3))]
    inputs.append(torch.full_like(inputs[0][..., :1], beta))
    exact, plain = (differentiated(delta_by_token, x) for x in ([x.double() for x in inputs], inputs))
    actual = differentiated(lambda *x: delta_scan(*x, None)[:1], inputs)
    for results in (actual, plain, exact):
        del results[1]  # the queries' gradient: a sum of a chunk's u, where a token's state has one
    assert_all_in_budget(actual, plain, exact, dtype)


@pytest.mark.parametrize("decay", [None, 1e-7])
def test_nearly_equal_keys_lose_no_more_than_token_by_token(decay):
    """Keys alternate between two vectors 1e-4 apart, and b = 2: errors of the keys' products do not shrink."""
    T, K = 256, 64
    first, apart = unit(1, 2, 1, K, seed=1), unit(1, 2, 1, K, seed=2)
    second = first + 1e-4 * apart
    k = torch.cat([first, second / second.norm(dim=-1, keepdim=True)], 2).repeat(1, 1, T // 2, 1)
    q, v = normal(1, 2, T, K, seed=3) / K**0.5, normal(1, 2, T, K, seed=4)
    inputs = [q, k, v, torch.full_like(v[..., :1], 2.0)]
    log_f = None if decay is None else torch.full_like(v[..., :1], -decay)

    def outputs(dtype, backend):
        x = [None if x is None else x.to(dtype) for x in (*inputs, log_f)]
        return delta_scan(*x, backend=backend).out

    exact = outputs(torch.float64, "reference")
    assert_in_budget(outputs(torch.float32, "torch"), outputs(torch.float32, "reference"), exact, torch.float32)


@forms
@pytest.mark.parametrize("at", [0, 3, 20, 63, 64, 100])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_an_overflow_leaves_earlier_rows_their_bits(form, at, what):
    q, k, v = (normal(1, 2, 130, n, seed=n, dtype=torch.float32) for n in (8, 8, 5))
    k, beta = k / k.norm(dim=-1, keepdim=True), torch.ones_like(v[..., :1])
    before = delta_scan(q, k, v, beta, None, backend=form).out[:, :, :at]
    (k if what == "keys" else v)[:, :, at:] *= 1e38 if what == "keys" else 1e39
    out, state = delta_scan(q, k, v, beta, None, backend=form)
    assert_exact(out[:, :, :at], before)
    assert not state.isfinite().all()


def test_beta_of_another_shape_is_refused():
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=re.escape("beta must have shape (1, 2, 3, 1), got (1, 2, 3, 4)")):
        delta_scan(x, x, x, x, None)


# Planted bugs: each is caught by a comparison with the definition.

inverse, Decay = module._inverse, module.Decay


def neumann_series(A_MCC):
    """Sum `(-A)^n` by doubling: right in exact arithmetic, and A^64 is zero."""
    power = -A_MCC.double().tril(-1)
    total = torch.eye(power.shape[-1], dtype=power.dtype).expand_as(power)
    for _ in range(6):
        total, power = total + power @ total, power @ power
    return total


def times_in_float32(inverse_MCC, x_MCV, *, careful=False):
    return torch.bmm(inverse_MCC.to(x_MCV.dtype), x_MCV)


class DeltaBeforeDecay(Decay):
    def rows(self, q_NCK):
        return super().rows(q_NCK) / (1 if self.G is None else self.G.diff(dim=1, prepend=0 * self.G[:, :1]).exp())


class TriangleWithoutDecay(Decay):
    def scores(self, q_NCK, k_NCK):
        return torch.bmm(q_NCK, k_NCK.mT).tril_() if q_NCK is k_NCK else super().scores(q_NCK, k_NCK)


class TriangleWithoutGradient(Decay):
    def gradients(self, q_NCK, k_NCK, scores, grad, *states):
        return super().gradients(q_NCK, k_NCK, scores, grad * (q_NCK is not k_NCK), *states)


class DecayOfColumnsWithoutGradient(Decay):
    def gradients(self, *inputs):
        found = super().gradients(*inputs)
        return found if found.columns_MCF is None else found._replace(columns_MCF=0 * found.columns_MCF)


BUGS = {
    "transposed": ("_inverse", lambda A: inverse(A).mT),
    "inverse squared": ("_inverse", lambda A: inverse(A) @ inverse(A)),
    "no inverse": ("_inverse", lambda A: torch.eye(A.shape[-1]).to(A).expand_as(A).clone()),
    "delta before decay": ("Decay", DeltaBeforeDecay),
    "triangle without decay": ("Decay", TriangleWithoutDecay),
    "triangle without gradient": ("Decay", TriangleWithoutGradient),
    "decay without gradient": ("Decay", DecayOfColumnsWithoutGradient),
}


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_planted_bugs_are_caught(bug, monkeypatch):
    q, k, v = normal(1, 2, 70, 6, seed=1), unit(1, 2, 70, 6, seed=2), normal(1, 2, 70, 5, seed=3)
    inputs = [q, k, v, 2 * normal(1, 2, 70, 1, seed=4).sigmoid(), -normal(1, 2, 70, 1, seed=5).abs()]
    if bug is not None:
        monkeypatch.setattr(module, *BUGS[bug])
    results = [differentiated(lambda *x, f=form: delta_scan(*x, backend=f), inputs) for form in ("torch", "reference")]
    if bug is None:
        assert_all_same_maths(*results)
        return
    with pytest.raises(AssertionError):
        assert_all_same_maths(*results)


def test_a_series_for_the_triangle_is_caught(monkeypatch):
    monkeypatch.setattr(module, "_inverse", neumann_series)
    with pytest.raises(AssertionError, match="exceeds"):
        test_equal_keys_are_solved_by_substitution(2.0, torch.float32)


def test_keys_multiplied_in_float32_are_caught(monkeypatch):
    monkeypatch.setattr(module, "_wide", lambda q, _: q.dtype)
    with pytest.raises(AssertionError, match="exceeds"):
        test_nearly_equal_keys_lose_no_more_than_token_by_token(None)


def test_products_with_the_inverse_in_float32_are_caught(monkeypatch):
    monkeypatch.setattr(module, "_times", times_in_float32)
    with pytest.raises(AssertionError, match="exceeds"):
        test_nearly_equal_keys_lose_no_more_than_token_by_token(None)
