"""The gated scan, the delta scan and the running softmax against their definition, the recurrence token by token.

A scan is named by its decays, with `mean` if normalised, `delta`, and `shared` if its heads share queries and keys;
`value` has decays of the value channels, `softmax` is the running softmax (more: test_softmax.py, test_delta.py).
"""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.ops import delta_scan, gated_scan, running_softmax
from subquad.ops._sequential import scan as sequential
from subquad.ops._torch.delta import delta_scan_backward_op, delta_scan_op
from subquad.ops._torch.scan import gated_scan_backward_op, gated_scan_op
from subquad.ops._torch.scan_by_value import gated_scan_by_value_backward_op, gated_scan_by_value_op
from subquad.testing import LOW_PRECISION, assert_exact, assert_same_maths, largest_allocation, mask_with
from tests.ops.cases import (
    ALONE,
    LAYOUTS,
    assert_all_exact,
    assert_all_in_budget,
    assert_all_same_maths,
    differentiated,
    normal,
    plain_delta,
    plain_scan,
    plain_softmax,
    plain_value_scan,
    thinned,
)

B, H, K, V = 2, 2, 6, 5
DELTAS = ("none delta", "head delta", "channel delta", "none delta shared", "head delta shared", "channel delta shared")
SHARED = ("none shared", "head mean shared", "channel shared", "value shared")
SCANS = ("none", "none mean", "head", "head mean", "channel", "channel mean", *DELTAS, *SHARED, "softmax")
MEANS = ("none mean", "head mean", "channel mean", "softmax")
BACKENDS = ("torch", "reference", "sequential")
scans = pytest.mark.parametrize("kind", SCANS)
few = settings(max_examples=5)
lengths = st.one_of(st.integers(0, 10), st.integers(11, 100))
MASK = mask_with([(9, 25, 6), (0, 33, 7)])


def inputs_of(kind, tokens, dtype=torch.float64, batch=B, strength=3.0):
    """Return queries, inputs, values and log decays of size `strength`, all weights positive; p, logits, values."""
    shape = batch, H, tokens
    v = normal(*shape, V, seed=3, dtype=dtype)
    if kind == "softmax":
        logits = (normal(*shape, K, seed=2).clamp(-1, 1) * strength).to(dtype)
        return [normal(*shape, K, seed=1).softmax(-1).to(dtype), logits, v]
    channels = {"none": 0, "head": 1, "channel": K, "value": V}[kind.split()[0]]
    groups = 1 if "shared" in kind else H
    q, i = (normal(batch, groups, tokens, K, seed=n).abs() for n in (1, 2))
    # The delta scan is bounded for keys of length 1 and beta up to 2.
    beta = [2 * normal(*shape, 1, seed=7).sigmoid()] if "delta" in kind else []
    i = (i / i.norm(dim=-1, keepdim=True) if beta else i).to(dtype)
    decays = [-strength * normal(*shape, channels, seed=4, dtype=dtype).abs()] if channels else []
    return [q.to(dtype), i, v, *(x.to(dtype) for x in beta), *decays]


def state_of(kind):
    if kind == "softmax":
        return [normal(B, H, K, seed=5), normal(B, H, K, V, seed=6)]
    return [normal(B, H, K, V + ("mean" in kind), seed=5).abs()]


def scan(kind, *inputs, state=(), backend="torch", **options):
    """Return the outputs and the tensors of the state."""
    if kind == "softmax":
        out, after, _ = running_softmax(*inputs, state=tuple(state) or None, backend=backend, **options)
        return out, *after
    state, decays = state[0] if state else None, None if kind.startswith("none") else inputs[-1]
    if "delta" in kind:
        return tuple(delta_scan(*inputs[:4], decays, state=state, backend=backend, **options))
    log_f, log_g = (None, decays) if kind.startswith("value") else (decays, None)
    options |= {"log_g": log_g, "normalise": "mean" in kind}
    return tuple(gated_scan(*inputs[:3], log_f, state=state, backend=backend, **options))


