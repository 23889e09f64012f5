"""The kernels of the running softmax against its definition, the recurrence token by token, in float64."""

from itertools import pairwise

import pytest
import torch

from subquad import ops
from subquad.ops._triton import common
from subquad.ops._triton import softmax as module
from subquad.ops._triton.softmax import running_softmax, running_softmax_backward_op, running_softmax_op
from subquad.testing.tools import LOW_PRECISION, assert_exact, assert_in_budget, mask_with
from tests.ops.cases import (
    ALONE,
    DEVICE,
    LAYOUTS,
    assert_all_exact,
    assert_all_in_budget,
    differentiated,
    plain_softmax,
    random,
    thinned,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EMPTY = -(2.0**100)
T = 40 if DEVICE == "cpu" else 70
"""Three chunks of 16 tokens or two of 64, in two segments."""
latents = pytest.mark.parametrize("L", [1, 10])
# Lengths around those of chunks, head sizes around those of tiles: tokens, L, V, size of the logits, dtype.
CASES = [
    (1, 10, 16, 1, FP32), (1, 1, 1, 1, BF16), (2, 1, 16, 1, FP32), (2, 43, 16, 1, FP16), (15, 10, 80, 3, BF16),
    (16, 43, 16, 3, FP32), (17, 1, 64, 3, FP16), (63, 64, 64, 1, FP16), (64, 1, 16, 1, FP32), (33, 10, 16, 1, FP32),
    (65, 64, 80, 1, BF16), (65, 10, 1, 3, FP32), (65, 1, 80, 3, BF16), (127, 10, 16, 3, FP16), (128, 43, 64, 1, BF16),
    (130, 10, 16, 1, FP16), (129, 1, 64, 1, FP16), (200, 64, 64, 1, BF16), (20, 10, 150, 1, BF16),
    (200, 1, 16, 1, FP32), (20, 130, 16, 1, FP32), (20, 130, 16, 1, BF16), (200, 10, 16, 1, BF16),
    (20, 1, 150, 1, FP32),
]  # fmt: skip
EXTREMES = {
    "normal, 30": lambda x: 30 * x,
    "normal, 200": lambda x: 200 * x,
    "either end": lambda x: 1e4 * x.sign(),
    "rising": lambda x: torch.linspace(-1e4, 1e4, x.shape[2], device=x.device)[:, None] + x,
    "falling": lambda x: torch.linspace(1e4, -1e4, x.shape[2], device=x.device)[:, None] + x,
    "a late huge key": lambda x: torch.where(torch.arange(x.shape[2], device=x.device)[:, None] == 37, 1e4, x),
}


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of 16 tokens in every dtype if interpreted: a chunk costs as much whatever its size."""
    if DEVICE == "cpu":
        of = module.Tiles.of
        monkeypatch.setattr(module.Tiles, "of", lambda *sizes: of(*sizes)._replace(chunk=16))


short = pytest.mark.usefixtures("short_chunks")


def make(tokens, L=10, V=16, size=1.0, dtype=FP32, *, batch=1, heads=1):
    """Return p(l | t), logits, values, and the lse and mean of a state."""
    shape = (batch, heads, tokens)
    p = random(*shape, L, seed=1).softmax(-1).to(dtype)
    logits = (size * random(*shape, L, seed=2)).to(dtype)
    v = random(*shape, V, seed=3, dtype=dtype)
    return [p, logits, v, random(batch, heads, L, seed=4), random(batch, heads, L, V, seed=5, dtype=FP32)]


def kernels(p, logits, v, a=None, s=None, *, mask=None):
    return running_softmax(p, logits, v, None if a is None else (a, s), mask)


def reference(p, logits, v, a=None, s=None, *, mask=None, backend="reference"):
    state = None if a is None else (a, s)
    out, state, lse = ops.running_softmax(p, logits, v, state=state, mask=mask, backend=backend)
    return out, lse, *state


def chunked(*inputs, **options):
    """The `torch` backend, whose gradients come of the same formulas."""
    return reference(*inputs, backend="torch", **options)


def assert_is_the_softmax(inputs, dtype, measure=plain_softmax, results=slice(None), leave_out=None, **options):
    """Return results and gradients, whose errors are at most twice those of the measure in this dtype."""
    forms = (kernels, inputs), (measure, inputs), (reference, [x.double() for x in inputs])
    found = [differentiated(lambda *x, f=f: f(*x, **options)[results], x) for f, x in forms]
    compared = [[y for n, y in enumerate(ys) if n != leave_out] for ys in found]
    assert_all_in_budget(*compared, dtype)
    return found[0]


def assert_results_in_budget(actual, inputs, dtype, **options):
    """Compare results whose errors are at most twice those of the plain form in this dtype."""
    actual, measured = list(actual), plain_softmax(*inputs, **options)[: len(actual)]
    exact = reference(*(x.double() for x in inputs), **options)[: len(actual)]
    assert_all_in_budget(actual, measured, exact, dtype)


@thinned(3, case=CASES)
def test_outputs_states_and_gradients(case):
    tokens, L, V, size, dtype = case
    assert_is_the_softmax(make(tokens, L, V, size, dtype), dtype)


@short
@thinned(2, L=(10, 1))
def test_it_begins_with_an_empty_state(L):
    p, k, v, a, s = make(T, L)
    empty = torch.full_like(a, EMPTY), torch.zeros_like(s)
    expected = assert_is_the_softmax([p, k, v], FP32)
    assert_all_exact(differentiated(lambda *x: kernels(*x, *empty), [p, k, v]), expected)


@thinned(2, L=(1, 10), which=range(4))
def test_each_result_has_its_own_gradients(L, which):
    assert_is_the_softmax(make(70, L), FP32, chunked, slice(which, which + 1))


@latents
def test_an_lse_that_is_not_wanted_changes_nothing(L):
    p, k, v, a, s = make(20, L)
    out, lse, *state = running_softmax(p, k, v, (a, s), None, want_lse=False)
    assert lse is None
    expected, _, *after = kernels(p, k, v, a, s)
    assert_all_exact([out, *state], [expected, *after])


@short
@thinned(6, L=(1, 10), case=EXTREMES, dtype=LOW_PRECISION)
def test_extreme_logits(L, case, dtype):
    p, k, v, *_ = make(T, L)
    inputs = [p.to(dtype), EXTREMES[case](k).to(dtype), v.to(dtype)]
    # Where one key takes all, the gradient of logits is a difference of equal sums over time, each rounded on its own.
    results = assert_is_the_softmax(inputs, dtype, leave_out=5 if dtype == FP32 else None)
    assert all(x.isfinite().all() for x in results)


@short
@thinned(5, L=(1, 10), dtype=LOW_PRECISION, size=(1.0, 30.0, 1e4))
def test_no_bit_depends_on_the_future(L, dtype, size):
    p, k, v, *state = make(T, L, size=size, dtype=dtype)
    expected = kernels(p, k, v, *state)[:2]
    for now in (5, 31, T - 7):
        later = torch.arange(T, device=p.device)[:, None] > now
        others = [torch.where(later, x, y) for x, y in ((p.flip(2), p), (1e4 * k.sign(), k), (1e4 * v, v))]
        for before, after in zip(expected, kernels(*others, *state)[:2], strict=True):
            assert_exact(after[:, :, : now + 1], before[:, :, : now + 1])
            assert after.isfinite().all()


@short
@latents
def test_padding_does_not_exist(L):
    mask = mask_with([(9, T - 15, 6), (0, T - 7, 7)]).to(DEVICE)
    p, k, v, *state = make(T, L, size=2.0, batch=2, heads=2)
    results = assert_is_the_softmax([p, k, v, *state], FP32, mask=mask)
    padded = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (p, k, v)]
    assert_all_exact(differentiated(lambda *x: kernels(*x, mask=mask), [*padded, *state]), results)
    for x in (results[0], *results[4:7]):
        x = x.transpose(1, 2)[~mask]
        assert_exact(x, torch.zeros_like(x))


@short
@latents
def test_before_the_first_real_token_there_is_nothing(L):
    p, k, v, a, s = make(T, L)
    mask = torch.arange(T, device=DEVICE)[None] >= T - 4
    out, lse, *_ = kernels(p, k, v, mask=mask)
    assert_exact(out[:, :, :-4], torch.zeros_like(out[:, :, :-4]))
    assert (lse[:, :, :-4] == EMPTY).all()
    assert lse[:, :, -4:].isfinite().all()
    empty = torch.full_like(a, EMPTY), torch.zeros_like(s)
    for state, expected in (((a, s), (a, s)), ((), empty)):
        _, _, *after = kernels(p, k, v, *state, mask=torch.zeros_like(mask))
        assert_all_in_budget(after, expected, expected, FP32)


@latents
def test_logits_of_minus_infinity_weigh_nothing(L):
    p, k, v, *_ = make(6, L)
    k[:, :, :3] = -torch.inf
    steps, state = [], ()
    for t in range(6):
        out, _, *state = kernels(*(x[:, :, t : t + 1] for x in (p, k, v)), *state)
        steps.append(out)
    rest = [x[:, :, 3:] for x in (p, k, v)]
    measured, exact = (reference(*(x.to(dtype) for x in rest)) for dtype in (FP32, torch.float64))
    for out, _, *after in (kernels(p, k, v), (torch.cat(steps, 2), None, *state)):
        assert_exact(out[:, :, :3], torch.zeros_like(out[:, :, :3]))
        for n, actual in zip((0, 2, 3), (out[:, :, 3:], *after), strict=True):
            assert_in_budget(actual, measured[n], exact[n], FP32)


@short
@thinned(2, L=(1, 10), dtype=LOW_PRECISION)
def test_it_may_be_cut_anywhere(L, dtype):
    inputs = make(T, L, dtype=dtype)
    for cuts in ([0, 1, 17, T - 1], [32]):
        outs, state = [], inputs[3:]
        for start, stop in pairwise([0, *cuts, T]):
            out, lse, *state = kernels(*(x[:, :, start:stop] for x in inputs[:3]), *state)
            outs.append((out, lse))
        assert_results_in_budget([*(torch.cat(x, 2) for x in zip(*outs, strict=True)), *state], inputs, dtype)


@latents
@pytest.mark.parametrize(("batch", "heads", "tokens"), [(1, 2, 0), (0, 2, 5), (2, 0, 5)])
def test_nothing_at_all(L, batch, heads, tokens):
    *inputs, a, s = make(tokens, L, batch=batch, heads=heads)
    out, lse, *state_and_gradients = differentiated(kernels, [*inputs, a, s])
    assert (out.shape, lse.shape) == ((batch, heads, tokens, 16), (batch, heads, tokens, L))
    expected = differentiated(lambda p, k, v, a, s: (out, lse, a, s), [*inputs, a, s])[2:]
    assert_all_exact(state_and_gradients, expected)
    assert_all_exact(kernels(*inputs)[2:], [torch.full_like(a, EMPTY), torch.zeros_like(s)])


@thinned(3, L=(10, 1), dtype=LOW_PRECISION)
def test_a_token_at_a_time_is_one_launch_each(L, dtype, monkeypatch):
    launched, launch = [], common.launch
    monkeypatch.setattr(common, "launch", lambda kernel, *x, **y: launched.append(kernel) or launch(kernel, *x, **y))
    inputs = make(4, L, V=70, dtype=dtype, batch=2)
    outs, state = [], inputs[3:]
    for t in range(4):
        out, lse, *state = kernels(*(x[:, :, t : t + 1] for x in inputs[:3]), *state)
        outs.append((out, lse))
    assert len(launched) == 4
    assert_results_in_budget([*(torch.cat(x, 2) for x in zip(*outs, strict=True)), *state], inputs, dtype)
    p, k, v, *state = (x[:, :, :1] if x.shape[2] == 4 else x for x in inputs)
    out, lse, a, s = kernels(p, k, v, *state, mask=torch.tensor([[True], [False]], device=DEVICE))
    assert_exact(out[1], torch.zeros_like(out[1]))
    assert_all_exact([a[1], s[1], lse[1, :, 0]], [state[0][1], state[1][1], state[0][1].float()])
    assert_all_exact([x[0] for x in (out, a, s)], [x[0] for x in (kernels(p, k, v, *state)[i] for i in (0, 2, 3))])


def test_a_long_past_is_not_forgotten():
    p, k, v, a, s = make(1)
    zero = torch.zeros_like(k)
    a = torch.full_like(a, 20.0)
    for _ in range(3):
        _, _, after, _ = kernels(p, zero, v, a, s)
        longer = kernels(*(x.expand(-1, -1, 20, -1) for x in (p, zero, v)), a, s)[2]
        assert (after > a).all()
        assert (longer > after).all()
        a = after
    expected = torch.full_like(a, 3).div(torch.tensor(20.0).double().exp()).log1p()
    # 6e-9 beside 20: float64 leaves six digits of it.
    assert_in_budget(a - 20, expected, expected, torch.float16)


@thinned(4, L=(1, 10), layout=LAYOUTS)
def test_strides_change_nothing(L, layout):
    def gradients(inputs, expand):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, *results = kernels(*leaves, *state)
        gradient = expand(torch.ones((), device=DEVICE).expand(out.shape))
        return [out, *results, *torch.autograd.grad(out, leaves, gradient)]

    *inputs, a, s = make(5, L, batch=2, heads=2)
    state, strided = (a, s), [LAYOUTS[layout](x) for x in inputs]
    expected = gradients([x.contiguous() for x in strided], torch.Tensor.contiguous)
    assert_all_exact(gradients(strided, lambda gradient: gradient), expected)


@short
@pytest.mark.parametrize("L", [1, 64])
def test_one_segment_or_several(monkeypatch, L):
    inputs, of = make(T, L), module.Tiles.of
    assert module.Plan.of(inputs[0], inputs[2]).segments > 1
    monkeypatch.setattr(module.Tiles, "of", lambda *sizes: of(*sizes)._replace(programs=1))
    assert module.Plan.of(inputs[0], inputs[2]).segments == 1
    assert_is_the_softmax(inputs, FP32)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_probabilities_and_values_may_differ_in_dtype(dtype):
    p, k, v, a, s = make(10)
    for inputs in ([p, k.to(dtype), v.to(dtype), a, s], [p.to(dtype), k.to(dtype), v, a, s]):
        assert assert_is_the_softmax(inputs, dtype)[0].dtype == inputs[2].dtype


@thinned(2, L=(10, 1))
def test_it_keeps_torchs_rules(L):
    *inputs, a, s = make(3, L)
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


@thinned(2, L=(10, 1))
def test_it_compiles(L):
    inputs = make(20, L)
    compiled = torch.compile(lambda *x: kernels(*x), fullgraph=True, backend="aot_eager")
    assert_all_exact(differentiated(compiled, inputs), differentiated(kernels, inputs))


def test_what_kernels_cannot_run_on_is_refused(monkeypatch):
    p, k, v, *state = make(5)
    with pytest.raises(ValueError, match=r"running_softmax computes in float32, bfloat16, float16, got torch\.float64"):
        kernels(p, k.double(), v, *state)
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"running_softmax needs tensors on a CUDA device .* got cpu"):
        kernels(*(x.cpu() for x in (p, k, v, *state)))
