"""The running softmax apart from the laws of all scans (test_scan.py): its states, its logits, its logsumexp."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.ops import SoftmaxState, running_softmax
from subquad.ops import softmax as engine
from subquad.ops._torch import log_space_sums
from subquad.ops._torch import softmax as chunked
from subquad.ops._torch.log_space_sums import running_logsumexp_backward_op, running_logsumexp_op
from subquad.ops._torch.softmax import EMPTY, running_softmax_backward_op, running_softmax_op
from subquad.ops.softmax import gated_mean, running_logsumexp
from subquad.testing import LOW_PRECISION, assert_exact, assert_in_budget, assert_same_maths, mask_with
from tests.ops.cases import ALONE, assert_all_in_budget, assert_all_same_maths, differentiated, normal, thinned

B, H, L, V = 2, 2, 6, 5
BACKENDS = ("torch", "reference", "sequential")
backends = pytest.mark.parametrize("backend", BACKENDS)
latents = pytest.mark.parametrize("latents", [1, L])


def inputs_of(tokens, dtype=torch.float64, sharpness=3.0):
    """Return p(l | t), logits that reach about `sharpness`, values."""
    p = normal(B, H, tokens, L, seed=1).softmax(-1).to(dtype)
    logits = (normal(B, H, tokens, L, seed=2).clamp(-1, 1) * sharpness).to(dtype)
    return [p, logits, normal(B, H, tokens, V, seed=3, dtype=dtype)]


def softmax(p, logits, v, a=None, s=None, **options):
    out, state, lse = running_softmax(p, logits, v, state=None if a is None else (a, s), **options)
    return out, lse, *state


@backends
def test_the_running_softmax_by_hand(backend):
    p, logits, v = inputs_of(5)
    out, lse, a, s = softmax(p, logits, v, backend=backend)
    for t in range(5):
        w_BHSL = logits[:, :, : t + 1].softmax(2)
        mean_BHLV = torch.einsum("bhsl,bhsv->bhlv", w_BHSL, v[:, :, : t + 1])
        assert_same_maths(out[:, :, t], torch.einsum("bhl,bhlv->bhv", p[:, :, t], mean_BHLV))
        assert_same_maths(lse[:, :, t], logits[:, :, : t + 1].logsumexp(2))
    assert_same_maths(a, lse[:, :, -1])
    assert_same_maths(s, mean_BHLV)


@pytest.mark.parametrize("form", ["torch", "sequential"])
@pytest.mark.parametrize("which", range(4), ids=["out", "lse", "final lse", "final mean"])
def test_each_result_has_its_own_gradients(form, which):
    inputs = [*inputs_of(40), normal(B, H, L, seed=5), normal(B, H, L, V, seed=6)]
    actual, expected = (
        differentiated(lambda *x, name=name: softmax(*x, backend=name)[which : which + 1], inputs)
        for name in (form, "reference")
    )
    assert_all_same_maths(actual, expected)


@backends
@settings(max_examples=10)
@given(cut=st.integers(0, 40), sharpness=st.sampled_from([1.0, 1e4]))
def test_states_of_two_pieces_merge_into_the_state_of_both(backend, cut, sharpness):
    inputs = inputs_of(40, sharpness=sharpness)
    (a1, s1), (a2, s2) = (
        running_softmax(*(x[:, :, piece] for x in inputs), backend=backend).state
        for piece in (slice(None, cut), slice(cut, None))
    )
    a = torch.logaddexp(a1, a2)
    s = (a1 - a).exp()[..., None] * s1 + (a2 - a).exp()[..., None] * s2
    assert_all_same_maths(SoftmaxState(a, s), running_softmax(*inputs, backend=backend).state)


@backends
def test_before_the_first_real_token_there_is_nothing(backend):
    mask = torch.tensor([[False] * 5 + [True] * 4] * B)
    out, lse, *_ = softmax(*inputs_of(9), mask=mask, backend=backend)
    assert_exact(out[:, :, :5], torch.zeros_like(out[:, :, :5]))
    assert (lse[:, :, :5] <= EMPTY / 2).all()
    assert lse[:, :, 5:].isfinite().all()
    _, _, a, s = softmax(*inputs_of(9), mask=torch.zeros_like(mask), backend=backend)
    assert_exact(a, torch.full_like(a, EMPTY))
    assert_exact(s, torch.zeros_like(s))


RAMP = torch.linspace(-1e4, 1e4, 130)[:, None]
PEAK = torch.where(torch.arange(130) == 64, 1e4, -1e4)[:, None]
EXTREMES = {
    "30": lambda k: 10 * k,
    "10,000": lambda k: 3_333 * k,
    "rising": lambda k: RAMP.expand_as(k),
    "falling": lambda k: RAMP.flip(0).expand_as(k),
    "one peak": lambda k: PEAK.expand_as(k),
}


@thinned(2, dtype=LOW_PRECISION, case=EXTREMES, chunk_size=(None, 16))
def test_extreme_logits_are_finite_and_means_lie_within_the_values(dtype, case, chunk_size):
    p, k, v = inputs_of(130)
    p, k, v = (x.to(dtype) for x in (p, EXTREMES[case](k), v))
    results = differentiated(lambda *x: softmax(*x, chunk_size=chunk_size), [p, k, v])
    assert all(x.isfinite().all() for x in results)
    bound = v.abs().amax() * p.sum(-1, keepdim=True).amax()
    assert (results[0].abs() <= bound * (1 + torch.finfo(dtype).eps)).all()


# The fast form of a chunk, and the safe form of rows whose logits leap.


def leaps(at, latents):
    """Return p, logits that leap at one token and stay up, and values; and the same without the leap."""
    p = normal(2, H, 50, latents, seed=1).softmax(-1).float()
    logits, v = normal(2, H, 50, latents, seed=2).float(), normal(2, H, 50, V, seed=3).float()
    leaping = logits.clone()
    leaping[0, 0, at:, 0] += 200
    leaping[1, :, at + 1 :] += 1e4
    return (p, leaping, v), (p, logits, v)


@latents
@pytest.mark.parametrize("at", [3, 15, 16, 40])
def test_a_leap_of_the_logits_changes_no_bit_before_it_and_stays_in_budget(latents, at):
    leaping, calm = leaps(at, latents)
    outputs = [running_softmax(*inputs, chunk_size=16).out for inputs in (leaping, calm)]
    assert_exact(outputs[0][0, 0, :at], outputs[1][0, 0, :at], "before the leap")
    assert_exact(outputs[0][1, :, : at + 1], outputs[1][1, :, : at + 1], "before the leap")
    assert_exact(outputs[0][0, 1:], outputs[1][0, 1:], "heads without a leap")
    assert not torch.equal(outputs[0][0, 0, at:], outputs[1][0, 0, at:])

    def run(backend, dtype):
        def f(*tensors):
            out, lse, _, mean = softmax(*tensors, backend=backend, chunk_size=16)
            return out, lse, mean

        return differentiated(f, [x.to(dtype) for x in leaping])

    plain, exact = run("reference", torch.float32), run("reference", torch.float64)
    assert_all_in_budget(run("torch", torch.float32), plain, exact, torch.float32)


@latents
def test_a_leap_in_another_head_changes_no_bit_after_a_leap(latents):
    (p, logits, v), _ = leaps(20, latents)
    other = logits.clone()
    other[:, 1:, 25:] += 1e4
    other[0, 0, 30:] += 1e4
    outputs = [running_softmax(p, k, v, chunk_size=16).out for k in (logits, other)]
    assert_exact(outputs[0][0, 0, :30], outputs[1][0, 0, :30], "rows that had leapt before")
    assert_exact(outputs[0][:, 1:, :25], outputs[1][:, 1:, :25], "rows before the other leap")


def test_only_rows_that_need_it_take_the_safe_form(monkeypatch):
    taken, safe = [], chunked.safe_forward
    monkeypatch.setattr(chunked, "safe_forward", lambda p, *rest: taken.append(tuple(p.shape)) or safe(p, *rest))
    leaping, calm = leaps(20, L)
    running_softmax(*calm, chunk_size=16)
    assert taken == []
    running_softmax(*leaping, chunk_size=16)
    # From the chunk of the leap to the end of its piece; of all heads, so that shapes depend on no logits.
    assert taken == [(2 * H, 16, L)] * 2


def test_logits_of_minus_infinity_weigh_nothing():
    p, logits, v = inputs_of(20)
    logits[:, :, :3] = -torch.inf
    out = running_softmax(p, logits, v, chunk_size=8).out
    assert_exact(out[:, :, :3], torch.zeros_like(out[:, :, :3]), "before any token")
    assert_same_maths(out[:, :, 3:], running_softmax(p[:, :, 3:], logits[:, :, 3:], v[:, :, 3:]).out)


def test_the_logsumexp_is_made_when_asked_for(monkeypatch):
    made, make = [], engine.running_logsumexp
    monkeypatch.setattr(engine, "running_logsumexp", lambda *x, **y: made.append(1) or make(*x, **y))
    p, logits, v = inputs_of(20)
    y = running_softmax(p, logits, v)
    assert made == []
    assert_same_maths(y.lse, torch.logcumsumexp(logits, 2))
    assert_exact(y[2], y.lse)
    assert_exact(y[0], y.out)
    assert made == [1, 1, 1]
    with pytest.raises(IndexError, match="tuple index out of range"):
        y[3]


@latents
def test_the_running_logsumexp_in_pieces_of_any_size(latents, monkeypatch):
    inputs = normal(B, H, 70, latents) * 30, normal(B, H, latents, seed=1)

    def plain(k, a):
        return (torch.cat([a[:, :, None], k], 2).logcumsumexp(2)[:, :, 1:],)

    def actual():
        return differentiated(lambda k, a: (running_logsumexp(k, state=a),), inputs)

    expected = differentiated(plain, inputs)
    assert_all_same_maths(actual(), expected)
    monkeypatch.setattr(log_space_sums, "LEAST_ROWS", 8)
    monkeypatch.setattr(log_space_sums, "PIECE_ENTRIES", 0)
    assert_all_same_maths(actual(), expected, "pieces")


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_a_token_may_add_its_own_value(backend):
    mask = mask_with([(2, 15, 3), (0, 20, 0)])
    dtype = torch.float32 if backend == "triton" else torch.float64
    inputs = [x.to(dtype) for x in (*inputs_of(20), normal(B, H, 20, 1, seed=7))]
    inputs[2][0, :, :2] = torch.nan
    inputs[3][0, :, 18:] = torch.nan

    def expected(p, logits, v, own):
        out = running_softmax(p, logits, v, mask=mask, backend="reference").out
        return (out + torch.where(mask[:, None, :, None], own, 0.0) * v.nan_to_num(0.0),)

    def run(p, logits, v, own):
        return (running_softmax(p, logits, v, own=own, mask=mask, backend=backend, chunk_size=8).out,)

    actual, exact = differentiated(run, inputs), differentiated(expected, [x.double() for x in inputs])
    if backend != "triton":
        assert_all_same_maths(actual, exact)
    else:
        plain = differentiated(expected, inputs)
        for n in (0, 1, 3, 4):  # tests/ops/triton has the logits' gradient
            assert_in_budget(actual[n], plain[n], exact[n], dtype, f"result {n}")
        with pytest.raises(ValueError, match="'triton' of running_softmax computes in float32, bfloat16, float16"):
            run(*inputs[:3], inputs[3].double())


@pytest.mark.parametrize("with_own", [False, True])
def test_the_operators_keep_torchs_rules(with_own):
    p, k, v = (x.flatten(0, 1) for x in inputs_of(20))
    own = normal(B * H, 20, 1) if with_own else None
    a, s = normal(B * H, L), normal(B * H, L, V)
    if with_own:
        leaves = [x.clone().requires_grad_() for x in (p, k, v, own, a, s)]
        torch.library.opcheck(running_softmax_op, (*leaves, 8, True))
    torch.library.opcheck(running_softmax_op, (p, k, v, own, a, s, 8, True), test_utils=ALONE)
    out, _, *kept = running_softmax_op(p, k, v, own, a, s, 8, True)
    arguments = (torch.ones_like(out), None, None, p, k, v, own, *kept, 8)
    torch.library.opcheck(running_softmax_backward_op, arguments, test_utils=ALONE)
    if with_own:
        torch.library.opcheck(running_logsumexp_op, (k.clone().requires_grad_(), a.clone().requires_grad_()))
        m, z = running_logsumexp_op(k, a)
        torch.library.opcheck(running_logsumexp_backward_op, (torch.ones_like(z), k, a, m), test_utils=ALONE)


X = torch.ones(B, H, 5, L)
ERRORS = {
    "ndim": ({"p": X[0]}, r"p must have shape \[B, H, T, channels\]"),
    "tokens": ({"logits": X[:1]}, "logits must agree with p in B, H and T"),
    "latents": ({"logits": X[..., :3]}, "p and logits must have the same latents, got 6 and 3"),
    "chunk": ({"chunk_size": -1}, "chunk_size must be at least 1, got -1"),
    "state": ({"state": (X[:, :, 0], X[:, :, :1].mT)},
              r"state must have shapes \(2, 2, 6\) and \(2, 2, 6, 6\), got \(2, 2, 6\) and \(2, 2, 6, 1\)"),
    "own": ({"own": X}, r"own must have shape \(2, 2, 5, 1\), got \(2, 2, 5, 6\)"),
}  # fmt: skip
TYPE_ERRORS = {
    "dtype": ({"logits": X.int()}, r"logits must be floating point, got torch\.int32"),
    "mask": ({"mask": X[:, 0, :, 0]}, "mask must be a bool tensor"),
}


@pytest.mark.parametrize("case", [*ERRORS, *TYPE_ERRORS])
def test_inputs_that_do_not_fit_are_refused(case):
    changed, match = (ERRORS | TYPE_ERRORS)[case]
    options = {"p": X, "logits": X, "v": X} | changed
    inputs = [options.pop(name) for name in ("p", "logits", "v")]
    with pytest.raises(ValueError if case in ERRORS else TypeError, match=match):
        running_softmax(*inputs, **options)


GATED_ERRORS = {
    "gate": ({"gate": X}, r"gate must have shape \(2, 2, 5, 1\), got \(2, 2, 5, 6\)"),
    "logits": ({"logits": X}, r"logits must have shape \(2, 2, 5, 1\), got \(2, 2, 5, 6\)"),
    "state": ({"state": (X[:, :, 0], X[:, :, :1])},
              r"state must have shapes \(2, 2, 1\) and \(2, 2, 1, 6\), got \(2, 2, 6\) and \(2, 2, 1, 6\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", GATED_ERRORS)
def test_inputs_of_a_gated_mean_that_do_not_fit_are_refused(case):
    changed, match = GATED_ERRORS[case]
    options = {"gate": X[..., :1], "logits": X[..., :1], "v": X} | changed
    inputs = [options.pop(name) for name in ("gate", "logits", "v")]
    with pytest.raises(ValueError, match=match):
        gated_mean(*inputs, backend="triton", **options)


def test_a_logsumexp_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"state must have shape \(2, 2, 6\), got \(2, 2, 5, 6\)"):
        running_logsumexp(X, state=X)