def assert_is_the_definition(kind, backend, inputs, state=(), **options):
    def run(name):
        def f(*x):
            return scan(kind, *x[len(state) :], state=x[: len(state)], backend=name, **options)

        return differentiated(f, [*state, *inputs])

    assert_all_same_maths(run(backend), run("reference"), f"{kind}, {options}")


def test_the_gated_scan_by_hand():
    q, i, v, log_f = (
        torch.tensor(x, dtype=torch.float64).view(1, 1, 2, 1) for x in ([2, 3], [5, 7], [11, 13], [0, math.log(0.5)])
    )
    out, state = gated_scan(q, i, v, log_f, backend="reference")
    last = 0.5 * 55 + 91
    assert_same_maths(out.flatten(), torch.tensor([2 * 55, 3 * last], dtype=torch.float64))
    assert_same_maths(state.flatten(), torch.tensor([last], dtype=torch.float64))
    out, state = gated_scan(q, i, v, log_f, normalise=True, eps=0.5, backend="reference")
    weight = 0.5 * 5 + 7
    assert_same_maths(out.flatten(), torch.tensor([110 / 10.5, 3 * last / (3 * weight + 0.5)], dtype=torch.float64))
    assert_same_maths(state.flatten(), torch.tensor([last, weight], dtype=torch.float64))


def test_decays_of_the_values_by_hand():
    q, i, v, g = (
        torch.tensor(x, dtype=torch.float64).view(1, 1, 2, -1)
        for x in ([2, 3], [5, 7], [[11, 17], [13, 19]], [[1, 1], [0.5, 0.25]])
    )
    out, state = gated_scan(q, i, v, None, log_g=g.log(), backend="reference")
    last = torch.tensor([0.5 * 55 + 91, 0.25 * 85 + 133], dtype=torch.float64)
    assert_same_maths(out[0, 0], torch.stack([torch.tensor([110.0, 170.0]).double(), 3 * last]))
    assert_same_maths(state[0, 0, 0], last)


@scans
@pytest.mark.parametrize("form", ["torch", "sequential"])
@few
@given(lengths, st.sampled_from([None, 1, 3, 5, 8, 16, 64]), st.booleans(), st.sampled_from([0.1, 3.0, 100.0]))
def test_a_scan_is_its_definition(kind, form, tokens, chunk_size, with_state, strength):
    options = {"eps": 0.1} if "mean" in kind and strength < 1 else {}
    inputs, state = inputs_of(kind, tokens, strength=strength), state_of(kind) if with_state else ()
    assert_is_the_definition(kind, form, inputs, state, chunk_size=chunk_size, **options)


@pytest.mark.parametrize("kind", SCANS[:-1])  # the running softmax has a log-normaliser of no tokens of its own
def test_a_scan_begins_with_an_empty_state(kind):
    inputs = inputs_of(kind, 70)
    assert_all_same_maths(scan(kind, *inputs, state=[0 * state_of(kind)[0]]), scan(kind, *inputs))


@thinned(2, kind=SCANS, form=("torch", "sequential"))
@few
@given(cuts=st.lists(st.integers(0, 70), min_size=1, max_size=3))
def test_a_scan_may_be_cut_anywhere(kind, form, cuts):
    inputs, state, outs = inputs_of(kind, 70), (), []
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 70], strict=True):
        out, *state = scan(kind, *(x[:, :, start:stop] for x in inputs), state=state, backend=form)
        outs.append(out)
    assert_all_same_maths((torch.cat(outs, 2), *state), scan(kind, *inputs, backend=form))


