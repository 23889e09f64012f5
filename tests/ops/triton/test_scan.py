"""The kernels of the gated scan, the running softmax and the gated mean against their definitions, token by token, in
float64.

A scan is named by its decays, with `mean` if normalised; the running softmax `latents`.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch

from subquad import ops
from subquad.ops._triton import common
from subquad.ops._triton import softmax as module
from subquad.ops._triton.gated_mean import gated_mean
from subquad.ops._triton.scan import gated_scan_triton, gated_scan_triton_backward
from subquad.ops._triton.softmax import running_softmax, running_softmax_backward_op, running_softmax_op
from subquad.testing.tools import LOW_PRECISION, assert_exact, assert_in_budget, mask_with
from tests.ops.cases import (
    ALONE,
    DEVICE,
    LAYOUTS,
    assert_all_exact,
    assert_all_in_budget,
    differentiated,
    plain_gated_mean,
    plain_scan,
    plain_softmax,
    random,
    thinned,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS, EMPTY = 0.1, -(2.0**100)
T = 40 if DEVICE == "cpu" else 70
"""Three chunks of 16 tokens or two of 64, in two segments of a running softmax."""
LATENTS = {"latents": 10}
SOFTMAXES = (*LATENTS, "gated mean")
MEANS = ("none mean", "head mean", "channel mean")
KINDS = (*MEANS, *SOFTMAXES)
kinds = pytest.mark.parametrize("kind", KINDS)
softmaxes = pytest.mark.parametrize("kind", SOFTMAXES)
# Lengths around those of chunks, head sizes around those of tiles: kind, tokens, K or L, V, dtype, size of the logits.
CASES = [
    ("channel mean", 1, 16, 16, FP32), ("head", 1, 3, 1, BF16), ("head mean", 2, 3, 3, FP32),
    ("channel", 2, 64, 16, FP16), ("none", 15, 1, 64, BF16), ("channel mean", 16, 43, 16, FP32),
    ("head", 17, 16, 43, FP16), ("none mean", 63, 64, 64, FP16), ("head mean", 64, 16, 128, BF16),
    ("channel mean", 64, 43, 16, FP16), ("channel mean", 65, 64, 64, BF16), ("none", 65, 16, 16, FP32),
    ("head mean", 127, 16, 16, FP32), ("none mean", 128, 64, 64, BF16), ("channel", 129, 16, 16, FP32),
    ("channel mean", 67, 16, 3, BF16), ("none mean", 200, 128, 64, BF16), ("head", 200, 16, 16, BF16),
    ("none mean", 20, 192, 130, BF16), ("head mean", 20, 80, 16, FP16), ("channel mean", 20, 40, 40, FP32),
    ("latents", 1, 10, 16, FP32), ("latents", 1, 1, 1, BF16), ("latents", 2, 1, 16, FP32), ("latents", 2, 43, 16, FP16),
    ("latents", 15, 10, 80, BF16, 3), ("latents", 16, 43, 16, FP32, 3), ("latents", 17, 1, 64, FP16, 3),
    ("latents", 63, 64, 64, FP16), ("latents", 64, 1, 16, FP32), ("latents", 33, 10, 16, FP32),
    ("latents", 65, 64, 80, BF16), ("latents", 65, 10, 1, FP32, 3), ("latents", 65, 1, 80, BF16, 3),
    ("latents", 127, 10, 16, FP16, 3), ("latents", 128, 43, 64, BF16), ("latents", 130, 10, 16, FP16),
    ("latents", 129, 1, 64, FP16), ("latents", 200, 64, 64, BF16), ("latents", 20, 10, 150, BF16),
    ("latents", 200, 1, 16, FP32), ("latents", 20, 130, 16, FP32), ("latents", 20, 130, 16, BF16),
    ("latents", 200, 10, 16, BF16), ("latents", 20, 1, 150, FP32),
    ("gated mean", 1, 1, 1, FP32), ("gated mean", 2, 1, 16, BF16), ("gated mean", 15, 1, 16, FP32, 3),
    ("gated mean", 17, 1, 80, FP32), ("gated mean", 31, 1, 64, FP16, 3), ("gated mean", 32, 1, 3, BF16),
    ("gated mean", 33, 1, 16, FP16), ("gated mean", 65, 1, 150, BF16, 3), ("gated mean", 100, 1, 16, FP32),
    ("head mean", 17, 260, 16, BF16), ("latents", 20, 10, 300, FP16), ("channel mean", 17, 300, 260, FP16),
]  # fmt: skip


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of 16 tokens in every dtype if interpreted: a chunk costs as much whatever its size."""
    if DEVICE == "cpu":
        of = module.Tiles.of
        monkeypatch.setattr(module.Tiles, "of", lambda *sizes: of(*sizes)._replace(chunk=16))


