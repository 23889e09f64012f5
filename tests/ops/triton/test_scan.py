"""The kernels of the gated scan against its definition, the recurrence token by token, in float64."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from subquad import ops
from subquad.ops._triton import common
from subquad.ops._triton.scan import gated_scan, gated_scan_triton, gated_scan_triton_backward
from subquad.ops._triton.scan_kernels import step_kernel
from subquad.testing.tools import LOW_PRECISION, assert_exact, mask_with
from tests.ops.cases import (
    ALONE,
    DEVICE,
    LAYOUTS,
    assert_all_exact,
    assert_all_in_budget,
    differentiated,
    plain_scan,
    random,
    thinned,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 0.1
decays = pytest.mark.parametrize("decay", ["none", "head", "channel"])
dtypes = pytest.mark.parametrize("dtype", LOW_PRECISION)
# Lengths around those of chunks, head sizes around those of tiles: tokens, K, V, decay, normalise, dtype.
CASES = [
    (1, 16, 16, "channel", True, FP32), (1, 3, 1, "head", False, BF16), (2, 3, 3, "head", True, FP32),
    (2, 64, 16, "channel", False, FP16), (15, 1, 64, "none", False, BF16), (16, 43, 16, "channel", True, FP32),
    (17, 16, 43, "head", False, FP16), (63, 64, 64, "none", True, FP16), (64, 16, 128, "head", True, BF16),
    (64, 43, 16, "channel", True, FP16), (65, 64, 64, "channel", True, BF16), (65, 16, 16, "none", False, FP32),
    (127, 16, 16, "head", True, FP32), (128, 64, 64, "none", True, BF16), (129, 16, 16, "channel", False, FP32),
    (67, 16, 3, "channel", True, BF16), (200, 128, 64, "none", True, BF16), (200, 16, 16, "head", False, BF16),
    (20, 192, 130, "none", True, BF16), (20, 80, 16, "head", True, FP16), (20, 40, 40, "channel", True, FP32),
]  # fmt: skip


def make(tokens, decay="none", dtype=FP32, *, normalise=True, K=16, V=16, batch=1, heads=1):
    """Return a state, queries, inputs, values and log decays unless "none"; weights are positive, as totals must be."""
    shape, F = (batch, heads, tokens), {"none": 0, "head": 1, "channel": K}[decay]
    state = random(batch, heads, K, V + normalise, seed=5, dtype=FP32).abs()
    q, i = (random(*shape, K, seed=n, dtype=dtype).abs() for n in (1, 2))
    log_f = [-0.3 * random(*shape, F, seed=4, dtype=dtype).abs()] if F else []
    return [state, q, i, random(*shape, V, seed=3, dtype=dtype), *log_f]


def kernels(state, q, i, v, log_f=None, *, mask=None, normalise=True, eps=EPS):
    return gated_scan(q, i, v, log_f, state, mask, normalise, eps)


def reference(state, q, i, v, log_f=None, *, normalise=True, eps=EPS, backend="reference", mask=None):
    return tuple(ops.gated_scan(q, i, v, log_f, state=state, mask=mask, normalise=normalise, eps=eps, backend=backend))


chunked = partial(reference, backend="torch")


def plain(state, q, i, v, log_f=None, *, normalise=True, eps=EPS):
    return plain_scan(q, i, v, log_f, state, normalise=normalise, eps=eps)


def assert_is_the_scan(inputs, dtype, measure=plain, results=slice(None), **options):
    """Return results and gradients, whose errors are at most twice those of the measure in this dtype."""
    found = []
    for f, dtyped in ((kernels, inputs), (measure, inputs), (reference, [x.double() for x in inputs])):
        found.append(differentiated(lambda *x, f=f: f(*x, **options)[results], dtyped))
    assert_all_in_budget(*found, dtype)
    return found[0]


def assert_results_in_budget(actual, inputs, dtype, **options):
    """Compare outputs and final state, whose errors are at most twice those of the chunked form in this dtype."""
    exact = reference(*(x.double() for x in inputs), **options)
    assert_all_in_budget(actual, chunked(*inputs, **options), exact, dtype)


@thinned(3, case=CASES)
def test_outputs_states_and_gradients(case):
    tokens, K, V, decay, normalise, dtype = case
    inputs = make(tokens, decay, dtype, normalise=normalise, K=K, V=V)
    assert_is_the_scan(inputs, dtype, normalise=normalise)


@decays
def test_the_scan_begins_with_an_empty_state(decay):
    state, *inputs = make(20, decay)
    zeros = torch.zeros_like(state)
    results = [differentiated(lambda *x, s=s: kernels(s, *x), inputs) for s in (None, zeros)]
    assert_all_exact(*results)


@decays
@pytest.mark.parametrize("which", [0, 1], ids=["out", "state"])
def test_each_result_has_its_own_gradients(decay, which):
    assert_is_the_scan(make(20, decay), FP32, results=slice(which, which + 1))


@decays
def test_padding_does_not_exist(decay):
    mask = mask_with([(9, 25, 6), (0, 33, 7)]).to(DEVICE)
    state, *inputs = make(40, decay, batch=2, heads=2)
    results = assert_is_the_scan([state, *inputs], FP32, chunked, mask=mask)
    padded = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    assert_all_exact(differentiated(partial(kernels, mask=mask), [state, *padded]), results)
    out, _, _, *gradients = results
    for x in (out, *gradients):
        x = x.transpose(1, 2)[~mask]
        assert_exact(x, torch.zeros_like(x))


def test_rows_that_are_all_padding_leave_the_state():
    state, *inputs = make(20, "channel")
    out, after = kernels(state, *inputs, mask=torch.zeros(1, 20, dtype=torch.bool, device=DEVICE))
    assert_exact(out, torch.zeros_like(out))
    assert_exact(after, state)


@thinned(4, layout=LAYOUTS, decay=("head", "channel"))
def test_strides_change_nothing(decay, layout):
    def gradients(inputs, expand):
        leaves = [x.detach().requires_grad_() for x in (state, *inputs)]
        out, after = kernels(*leaves)
        gradient = expand(torch.ones((), device=DEVICE).expand(out.shape))
        return [out, after, *torch.autograd.grad(out, leaves, gradient)]

    state, *inputs = make(5, decay, batch=2, heads=2)
    strided = [LAYOUTS[layout](x) for x in inputs]
    expected = gradients([x.contiguous() for x in strided], torch.Tensor.contiguous)
    assert_all_exact(gradients(strided, lambda gradient: gradient), expected)


@thinned(2, decay=("head", "channel"), dtype=LOW_PRECISION)
def test_strong_decays(decay, dtype):
    """Logarithms of decays from -1e-3 to -1e4 side by side, and some that forget all."""
    state, *inputs, log_f = make(70, decay, dtype)
    log_f = -(3 * random(*log_f.shape, seed=6)).exp().to(dtype)
    log_f[:, :, ::7] = -1e-3
    assert_is_the_scan([state, *inputs, log_f], dtype, chunked)
    log_f[:, :, 40] = -torch.inf
    out, after, *gradients = differentiated(kernels, [state, *inputs, log_f])
    assert all(x.isfinite().all() for x in gradients)
    rest = [torch.zeros_like(state), *(x[:, :, 40:] for x in (*inputs, log_f))]
    assert_results_in_budget((out[:, :, 40:], after), rest, dtype)


@pytest.mark.parametrize("zero", ["q", "i"])
@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_a_token_without_any_weight_gives_zero_and_finite_gradients(zero, eps):
    _, q, i, v = make(20)
    (q if zero == "q" else i)[:, :, :7] = 0
    out, _, *gradients = differentiated(lambda *x: kernels(None, *x, eps=eps), [q, i, v])
    assert_exact(out[:, :, :7], torch.zeros_like(out[:, :, :7]))
    assert all(x.isfinite().all() for x in (out, *gradients))


@dtypes
def test_sums_beyond_the_range_of_float16_are_finite(dtype):
    state, q, i, v = make(70, dtype=dtype)
    results = differentiated(kernels, [state, q, 100 * i, 300 * v])
    assert results[1].abs().max() > torch.finfo(FP16).max
    assert all(x.isfinite().all() for x in results)


@thinned(3, decay=("none", "head", "channel"), dtype=LOW_PRECISION)
def test_no_bit_depends_on_the_future(decay, dtype):
    state, *inputs = make(80, decay, dtype)
    out, _ = kernels(state, *inputs)
    for now in (5, 70):
        q, i, v, *log_f = (x.clone() for x in inputs)
        for x in (q, i, v):
            x[:, :, now + 1 :] *= -1e4
        for x in log_f:
            x[:, :, now + 1 :] = -1e4
        assert_exact(kernels(state, q, i, v, *log_f)[0][:, :, : now + 1], out[:, :, : now + 1])


@decays
def test_the_scan_may_be_cut_anywhere(decay):
    state, *inputs = make(70, decay)
    after, outs = state, []
    for start, stop in pairwise((0, 1, 17, 32, 32, 70)):
        out, after = kernels(after, *(x[:, :, start:stop] for x in inputs))
        outs.append(out)
    assert_results_in_budget((torch.cat(outs, 2), after), [state, *inputs], FP32)


@thinned(3, decay=("none", "head", "channel"), normalise=(False, True), dtype=LOW_PRECISION)
def test_one_token_at_a_time(monkeypatch, decay, normalise, dtype):
    """Without gradients one token is one launch."""
    launched, launch = [], common.launch
    monkeypatch.setattr(common, "launch", lambda kernel, *x, **y: launched.append(kernel) or launch(kernel, *x, **y))
    state, *inputs = make(6, decay, dtype, K=80, V=70, normalise=normalise, batch=2)
    after, outs = state, []
    for t in range(6):
        out, after = kernels(after, *(x[:, :, t : t + 1] for x in inputs), normalise=normalise)
        outs.append(out)
    assert launched == [step_kernel] * 6
    assert_results_in_budget((torch.cat(outs, 2), after), [state, *inputs], dtype, normalise=normalise)


def test_a_token_of_padding_is_no_step():
    state, *inputs = make(1, "head", batch=2)
    mask = torch.tensor([[True], [False]], device=DEVICE)
    results = [
        kernels(state, *(x.masked_fill(~mask[:, None, :, None], y) for x in inputs), mask=mask) for y in (0, torch.nan)
    ]
    assert_all_exact(*results)
    out, after = results[0]
    assert_exact(out[1], torch.zeros_like(out[1]))
    assert_exact(after[1], state[1])
    assert_all_exact((out[:1], after[:1]), kernels(state[:1], *(x[:1] for x in inputs)))


@pytest.mark.parametrize("shape", [(1, 2, 0), (0, 2, 5), (2, 0, 5)])
@decays
def test_nothing_at_all(decay, shape):
    batch, heads, tokens = shape
    state, *inputs = make(tokens, decay, batch=batch, heads=heads)
    out, after, *gradients = differentiated(kernels, [state, *inputs])
    assert out.shape == (*shape, 16)
    assert_exact(after, state)
    assert [x.shape for x in gradients] == [x.shape for x in (state, *inputs)]
    empty = kernels(None, *inputs)[1]
    assert_exact(empty, torch.zeros_like(state))


def test_inputs_of_several_dtypes():
    state, q, i, v, log_f = make(20, "channel")
    results = assert_is_the_scan([state, q, i.half(), v.bfloat16(), log_f], BF16, chunked)
    assert [x.dtype for x in results] == [BF16, FP32, FP32, FP32, FP16, BF16, FP32]


@thinned(3, case=[("channel", True), ("none", True), ("head", False)])
def test_the_operations_keep_torchs_rules(case):
    decay, normalise = case
    state, *inputs = make(3, decay, normalise=normalise)
    inputs += [] if len(inputs) == 4 else [None]
    mask = torch.tensor([[True, False, True]], device=DEVICE)
    out, _, *kept = gated_scan_triton(*inputs, state, mask, normalise, EPS, True)
    arguments = (torch.ones_like(out), torch.ones_like(state), *inputs, mask, out, *kept, normalise)
    torch.library.opcheck(gated_scan_triton_backward, arguments, test_utils=ALONE)
    torch.library.opcheck(gated_scan_triton, (*inputs, None, None, normalise, EPS, False), test_utils=ALONE)
    arguments = [None if x is None else x.requires_grad_() for x in (*inputs, state)]
    torch.library.opcheck(gated_scan_triton, (*arguments, mask, normalise, EPS, True))


def test_compiled_is_eager():
    inputs = make(20, "channel")
    compiled = torch.compile(kernels, fullgraph=True, backend="aot_eager")
    assert_all_exact(*(differentiated(f, inputs) for f in (compiled, kernels)))


def test_other_dtypes_and_devices_are_refused(monkeypatch):
    state, q, i, v, log_f = make(3, "head")
    names = "float32, bfloat16, float16"
    for inputs in ([q, i, v.double()], [q, i, v, log_f.double()]):
        with pytest.raises(ValueError, match=f"'triton' of gated_scan computes in {names}, got torch.float64"):
            kernels(state, *inputs)
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"'triton' of gated_scan needs tensors on a CUDA device .*, got cpu"):
        kernels(None, *(x.cpu() for x in (q, i, v)))