@thinned(3, kind=SCANS, form=BACKENDS)
def test_padding_anywhere_is_as_if_removed(kind, form):
    inputs = inputs_of(kind, 40)
    states = len(state_of(kind))
    results = differentiated(lambda *x: scan(kind, *x, mask=MASK, backend=form), inputs)
    out, after, gradients = results[0], results[1 : 1 + states], results[1 + states :]
    for b in range(B):
        alone = scan(kind, *(x[b : b + 1, :, MASK[b]] for x in inputs), backend=form)
        assert_all_same_maths((out[b : b + 1, :, MASK[b]], *(x[b : b + 1] for x in after)), alone, f"row {b}")
        for x in (out, *gradients):
            assert_exact(x[b, :, ~MASK[b]], torch.zeros_like(x[b, :, ~MASK[b]]))


@thinned(3, kind=SCANS, form=BACKENDS, dtype=LOW_PRECISION)
def test_rubbish_in_padding_changes_no_bit(kind, form, dtype):
    expected, *others = (
        differentiated(
            lambda *x: scan(kind, *x, mask=MASK, backend=form),
            [x.masked_fill(~MASK[:, None, :, None], rubbish) for x in inputs_of(kind, 40, dtype)],
        )
        for rubbish in (0.0, 1e4, torch.nan, torch.inf)
    )
    assert all(x.isfinite().all() for x in expected)
    for actual in others:
        assert_all_exact(actual, expected)


@thinned(2, kind=MEANS, form=BACKENDS, strength=(1.0, 1e4))
def test_weights_of_a_row_sum_to_one(kind, form, strength):
    q, i, v, *log_f = inputs_of(kind, 130, strength=strength)
    out, *_ = scan(kind, q, i, torch.ones_like(v), *log_f, backend=form)
    assert_same_maths(out, torch.ones_like(v))


@pytest.mark.parametrize("form", BACKENDS)
@pytest.mark.parametrize("zero", [0, 1], ids=["q", "i"])
def test_a_token_without_any_weight_gives_zero_and_finite_gradients(form, zero):
    inputs = inputs_of("none mean", 20)
    inputs[zero][:, :, :7] = 0
    out, _, *gradients = differentiated(lambda *x: scan("none mean", *x, backend=form), inputs)
    assert_exact(out[:, :, :7], torch.zeros_like(out[:, :, :7]))
    assert all(x.isfinite().all() for x in (out, *gradients))


SHARP = [*((kind, 0.3) for kind in SCANS[:-1]), *(("softmax", strength) for strength in (1.0, 30.0, 1e4))]


@thinned(3, case=SHARP, form=("torch", "sequential"), dtype=LOW_PRECISION)
def test_low_precision_stays_in_budget(case, form, dtype):
    kind, strength = case
    inputs, options = inputs_of(kind, 130, dtype, strength=strength), {"eps": 0.1} if "mean" in kind else {}
    dense = plain_softmax if kind == "softmax" else partial(plain_scan, normalise="mean" in kind, **options)
    dense = plain_delta if "delta" in kind else plain_value_scan if kind.startswith("value") else dense
    exact, plain = (differentiated(lambda *x: dense(*x)[:1], y) for y in ([x.double() for x in inputs], inputs))
    actual = differentiated(lambda *x: scan(kind, *x, backend=form, **options)[:1], inputs)
    assert actual[0].dtype == dtype
    if strength == 1e4 and dtype == torch.float32:
        # Where one key takes all, the logits' gradient is a difference of equal sums over time, each rounded apart.
        del actual[2], plain[2], exact[2]
    assert_all_in_budget(actual, plain, exact, dtype, kind)


@thinned(3, kind=("head", "channel", "value"), form=BACKENDS, dtype=(*LOW_PRECISION, torch.float64))
def test_strong_decays_are_finite_and_the_definition(kind, form, dtype):
    inputs = inputs_of(kind, 130, dtype)
    inputs[3][:, :, ::3] = -50
    for n, result in enumerate(differentiated(lambda *x: scan(kind, *x, backend=form), inputs)):
        assert result.isfinite().all(), n
    if dtype == torch.float64:
        assert_is_the_definition(kind, form, inputs)