short = pytest.mark.usefixtures("short_chunks")


def make(kind, tokens, dtype=FP32, K=None, V=16, size=1.0, *, batch=1, heads=1):
    """Return q, i, v and any log decays, all weights positive, or p(l | t), logits, v; then the tensors of a state."""
    shape = (batch, heads, tokens)
    v = random(*shape, V, seed=3, dtype=dtype)
    if kind == "gated mean":
        gate, logits = random(*shape, 1, seed=1, dtype=dtype), (size * random(*shape, 1, seed=2)).to(dtype)
        return [gate, logits, v], [random(batch, heads, 1, seed=4), random(batch, heads, 1, V, seed=5, dtype=FP32)]
    if kind in LATENTS:
        K = K or LATENTS[kind]
        p, logits = random(*shape, K, seed=1).softmax(-1).to(dtype), (size * random(*shape, K, seed=2)).to(dtype)
        return [p, logits, v], [random(batch, heads, K, seed=4), random(batch, heads, K, V, seed=5, dtype=FP32)]
    K = K or 16
    F = {"none": 0, "head": 1, "channel": K}[kind.split()[0]]
    q, i = (random(*shape, K, seed=n, dtype=dtype).abs() for n in (1, 2))
    log_f = [-0.3 * random(*shape, F, seed=4, dtype=dtype).abs()] if F else []
    return [q, i, v, *log_f], [random(batch, heads, K, V + ("mean" in kind), seed=5, dtype=FP32).abs()]


def empty(state):
    *lse, mean = state
    return [*(torch.full_like(x, EMPTY) for x in lse), torch.zeros_like(mean)]


def scan(kind, *tensors, mask=None, backend="triton", eps=EPS):
    """Return outputs, the lse of a running softmax, and the state. The backend `plain` computes from every weight."""
    inputs = tensors[: 3 + kind.startswith(("head", "channel"))]
    state = tensors[len(inputs) :]
    if kind == "gated mean":
        if backend == "plain":
            return plain_gated_mean(*tensors, mask=mask)
        if backend == "triton":
            return gated_mean(*inputs, None, state or None, mask)
        y = ops.softmax.gated_mean(*inputs, state=state or None, mask=mask, backend=backend)
        return y.out, *y.state
    if kind in LATENTS:
        if backend == "plain":
            return plain_softmax(*tensors, mask=mask)
        if backend == "triton":
            return running_softmax(*inputs, state or None, mask)
        out, after, lse = ops.running_softmax(*inputs, state=state or None, mask=mask, backend=backend)
        return out, lse, *after
    q, i, v, log_f = (*inputs, None)[:4]
    options = {"state": state[0] if state else None, "normalise": "mean" in kind, "eps": eps}
    if backend == "plain":
        return plain_scan(q, i, v, log_f, **options)
    return tuple(ops.gated_scan(q, i, v, log_f, mask=mask, backend=backend, **options))


