"""Derivatives that custom operators lack: by the definition if no backend is asked for, else refused, never zero."""

import pytest
import torch
from torch.autograd import forward_ad

from subquad.attention import build
from subquad.ops import block_attention, delta_scan, gated_scan, loss, running_softmax
from subquad.ops.backends import use_backend
from subquad.ops.patterns import Causal
from subquad.ops.softmax import gated_mean, running_logsumexp
from subquad.testing import assert_same_maths
from subquad.tracing import has_values, saves

torch.manual_seed(0)
K = torch.rand(1, 2, 9, 4, dtype=torch.double)
ONE = K[..., :1]
ENGINES = {
    "block_attention": lambda v, **options: block_attention(K, K, v, Causal(), **options),
    "delta_scan": lambda v, **options: delta_scan(K, K, v, ONE, None, **options).out,
    "gated_mean": lambda v, **options: gated_mean(ONE, ONE, v, **options).out,
    "gated_scan": lambda v, **options: gated_scan(K, K, v, None, **options).out,
    "gated_scan of values": lambda v, **options: gated_scan(K, K, v, None, log_g=-K, **options).out,
    "running_softmax": lambda v, **options: running_softmax(K.softmax(-1), K, v, **options).out,
}
"""The engines as functions of the values, in which they are linear."""
STATES = {
    "delta_scan": lambda s: delta_scan(K, K, K, ONE, None, state=s).out,
    "gated_scan": lambda s: gated_scan(K, K, K, None, state=s).out,
    "running_softmax": lambda s: running_softmax(K.softmax(-1), K, K, state=(K[:, :, 0], s)).out,
}
V, T = torch.randn(2, *K.shape, dtype=torch.double)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tangent_passes_every_engine(engine):
    call = ENGINES[engine]
    assert_same_maths(torch.func.jvp(call, (V,), (T,))[1], call(T), "jvp")
    compiled = torch.compile(call, backend="eager")
    assert_same_maths(torch.func.jvp(compiled, (V,), (T,))[1], call(T), "compiled")
    compiled(V)
    with torch.no_grad(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(compiled(forward_ad.make_dual(V, T))).tangent
        assert_same_maths(tangent, call(T), "compiled before")
        assert_same_maths(forward_ad.unpack_dual(call(forward_ad.make_dual(V, T))).tangent, call(T), "dual")
        assert forward_ad.unpack_dual(call(V)).tangent is None


@pytest.mark.parametrize("engine", STATES)
def test_a_tangent_of_the_state_counts(engine):
    call, (s, t) = STATES[engine], torch.randn(2, 1, 2, 4, 4, dtype=torch.double)
    expected = call(s + t) - call(s)  # outputs are an affine function of the state
    assert_same_maths(torch.func.jvp(call, (s,), (t,))[1], expected)


@pytest.mark.parametrize("backend", ["torch", "sequential"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_backend_that_is_asked_for_is_refused(engine, backend):
    match = f"backend '{backend}' of {engine.split()[0]} has no forward-mode derivative"
    with pytest.raises(NotImplementedError, match=match):
        torch.func.jvp(lambda v: ENGINES[engine](v, backend=backend), (V,), (T,))
    with use_backend(backend), pytest.raises(NotImplementedError, match=match):
        torch.func.grad(lambda v: ENGINES[engine](v).sum())(V)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tangent_of_the_incoming_gradient_is_refused(engine):
    v = V.clone().requires_grad_()
    y = ENGINES[engine](v)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="the backward pass of subquad's operators has no forward-mode"),
    ):
        torch.autograd.grad(y, v, forward_ad.make_dual(V, T))


@pytest.mark.parametrize("engine", ["gated_scan", "gated_scan of values", "running_softmax"])
def test_a_compiled_map_has_a_backward_pass(engine):
    v = torch.stack([V, T]).requires_grad_()
    mapped = torch.compile(torch.func.vmap(ENGINES[engine]), backend="aot_eager")
    (found,) = torch.autograd.grad(mapped(v).square().sum(), v)
    (expected,) = torch.autograd.grad(sum(ENGINES[engine](x).square().sum() for x in v), v)
    assert_same_maths(found, expected)


def test_documents_in_a_transform():
    layer = build("gla", dim=8, num_heads=2).double()
    x, t = torch.randn(2, 2, 6, 8, dtype=torch.double)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
    tangent = torch.func.jvp(lambda x: layer(x, doc_ids=ids)[0], (x,), (t,))[1]
    with use_backend("reference"):
        expected = torch.autograd.functional.jvp(lambda x: layer(x, doc_ids=ids)[0], x, t)[1]
    assert_same_maths(tangent, expected)
    with pytest.raises(ValueError, match=r"torch.func.vmap can't map over doc_ids"):
        torch.func.vmap(lambda ids: layer(x[:1], doc_ids=ids[None])[0])(ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_by_function_are_those_of_backward(engine):
    v = V.clone().requires_grad_()
    (expected,) = torch.autograd.grad(ENGINES[engine](v).square().sum(), v)
    assert_same_maths(torch.func.grad(lambda v: ENGINES[engine](v).square().sum())(V), expected)


def test_the_running_logsumexp_and_the_loss_in_chunks_pass_tangents(monkeypatch):
    k, t = K.clone().requires_grad_(), T
    (back,) = torch.autograd.grad(running_logsumexp(k), k, V)
    tangent = torch.func.jvp(running_logsumexp, (K,), (t,))[1]
    assert_same_maths((tangent * V).sum(), (back * t).sum(), "logsumexp")
    h, weight, labels = V[0, 0], T[0, 0, :5], torch.arange(9) % 5
    small = torch.func.jvp(lambda h: loss.linear_cross_entropy(h, weight, labels), (h,), (h,))[1]
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", 7)
    chunks = torch.func.jvp(lambda h: loss.linear_cross_entropy(h, weight, labels), (h,), (h,))[1]
    assert_same_maths(chunks, small, "loss")
    assert small != 0


def test_what_a_call_may_know():
    asked = V.clone().requires_grad_()
    assert saves(asked, None)
    assert not saves(V, None)
    with torch.no_grad():
        assert not saves(asked)
    inside = []
    torch.func.vmap(lambda v: inside.append((saves(v), has_values(v))) or v)(V)
    assert inside == [(True, False)]
    assert has_values(V)
    assert not has_values(V.to("meta"))