@pytest.mark.parametrize("kind", ["channel", "channel mean", "channel delta", "value"])
def test_a_strong_decay_changes_the_bits_of_no_earlier_row_and_no_other_head(kind):
    weak = inputs_of(kind, 50, torch.float32, strength=0.1)
    strong = [*weak[:-1], weak[-1].clone()]
    strong[-1][:, 0, 20] = -1e3
    before, after = (differentiated(lambda *x: scan(kind, *x)[:1], inputs) for inputs in (weak, strong))
    assert_exact(after[0][:, 0, :20], before[0][:, 0, :20])
    assert_all_exact([x[:, 1] for x in after], [x[:, 1] for x in before])
    assert_is_the_definition(kind, "torch", [x.double() for x in strong])


@pytest.mark.parametrize("kind", ["head", "channel", "value"])
def test_a_decay_of_minus_infinity_forgets_all(kind):
    inputs = inputs_of(kind, 20)
    inputs[3][:, :, 11] = -torch.inf
    out, state = scan(kind, *inputs)
    assert_all_same_maths((out[:, :, 11:], state), scan(kind, *(x[:, :, 11:] for x in inputs)))


@scans
@few
@given(
    tokens=st.integers(1, 200),
    fraction=st.floats(0, 1),
    dtype=st.sampled_from(LOW_PRECISION),
    strength=st.sampled_from([0.1, 50.0, 1e4]),
)
def test_no_bit_depends_on_the_future(kind, tokens, fraction, dtype, strength):
    now = int(fraction * (tokens - 1))
    inputs = inputs_of(kind, tokens, dtype, batch=1, strength=strength)
    factor = -1 if kind == "softmax" else 3
    others = [torch.cat([x[:, :, : now + 1], factor * x[:, :, now + 1 :].flip(2)], 2) for x in inputs]
    before, after = (scan(kind, *x)[0][:, :, : now + 1] for x in (inputs, others))
    assert_exact(after, before)