def assert_is_the_definition(kind, inputs, dtype, measure="plain", results=slice(None), leave_out=None, **options):
    """Return results and gradients, whose errors are at most twice those of the measure in this dtype."""
    forms = ("triton", inputs), (measure, inputs), ("reference", [x.double() for x in inputs])
    found = [differentiated(lambda *x, f=f: scan(kind, *x, backend=f, **options)[results], x) for f, x in forms]
    compared = [[y for n, y in enumerate(ys) if n != leave_out] for ys in found]
    assert_all_in_budget(*compared, dtype)
    return found[0]


def assert_results_in_budget(kind, actual, inputs, dtype):
    """Compare results whose errors are at most twice those of `plain` for a softmax, of `torch` for others."""
    measured = scan(kind, *inputs, backend="plain" if kind in SOFTMAXES else "torch")
    assert_all_in_budget(actual, measured, scan(kind, *(x.double() for x in inputs), backend="reference"), dtype)


def in_pieces(kind, inputs, state, cuts):
    """Return the results of pieces between `cuts`, with the state carried from piece to piece."""
    outs, count = [], len(state)
    for start, stop in pairwise(cuts):
        results = scan(kind, *(x[:, :, start:stop] for x in inputs), *state)
        outs.append(results[:-count])
        state = results[-count:]
    return [*(torch.cat(x, 2) for x in zip(*outs, strict=True)), *state]


# The laws of all scans.


@thinned(5, case=CASES)
def test_outputs_states_and_gradients(case):
    kind, tokens, K, V, dtype, *size = case
    # One latent has one log-normaliser a head: the gradient of a single number may cancel.
    inputs, state = make(kind, tokens, dtype, K, V, *size, heads=4 if kind == "gated mean" else 1)
    assert_is_the_definition(kind, [*inputs, *state], dtype)


@short
@kinds
def test_a_scan_begins_with_an_empty_state(kind):
    inputs, state = make(kind, T if kind in SOFTMAXES else 20)
    expected = assert_is_the_definition(kind, inputs, FP32)
    assert_all_exact(differentiated(lambda *x: scan(kind, *x, *empty(state)), inputs), expected)


@thinned(2, which=range(4), kind=KINDS)
def test_each_result_has_its_own_gradients(which, kind):
    which = which if kind in LATENTS else which // 2 if kind in MEANS else min(which, 2)  # without an lse of each token
    inputs, state = make(kind, 70 if kind in SOFTMAXES else 20)
    measure = "torch" if kind in SOFTMAXES else "plain"
    assert_is_the_definition(kind, [*inputs, *state], FP32, measure, slice(which, which + 1))


@short
@thinned(2, kind=KINDS)
def test_padding_does_not_exist(kind):
    mask = mask_with([(9, T - 15, 6), (0, T - 7, 7)]).to(DEVICE)
    inputs, state = make(kind, T, size=2.0, batch=2, heads=2)
    measure = "plain" if kind in SOFTMAXES else "reference"
    results = assert_is_the_definition(kind, [*inputs, *state], FP32, measure, mask=mask)
    padded = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    assert_all_exact(differentiated(partial(scan, kind, mask=mask), [*padded, *state]), results)
    gradients = results[-len(inputs) - len(state) : -len(state)]
    for x in (results[0], *gradients):
        x = x.transpose(1, 2)[~mask]
        assert_exact(x, torch.zeros_like(x))


@kinds
def test_rows_that_are_all_padding_leave_the_state(kind):
    inputs, state = make(kind, 20)
    mask = torch.zeros(1, 20, dtype=torch.bool, device=DEVICE)
    for before, expected in ((state, state), ([], empty(state))):
        out, *_ = results = scan(kind, *inputs, *before, mask=mask)
        assert_exact(out, torch.zeros_like(out))
        after = results[-len(state) :]
        if kind in SOFTMAXES:
            assert_all_in_budget(after, expected, expected, FP32)
        else:
            assert_all_exact(after, expected)


@thinned(5, layout=LAYOUTS, kind=("head mean", "channel mean", *SOFTMAXES))
def test_strides_change_nothing(layout, kind):
    def gradients(inputs, expand):
        leaves = [x.detach().requires_grad_() for x in (*inputs, *state)]
        out, *results = scan(kind, *leaves)
        gradient = expand(torch.ones((), device=DEVICE).expand(out.shape))
        return [out, *results, *torch.autograd.grad(out, leaves, gradient)]

    inputs, state = make(kind, 5, batch=2, heads=2)
    strided = [LAYOUTS[layout](x) for x in inputs]
    expected = gradients([x.contiguous() for x in strided], torch.Tensor.contiguous)
    assert_all_exact(gradients(strided, lambda gradient: gradient), expected)


FUTURES = [*((kind, 1.0) for kind in MEANS), *((kind, size) for kind in SOFTMAXES for size in (1.0, 30.0, 1e4))]


@short
@thinned(5, case=FUTURES, dtype=LOW_PRECISION)
def test_no_bit_depends_on_the_future(case, dtype):
    kind, size = case
    tokens = T if kind in SOFTMAXES else 80
    inputs, state = make(kind, tokens, dtype, size=size)
    if kind in SOFTMAXES:
        p, k, v = inputs
        others = [p.flip(2), 1e4 * k.sign(), 1e4 * v]
    else:
        others = [*(-1e4 * x for x in inputs[:3]), *(torch.full_like(x, -1e4) for x in inputs[3:])]
    outs = slice(0, -len(state))
    expected = scan(kind, *inputs, *state)[outs]
    for now in (5, tokens - 9, tokens - 7):
        later = torch.arange(tokens, device=DEVICE)[:, None] > now
        changed = [torch.where(later, x, y) for x, y in zip(others, inputs, strict=True)]
        for before, after in zip(expected, scan(kind, *changed, *state)[outs], strict=True):
            assert_exact(after[:, :, : now + 1], before[:, :, : now + 1])
            assert kind not in SOFTMAXES or after.isfinite().all()


@short
@thinned(3, kind=KINDS, dtype=LOW_PRECISION)
def test_a_scan_may_be_cut_anywhere(kind, dtype):
    inputs, state = make(kind, T, dtype)
    for cuts in ((0, 1, 17, 17, T - 1, T), (0, 32, T)):
        assert_results_in_budget(kind, in_pieces(kind, inputs, state, cuts), [*inputs, *state], dtype)


@thinned(3, kind=(*KINDS, "none", "head", "channel"), dtype=LOW_PRECISION)
def test_a_token_at_a_time_is_one_launch_each(kind, dtype, monkeypatch):
    launched, launch = [], common.launch
    monkeypatch.setattr(common, "launch", lambda kernel, *x, **y: launched.append(kernel) or launch(kernel, *x, **y))
    inputs, state = make(kind, 4, dtype, LATENTS.get(kind, 80), 70, batch=2)
    actual = in_pieces(kind, inputs, state, range(5))
    assert [kernel.__name__ for kernel in launched] == ["decode" if kind in SOFTMAXES else "step_kernel"] * 4
    assert_results_in_budget(kind, actual, [*inputs, *state], dtype)


@thinned(2, kind=("head mean", "channel", "latents"), dtype=(FP16, BF16))
def test_cards_before_hopper(kind, dtype, monkeypatch):
    monkeypatch.setattr(common, "card", lambda device: common.Card((8, 0), 163 * 1024))
    inputs, state = make(kind, 70 if kind in LATENTS else 17, dtype, LATENTS.get(kind, 80))
    assert_is_the_definition(kind, [*inputs, *state], dtype)


@kinds
def test_a_token_of_padding_is_no_step(kind):
    inputs, state = make(kind, 1, batch=2)
    mask = torch.tensor([[True], [False]], device=DEVICE)
    results, other = (
        scan(kind, *(x.masked_fill(~mask[:, None, :, None], y) for x in inputs), *state, mask=mask)
        for y in (0.0, torch.nan)
    )
    assert_all_exact(other, results)
    assert_exact(results[0][1], torch.zeros_like(results[0][1]))
    assert_all_exact([x[1] for x in results[-len(state) :]], [x[1] for x in state])
    if kind in LATENTS:
        assert_exact(results[1][1, :, 0], state[0][1].float())
    assert_all_exact([x[:1] for x in results], scan(kind, *(x[:1] for x in (*inputs, *state))))