@pytest.mark.parametrize("form", BACKENDS)
@pytest.mark.parametrize("dtype", [*LOW_PRECISION, torch.float64], ids=str)
def test_the_state_is_float32_or_wider(form, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    out, state = scan("none", *inputs_of("none", 9, dtype), backend=form)
    assert (out.dtype, state.dtype) == (dtype, wide)
    y = running_softmax(*inputs_of("softmax", 9, dtype), backend=form)
    assert [x.dtype for x in (y.out, y.lse, *y.state)] == [dtype, wide, torch.float64, wide]


# The backend `torch`: gradients, strides and memory.

engines = pytest.mark.parametrize("kind", ["none mean", "channel", "value", "head delta shared", "softmax"])


@engines
def test_past_outputs_send_no_gradient_to_the_future(kind):
    leaves = [x.requires_grad_() for x in inputs_of(kind, 100)]
    out, *_ = scan(kind, *leaves)
    for gradient in torch.autograd.grad(out[:, :, :40].square().sum(), leaves):
        assert_exact(gradient[:, :, 40:], torch.zeros_like(gradient[:, :, 40:]))


@engines
@pytest.mark.parametrize("layout", ["heads inside tokens", "channels apart"])
def test_strides_change_nothing(kind, layout):
    def run(inputs, expand):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, *_ = scan(kind, *leaves)
        gradient = expand(torch.ones((), dtype=out.dtype).expand(out.shape))
        return [out, *torch.autograd.grad(out, leaves, gradient)]

    inputs = inputs_of(kind, 70)
    expected = run(inputs, torch.Tensor.contiguous)
    assert_all_same_maths(run(map(LAYOUTS[layout], inputs), lambda gradient: gradient), expected)


def long_inputs(kind, tokens, grad=True):
    return [x.requires_grad_(grad) for x in inputs_of(kind, tokens, torch.float32, batch=1)]


@engines
def test_one_state_a_chunk_is_kept_and_memory_is_linear(kind):
    def kept(tokens):
        shapes, leaves = [], long_inputs(kind, tokens)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
            scan(kind, *leaves, chunk_size=32)
        # One axis counts the chunks, the others are a state of each head.
        states = sum(math.prod(shape) for shape in shapes if len(shape) == 4)
        assert states == tokens // 32 * H * K * (V + ("mean" in kind))
        return sum(map(math.prod, shapes))

    assert kept(512) <= 2 * kept(256)


@engines
def test_nothing_is_kept_without_gradients(kind):
    def largest(grad):
        return largest_allocation(lambda: scan(kind, *long_inputs(kind, 24, grad), chunk_size=1))

    assert largest(False) < 24 * H * K * V * 4 <= largest(True), "states of all tokens"


@engines
def test_no_tensor_has_a_square_of_entries(kind):
    leaves = long_inputs(kind, 1024)
    assert largest_allocation(lambda: scan(kind, *leaves)[0].sum().backward()) <= 1024 * 1024 * 4 // 4


# The backend `sequential`: memory.


def test_one_state_in_sequence_and_a_square_root_of_them_in_training():
    def largest(tokens, grad):
        q, i = (normal(1, 1, tokens, 32, seed=n, dtype=torch.float32).abs().requires_grad_(grad) for n in (1, 2))
        v = normal(1, 1, tokens, 64, seed=3, dtype=torch.float32)

        def run():
            for kind, inputs in (("channel", (q, i, v, -i)), ("softmax", (q, i, v))):
                out, *_ = scan(kind, *inputs, backend="sequential")
                if grad:
                    out.sum().backward()

        return largest_allocation(run)

    state, row = 8 * 32 * 64, 4 * 64
    assert largest(16, False) == state
    assert largest(65, False) == 65 * row  # the outputs
    assert largest(9, True) == 3 * state
    assert largest(16, True) == 4 * state


@pytest.mark.parametrize("kind", ["head delta shared", "none delta", "channel delta"])
def test_the_delta_operators_keep_torchs_rules(kind):
    tensors = [*(x.flatten(0, 1) for x in inputs_of(kind, 12)), *([None] if "none" in kind else [])]
    tensors.append(state_of(kind)[0].flatten(0, 1))
    if kind == "head delta shared":
        torch.library.opcheck(delta_scan_op, (*(x.clone().requires_grad_() for x in tensors), 8, True))
    torch.library.opcheck(delta_scan_op, (*tensors, 8, True), test_utils=ALONE)
    out, _, *saved = delta_scan_op(*tensors, 8, True)
    arguments = (torch.ones_like(out), None, *tensors[:5], *saved, 8)
    torch.library.opcheck(delta_scan_backward_op, arguments, test_utils=ALONE)


@pytest.mark.parametrize("kind", ["head mean", "none", "channel"])
def test_the_chunked_operators_keep_torchs_rules(kind):
    q, i, v, log_f = (*(x.flatten(0, 1) for x in inputs_of(kind, 12)), None)[:4]
    state, options = state_of(kind)[0].flatten(0, 1), ("mean" in kind, 0.1, 8, True)
    if kind == "head mean":
        torch.library.opcheck(gated_scan_op, (*(x.clone().requires_grad_() for x in (q, i, v, log_f, state)), *options))
    torch.library.opcheck(gated_scan_op, (q, i, v, log_f, state, *options), test_utils=ALONE)
    out, _, *kept = gated_scan_op(q, i, v, log_f, state, *options)
    arguments = (torch.ones_like(out), None, q, i, v, log_f, out, *kept, *options[:3])
    torch.library.opcheck(gated_scan_backward_op, arguments, test_utils=ALONE)


@pytest.mark.parametrize("kind", ["value", "value shared"])
def test_the_operators_of_value_decays_keep_torchs_rules(kind):
    tensors = [x.flatten(0, 1) for x in (*inputs_of(kind, 12), *state_of(kind))]
    torch.library.opcheck(gated_scan_by_value_op, (*(x.clone().requires_grad_() for x in tensors), 8, True))
    torch.library.opcheck(gated_scan_by_value_op, (*tensors, 8, False), test_utils=ALONE)
    out, _, states = gated_scan_by_value_op(*tensors, 8, True)
    arguments = (torch.ones_like(out), None, *tensors[:4], out, states, 8)
    torch.library.opcheck(gated_scan_by_value_backward_op, arguments, test_utils=ALONE)


@pytest.mark.parametrize("kind", ["gated_scan", "delta_scan", "running_softmax"])
def test_the_sequential_operators_keep_torchs_rules(kind):
    q, i, log_f = (normal(2, 9, 4, seed=n).abs().float() for n in range(3))  # the state is float64 all the same
    v, state, lse = normal(2, 9, 3, seed=4).float(), normal(2, 4, 3, seed=5), normal(2, 4, seed=6)
    operator, backward = sequential.scan_op, sequential.scan_backward_op
    if kind == "running_softmax":
        operator, backward, inputs = sequential.running_softmax_op, sequential.running_softmax_backward_op, (lse, state)
    else:
        inputs = (v[..., :1].sigmoid() if kind == "delta_scan" else None, -log_f[..., None], state)
    torch.library.opcheck(operator, (q, i, v, *inputs, 4, False), test_utils=ALONE)
    leaves = (x if x is None else x.clone().requires_grad_() for x in (q, i, v, *inputs))
    torch.library.opcheck(operator, (*leaves, 4, True))
    kept = operator(q, i, v, *inputs, 4, True)
    if kind == "running_softmax":
        arguments = (v.cos(), i.cos(), lse.cos(), state.cos(), q, i, v, *kept[-2:], 4)
    else:
        arguments = (v.cos(), state.cos(), q, i, v, *inputs[:2], kept[-1], 4)
    torch.library.opcheck(backward, arguments, test_utils=ALONE)


X = torch.ones(B, H, 5, K)
ERRORS = {
    "ndim": ({"i": X[0]}, r"i must have shape \[B, H, T, channels\], got \(2, 5, 6\)"),
    "tokens": ({"v": X[:, :, :3]}, r"v must agree with q in B and T, got \(2, 2, 3, 6\) and \(2, 2, 5, 6\)"),
    "groups": ({"v": X[:, :1].expand(-1, 3, -1, -1)},
               "the heads of v must be a multiple of the groups of q, got 3 heads and 2 groups"),
    "channels": ({"i": X[..., :3]}, "q and i must have the same channels, got 6 and 3"),
    "decays": ({"log_f": X[..., :2]}, r"log_f must have shape \(2, 2, 5, 6\) or \(2, 2, 5, 1\), got \(2, 2, 5, 2\)"),
    "decays of values": ({"log_g": X[..., :1]}, r"log_g must have the shape of v, \(2, 2, 5, 6\), got \(2, 2, 5, 1\)"),
    "decays of both": ({"log_f": X, "log_g": X}, "keys and values can't both decay: give log_f or log_g"),
    "means": ({"log_g": X, "normalise": True}, "log_g needs normalise=False"),
    "eps": ({"eps": -0.1}, r"eps must be at least 0, got -0\.1"),
    "chunk": ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    "state": ({"state": X[:, :, :1].mT, "normalise": True},
              r"state must have shape \(2, 2, 6, 7\), got \(2, 2, 6, 1\)"),
    "mask": ({"mask": X[:, 0, :4, 0].bool()}, r"mask must have shape \(2, 5\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*ERRORS, "dtype"])
def test_inputs_that_do_not_fit_are_refused(case):
    changed, match = ERRORS.get(case, ({"v": X.long()}, r"v must be floating point, got torch\.int64"))
    options = {"q": X, "i": X, "v": X, "log_f": None} | changed
    inputs = [options.pop(name) for name in ("q", "i", "v", "log_f")]
    with pytest.raises(TypeError if case == "dtype" else ValueError, match=match):
        gated_scan(*inputs, **options)