@kinds
@pytest.mark.parametrize("shape", [(1, 2, 0), (0, 2, 5), (2, 0, 5)])
def test_nothing_at_all(kind, shape):
    batch, heads, tokens = shape
    inputs, state = make(kind, tokens, batch=batch, heads=heads)
    count = len(state)
    results = differentiated(partial(scan, kind), [*inputs, *state])
    outs = results[: len(results) - len(inputs) - 2 * count]
    assert [x.shape for x in outs] == [(*shape, n) for n in (16, LATENTS.get(kind))[: len(outs)]]
    assert_all_exact(results, differentiated(lambda *x: (*outs, *x[-count:]), [*inputs, *state]))
    assert_all_exact(scan(kind, *inputs)[-count:], empty(state))


@thinned(2, kind=("channel mean", *SOFTMAXES))
def test_compiled_is_eager(kind):
    inputs, state = make(kind, 20)
    run = partial(scan, kind)
    compiled = torch.compile(lambda *x: run(*x), fullgraph=True, backend="aot_eager")
    assert_all_exact(*(differentiated(f, [*inputs, *state]) for f in (compiled, run)))


@pytest.mark.parametrize(
    ("kind", "op"), [("head mean", "gated_scan"), ("latents", "running_softmax"), ("gated mean", "gated_mean")]
)
def test_other_dtypes_and_devices_are_refused(kind, op, monkeypatch):
    inputs, _ = make(kind, 3)
    for n in range(len(inputs)):
        wide = [x.double() if n == m else x for m, x in enumerate(inputs)]
        with pytest.raises(ValueError, match=f"'triton' of {op} computes in float32, bfloat16, float16, got .*float64"):
            scan(kind, *wide)
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match=rf"'triton' of {op} needs tensors on a CUDA device .*, got cpu"):
        scan(kind, *(x.cpu() for x in inputs))


# The gated scan.


@thinned(3, kind=("head mean", "channel mean"), dtype=LOW_PRECISION)
def test_strong_decays(kind, dtype):
    """Logarithms of decays from -1e-3 to -1e4 side by side, and some that forget all."""
    (*inputs, log_f), state = make(kind, 70, dtype)
    log_f = -(3 * random(*log_f.shape, seed=6)).exp().to(dtype)
    log_f[:, :, ::7] = -1e-3
    assert_is_the_definition(kind, [*inputs, log_f, *state], dtype, "torch")
    log_f[:, :, 40] = -torch.inf
    out, after, *gradients = differentiated(partial(scan, kind), [*inputs, log_f, *state])
    assert all(x.isfinite().all() for x in gradients)
    rest = [x[:, :, 40:] for x in (*inputs, log_f)]
    assert_results_in_budget(kind, (out[:, :, 40:], after), [*rest, *empty(state)], dtype)


@pytest.mark.parametrize("zero", [0, 1], ids=["q", "i"])
@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_a_token_without_any_weight_gives_zero_and_finite_gradients(zero, eps):
    inputs, _ = make("none mean", 20)
    inputs[zero][:, :, :7] = 0
    out, _, *gradients = differentiated(lambda *x: scan("none mean", *x, eps=eps), inputs)
    assert_exact(out[:, :, :7], torch.zeros_like(out[:, :, :7]))
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_sums_beyond_the_range_of_float16_are_finite(dtype):
    (q, i, v), state = make("none mean", 70, dtype)
    results = differentiated(partial(scan, "none mean"), [q, 100 * i, 300 * v, *state])
    assert results[1].abs().max() > torch.finfo(FP16).max
    assert all(x.isfinite().all() for x in results)


def test_inputs_of_several_dtypes():
    (q, i, v, log_f), state = make("channel mean", 20)
    inputs = [q, i.half(), v.bfloat16(), log_f, *state]
    results = assert_is_the_definition("channel mean", inputs, BF16, "torch")
    assert [x.dtype for x in results] == [BF16, FP32, FP32, FP16, BF16, FP32, FP32]


@thinned(3, kind=("channel mean", "none mean", "head"))
def test_the_scans_operations_keep_torchs_rules(kind):
    inputs, (state,) = make(kind, 3)
    inputs, normalise = (*inputs, None)[:4], "mean" in kind
    mask = torch.tensor([[True, False, True]], device=DEVICE)
    out, _, *kept = gated_scan_triton(*inputs, state, mask, normalise, EPS, True)
    arguments = (torch.ones_like(out), torch.ones_like(state), *inputs, mask, out, *kept, normalise)
    torch.library.opcheck(gated_scan_triton_backward, arguments, test_utils=ALONE)
    torch.library.opcheck(gated_scan_triton, (*inputs, None, None, normalise, EPS, False), test_utils=ALONE)
    arguments = [None if x is None else x.requires_grad_() for x in (*inputs, state)]
    torch.library.opcheck(gated_scan_triton, (*arguments, mask, normalise, EPS, True))


# The running softmax and the gated mean.


def test_an_lse_that_is_not_wanted_changes_nothing():
    kind = "latents"
    inputs, state = make(kind, 20)
    out, lse, *after = running_softmax(*inputs, state, None, want_lse=False)
    assert lse is None
    expected, _, *rest = scan(kind, *inputs, *state)
    assert_all_exact([out, *after], [expected, *rest])


EXTREMES = {
    "normal, 30": lambda x: 30 * x,
    "normal, 200": lambda x: 200 * x,
    "either end": lambda x: 1e4 * x.sign(),
    "rising": lambda x: torch.linspace(-1e4, 1e4, x.shape[2], device=x.device)[:, None] + x,
    "falling": lambda x: torch.linspace(1e4, -1e4, x.shape[2], device=x.device)[:, None] + x,
    "a late huge key": lambda x: torch.where(torch.arange(x.shape[2], device=x.device)[:, None] == 37, 1e4, x),
}


@short
@thinned(6, kind=SOFTMAXES[::-1], case=EXTREMES, dtype=LOW_PRECISION)
def test_extreme_logits(kind, case, dtype):
    (p, k, v), _ = make(kind, T)
    k = EXTREMES[case](k).to(dtype)
    if kind == "gated mean":  # a gate that is neither open nor shut
        p = p - k.double().logcumsumexp(2)
    inputs = [p.to(dtype), k, v.to(dtype)]
    # Where one key takes all, the gradient of logits is a difference of equal sums over time, each rounded on its own.
    key_gradient = 5 if kind in LATENTS else 4
    results = assert_is_the_definition(kind, inputs, dtype, leave_out=key_gradient if dtype == FP32 else None)
    assert all(x.isfinite().all() for x in results)


@short
@softmaxes
def test_before_the_first_real_token_there_is_nothing(kind):
    inputs, _ = make(kind, T)
    out, lse, *_ = scan(kind, *inputs, mask=torch.arange(T, device=DEVICE)[None] >= T - 4)
    assert_exact(out[:, :, :-4], torch.zeros_like(out[:, :, :-4]))
    assert kind not in LATENTS or (lse[:, :, :-4] == EMPTY).all()
    assert lse[:, :, -4:].isfinite().all()


@softmaxes
def test_logits_of_minus_infinity_weigh_nothing(kind):
    inputs, state = make(kind, 6)
    inputs[1][:, :, :3] = -torch.inf
    rest = [x[:, :, 3:] for x in inputs]
    measured, exact = (scan(kind, *(x.to(dtype) for x in rest), backend="reference") for dtype in (FP32, torch.float64))
    own = torch.zeros_like(inputs[2]) if kind in LATENTS else inputs[2]
    for out, *after in (scan(kind, *inputs), in_pieces(kind, inputs, empty(state), range(7))):
        assert_exact(out[:, :, :3], own[:, :, :3])
        for n, actual in zip((0, -2, -1), (out[:, :, 3:], *after[-2:]), strict=True):
            assert_in_budget(actual, measured[n], exact[n], FP32)


@softmaxes
def test_a_long_past_is_not_forgotten(kind):
    (p, k, v), (a, s) = make(kind, 1)
    zero = torch.zeros_like(k)
    a = torch.full_like(a, 20.0)
    for _ in range(3):
        *_, after, _ = scan(kind, p, zero, v, a, s)
        longer = scan(kind, *(x.expand(-1, -1, 20, -1) for x in (p, zero, v)), a, s)[-2]
        assert (after > a).all()
        assert (longer > after).all()
        a = after
    expected = torch.full_like(a, 3).div(torch.tensor(20.0).double().exp()).log1p()
    # 6e-9 beside 20: float64 leaves six digits of it.
    assert_in_budget(a - 20, expected, expected, torch.float16)


@short
@pytest.mark.parametrize("L", [1, 64])
def test_one_segment_or_several(monkeypatch, L):
    (p, k, v), state = make("latents", T, K=L)
    of = module.Tiles.of
    assert module.Plan.of(p, v).segments > 1
    monkeypatch.setattr(module.Tiles, "of", lambda *sizes: of(*sizes)._replace(programs=1))
    assert module.Plan.of(p, v).segments == 1
    assert_is_the_definition("latents", [p, k, v, *state], FP32)


@pytest.mark.parametrize(("programs", "chunks", "per"), [
    (32, 64, 8),  # 8 segments make 256 programs, one wave; 16 of 4 chunks would take two
    (40, 60, 10),  # 240 programs
    (133, 70, 10),  # 931 programs, 4 waves of 10 chunks; in one piece half of the device would walk over 70
    (264, 100, 100),  # a whole wave as it is
    (200, 64, 64),  # 5 segments in 4 waves of 13 chunks save less than the cut costs
    (528, 9, 9), (1, 3, 2), (1, 2, 2), (1, 1, 1), (0, 5, 5), (5, 0, 1),
])  # fmt: skip
def test_segments_fill_whole_waves(programs, chunks, per):
    assert module.chunks_per_segment(programs, chunks, 264) == per


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_probabilities_and_values_may_differ_in_dtype(dtype):
    (p, k, v), state = make("latents", 10)
    for inputs in ([p, k.to(dtype), v.to(dtype), *state], [p.to(dtype), k.to(dtype), v, *state]):
        assert assert_is_the_definition("latents", inputs, dtype)[0].dtype == inputs[2].dtype


def test_the_softmaxs_operations_keep_torchs_rules():
    inputs, (a, s) = make("latents", 3)
    mask = torch.ones(1, 3, dtype=torch.bool, device=DEVICE)
    leaves = [x.clone().requires_grad_() for x in (*inputs, a, s)]
    torch.library.opcheck(running_softmax_op, (*leaves[:3], mask, *leaves[3:], True, True))
    torch.library.opcheck(running_softmax_op, (*inputs, None, None, None, False, False), test_utils=ALONE)
    one = [x[:, :, :1] for x in inputs]
    torch.library.opcheck(running_softmax_op, (*one, None, a, s, True, False), test_utils=ALONE)
    out, lse, a_end, s_end, *saved = running_softmax_op(*inputs, mask, a, s, True, True)
    gradients = torch.ones_like(out), torch.ones_like(lse), torch.ones_like(a_end), None
    arguments = (*gradients, *inputs, mask, a, s, a_end, s_end, *saved)
    torch.library.opcheck(running_softmax_backward_op, arguments, test_utils=ALONE)
