"""The kernels of the running softmax against its definition, the recurrence token by token, in float64."""

from itertools import pairwise

import pytest
import torch

from subquad import ops
from subquad.ops._triton import common
from subquad.ops._triton import softmax as module
from subquad.ops._triton.softmax import running_softmax, running_softmax_backward_op, running_softmax_op
from subquad.testing.tools import LOW_PRECISION, assert_exact, assert_in_budget, mask_with

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EMPTY = -(2.0**100)
latents = pytest.mark.parametrize("L", [1, 10])
# Lengths around those of chunks, head sizes around those of tiles: tokens, L, V, size of the logits, dtype.
CASES = [
    (1, 10, 16, 1, FP32),
    (1, 1, 1, 1, BF16),
    (2, 1, 16, 1, FP32),
    (2, 43, 16, 1, FP16),
    (15, 10, 80, 3, BF16),
    (16, 43, 16, 3, FP32),
    (17, 1, 64, 3, FP16),
    (63, 64, 64, 1, FP16),
    (64, 1, 16, 1, FP32),
    (64, 10, 16, 1, BF16),
    (65, 64, 80, 1, BF16),
    (65, 10, 1, 3, FP32),
    (127, 1, 80, 3, BF16),
    (127, 10, 16, 3, FP16),
    (128, 43, 64, 1, BF16),
    (129, 10, 16, 1, FP32),
    (129, 1, 64, 1, FP16),
    (200, 64, 64, 1, BF16),
    (200, 10, 16, 1, FP16),
    (200, 1, 16, 1, FP32),
    (20, 130, 16, 1, FP32),
    (70, 130, 16, 1, BF16),
    (20, 10, 150, 1, BF16),
    (20, 1, 150, 1, FP32),
]
EXTREMES = {
    "normal, 30": lambda x: 30 * x,
    "normal, 200": lambda x: 200 * x,
    "either end": lambda x: 1e4 * x.sign(),
    "rising": lambda x: torch.linspace(-1e4, 1e4, x.shape[2], device=x.device)[:, None] + x,
    "falling": lambda x: torch.linspace(1e4, -1e4, x.shape[2], device=x.device)[:, None] + x,
    "a late huge key": lambda x: torch.where(torch.arange(x.shape[2], device=x.device)[:, None] == 37, 1e4, x),
}
LAYOUTS = {
    "heads inside tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]],
    "channels apart": lambda x: x.mT.contiguous().mT,
    "one token for all": lambda x: x[:, :, :1].expand_as(x),
    "one number for all": lambda x: x[:1, :1, :1, :1].expand_as(x),
}


@pytest.fixture
def make(random):
    """p(l | t), logits, values, and the lse and mean of a state."""

    def inputs(tokens, L=10, V=16, size=1.0, dtype=FP32, *, batch=1, heads=1):
        shape = (batch, heads, tokens)
        p = random(*shape, L, seed=1).softmax(-1).to(dtype)
        logits = (size * random(*shape, L, seed=2)).to(dtype)
        v = random(*shape, V, seed=3, dtype=dtype)
        return [p, logits, v, random(batch, heads, L, seed=4), random(batch, heads, L, V, seed=5, dtype=FP32)]

    return inputs


def kernels(p, logits, v, a=None, s=None, *, mask=None):
    return running_softmax(p, logits, v, None if a is None else (a, s), mask)


def reference(p, logits, v, a=None, s=None, *, mask=None, backend="reference"):
    state = None if a is None else (a, s)
    out, state, lse = ops.running_softmax(p, logits, v, state=state, mask=mask, backend=backend)
    return out, lse, *state


def plain(p, logits, v, a=None, s=None, *, mask=None):
    """Every weight, in the dtype of the inputs; a state is one token more, with a value of its own for each latent."""
    if mask is not None:
        fills = (0.0, -torch.inf, 0.0)
        p, logits, v = (x.masked_fill(~mask[:, None, :, None], y) for x, y in zip((p, logits, v), fills, strict=True))
    T, L, V = v.shape[2], p.shape[3], v.shape[3]
    k_BHSL = logits if a is None else torch.cat([a[:, :, None].to(logits.dtype), logits], 2)
    future_TS1 = torch.ones(T, k_BHSL.shape[2], dtype=torch.bool, device=v.device).triu(1 + k_BHSL.shape[2] - T)[
        ..., None
    ]
    k_BHTSL = k_BHSL[:, :, None].expand(-1, -1, T, -1, -1).masked_fill(future_TS1, -torch.inf)
    v_BHLSV = v[:, :, None].expand(-1, -1, L, -1, V)
    v_BHLSV = v_BHLSV if s is None else torch.cat([s[:, :, :, None].to(v.dtype), v_BHLSV], 3)
    means_BHLTV = k_BHTSL.softmax(3).permute(0, 1, 4, 2, 3).to(v.dtype) @ v_BHLSV
    lse_BHTL = k_BHTSL.logsumexp(3)
    out = torch.einsum("bhtl,bhltv->bhtv", p.to(v.dtype), means_BHLTV)
    return out, lse_BHTL, lse_BHTL[:, :, -1], means_BHLTV[:, :, :, -1]


NAMES = ("out", "lse", "final lse", "final mean", "dp", "dlogits", "dv", "d initial lse", "d initial mean")


def assert_is_the_softmax(differentiated, inputs, dtype, measure=plain, names=NAMES, **options):
    """Results and gradients with an error of at most twice that of the measure in this dtype."""
    actual = differentiated(lambda *x: kernels(*x, **options), inputs)
    exact = differentiated(lambda *x: reference(*x, **options), [x.double() for x in inputs])
    measured = differentiated(lambda *x: measure(*x, **options), inputs)
    for name, a, m, e in zip(names, actual, measured, exact, strict=False):
        assert_in_budget(a, m, e, dtype, name)


def assert_results_in_budget(actual, inputs, dtype, **options):
    """Results with an error of at most twice that of the plain form in this dtype."""
    exact = reference(*(x.double() for x in inputs), **options)
    for name, a, m, e in zip(NAMES, actual, plain(*inputs, **options), exact, strict=False):
        assert_in_budget(a, m, e, dtype, name)


def assert_all_exact(actual, expected):
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_exact(a, e, f"result {n}")


def chunked(*inputs, **options):
    """The `torch` backend, whose gradients come of the same formulas."""
    return reference(*inputs, backend="torch", **options)


@pytest.mark.thinned(3, case=CASES)
def test_outputs_states_and_gradients(make, differentiated, case):
    tokens, L, V, size, dtype = case
    assert_is_the_softmax(differentiated, make(tokens, L, V, size, dtype), dtype)


@pytest.mark.thinned(2, L=(10, 1))
def test_it_begins_with_an_empty_state(make, differentiated, L):
    p, k, v, a, s = make(70, L)
    results = [
        differentiated(lambda *x, state=state: kernels(*x, *state), [p, k, v])
        for state in ((), (torch.full_like(a, EMPTY), torch.zeros_like(s)))
    ]
    assert_all_exact(*results)
    assert_is_the_softmax(differentiated, [p, k, v], FP32, names=(*NAMES[:4], "dp", "dlogits", "dv"))


@pytest.mark.thinned(2, L=(1, 10), which=range(4))
def test_each_result_has_its_own_gradients(make, differentiated, L, which):
    inputs = make(70, L)
    forms = [lambda *x, f=f: f(*x)[which : which + 1] for f in (kernels, chunked, reference)]
    names = (NAMES[which], *NAMES[4:])
    actual, measured = (differentiated(form, inputs) for form in forms[:2])
    exact = differentiated(forms[2], [x.double() for x in inputs])
    for name, a, m, e in zip(names, actual, measured, exact, strict=True):
        assert_in_budget(a, m, e, FP32, name)


@latents
def test_an_lse_that_is_not_wanted_changes_nothing(make, L):
    p, k, v, a, s = make(20, L)
    out, lse, *state = running_softmax(p, k, v, (a, s), None, want_lse=False)
    assert lse is None
    expected, _, *after = kernels(p, k, v, a, s)
    assert_all_exact([out, *state], [expected, *after])


@pytest.mark.thinned(6, L=(1, 10), case=EXTREMES, dtype=LOW_PRECISION)
def test_extreme_logits(make, differentiated, L, case, dtype):
    p, k, v, *_ = make(70, L)
    inputs = [p.to(dtype), EXTREMES[case](k).to(dtype), v.to(dtype)]
    names = [*NAMES[:4], "dp", "dlogits", "dv"]
    actual, measured = (differentiated(form, inputs) for form in (kernels, plain))
    exact = differentiated(reference, [x.double() for x in inputs])
    for name, a, m, e in zip(names, actual, measured, exact, strict=True):
        assert a.isfinite().all()
        # Where one key takes all, this gradient is a difference of equal sums over time, each rounded on its own.
        if not (name == "dlogits" and dtype == FP32):
            assert_in_budget(a, m, e, dtype, name)


@pytest.mark.thinned(5, L=(1, 10), dtype=LOW_PRECISION, size=(1.0, 30.0, 1e4))
def test_no_bit_depends_on_the_future(make, L, dtype, size):
    p, k, v, *state = make(70, L, size=size, dtype=dtype)
    for now in (5, 40, 63):
        later = torch.arange(70, device=p.device)[:, None] > now
        others = [torch.where(later, x, y) for x, y in ((p.flip(2), p), (1e4 * k.sign(), k), (1e4 * v, v))]
        for before, after in zip(kernels(p, k, v, *state)[:2], kernels(*others, *state)[:2], strict=True):
            assert_exact(after[:, :, : now + 1], before[:, :, : now + 1])
            assert after.isfinite().all()


@latents
def test_padding_does_not_exist(make, differentiated, device, L):
    mask = mask_with([(9, 55, 6), (0, 63, 7)]).to(device)
    p, k, v, *state = make(70, L, size=3.0, batch=2)
    results = []
    for rubbish in (0.0, torch.nan):
        padded = [x.masked_fill(~mask[:, None, :, None], rubbish) for x in (p, k, v)]
        results.append(differentiated(lambda *x: kernels(*x, mask=mask), [*padded, *state]))
    assert_all_exact(*results)
    out, *_ = results[0]
    for x in (out, *results[0][4:7]):
        x = x.transpose(1, 2)[~mask]
        assert_exact(x, torch.zeros_like(x))
    assert_is_the_softmax(differentiated, [p, k, v, *state], FP32, mask=mask)


@latents
def test_before_the_first_real_token_there_is_nothing(make, device, L):
    p, k, v, a, s = make(70, L)
    mask = torch.arange(70, device=device)[None] >= 66
    out, lse, *_ = kernels(p, k, v, mask=mask)
    assert_exact(out[:, :, :66], torch.zeros_like(out[:, :, :66]))
    assert (lse[:, :, :66] == EMPTY).all()
    assert lse[:, :, 66:].isfinite().all()
    for empty, state in ((False, (a, s)), (True, ())):
        _, _, after, mean = kernels(p, k, v, *state, mask=torch.zeros_like(mask))
        expected = (torch.full_like(a, EMPTY), torch.zeros_like(s)) if empty else (a, s)
        assert_in_budget(after, expected[0], expected[0], FP32)
        assert_in_budget(mean, expected[1], expected[1], FP32)


@latents
def test_logits_of_minus_infinity_weigh_nothing(make, device, L):
    p, k, v, *_ = make(6, L)
    k[:, :, :3] = -torch.inf
    steps, state = [], ()
    for t in range(6):
        out, _, *state = kernels(*(x[:, :, t : t + 1] for x in (p, k, v)), *state)
        steps.append(out)
    rest = [x[:, :, 3:] for x in (p, k, v)]
    exact, plain = (
        (y.out, *y.state)
        for y in (
            ops.running_softmax(*(x.to(dtype) for x in rest), backend="reference") for dtype in (torch.float64, FP32)
        )
    )
    for out, _, *after in (kernels(p, k, v), (torch.cat(steps, 2), None, *state)):
        assert_exact(out[:, :, :3], torch.zeros_like(out[:, :, :3]))
        for n, actual in enumerate((out[:, :, 3:], *after)):
            assert_in_budget(actual, plain[n], exact[n], FP32)


@pytest.mark.thinned(2, L=(1, 10), dtype=LOW_PRECISION)
def test_it_may_be_cut_anywhere(make, L, dtype):
    inputs = make(70, L, dtype=dtype)
    for cuts in ([0, 1, 17, 69], [64]):
        outs, state = [], inputs[3:]
        for start, stop in pairwise([0, *cuts, 70]):
            out, lse, *state = kernels(*(x[:, :, start:stop] for x in inputs[:3]), *state)
            outs.append((out, lse))
        assert_results_in_budget([*(torch.cat(x, 2) for x in zip(*outs, strict=True)), *state], inputs, dtype)


@latents
def test_no_token_leaves_the_state(make, differentiated, L):
    inputs = make(0, L)
    out, lse, a, s = kernels(*inputs)
    assert (out.shape, lse.shape) == ((1, 1, 0, 16), (1, 1, 0, L))
    assert_all_exact([a, s], inputs[3:])
    *_, da, ds = differentiated(lambda *x: kernels(*x), inputs)
    assert_all_exact([da, ds], differentiated(lambda a, s: (out, lse, a, s), inputs[3:])[-2:])
    _, _, a, s = kernels(*inputs[:3])
    assert_all_exact([a, s], [torch.full_like(a, EMPTY), torch.zeros_like(s)])


@latents
@pytest.mark.parametrize("empty", ["batch", "heads"])
def test_nothing_gives_nothing(make, differentiated, L, empty):
    inputs = [x[:0] if empty == "batch" else x[:, :0] for x in make(20, L)]
    for x, y in zip(differentiated(kernels, inputs), [*reference(*inputs), *inputs], strict=True):
        assert_exact(x, torch.zeros_like(y).to(x.dtype))


@pytest.mark.thinned(2, L=(10, 1))
def test_rows_of_a_batch_are_alone(make, differentiated, L):
    inputs = make(70, L, batch=2, heads=2)
    whole = differentiated(kernels, inputs)[:4]
    for b in range(2):
        for h in range(2):
            alone = [x[b : b + 1, h : h + 1] for x in inputs]
            assert_results_in_budget([x[b : b + 1, h : h + 1] for x in whole], alone, FP32)


@pytest.mark.thinned(3, L=(10, 1), dtype=LOW_PRECISION)
def test_a_token_at_a_time(make, device, L, dtype):
    inputs = make(6, L, V=70, dtype=dtype, batch=2)
    outs, state = [], inputs[3:]
    for t in range(6):
        out, lse, *state = kernels(*(x[:, :, t : t + 1] for x in inputs[:3]), *state)
        outs.append((out, lse))
    assert_results_in_budget([*(torch.cat(x, 2) for x in zip(*outs, strict=True)), *state], inputs, dtype)
    p, k, v, *state = (x[:, :, :1] if x.shape[2] == 6 else x for x in inputs)
    out, lse, a, s = kernels(p, k, v, *state, mask=torch.tensor([[True], [False]], device=device))
    assert_exact(out[1], torch.zeros_like(out[1]))
    assert_all_exact([a[1], s[1], lse[1, :, 0]], [state[0][1], state[1][1], state[0][1].float()])
    assert_all_exact([x[0] for x in (out, a, s)], [x[0] for x in (kernels(p, k, v, *state)[i] for i in (0, 2, 3))])


def test_one_token_is_one_launch(make, monkeypatch):
    launched = []
    launch = common.launch

    def counted(kernel, *arguments, **constants):
        launched.append(kernel)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(common, "launch", counted)
    kernels(*make(1))
    assert len(launched) == 1


def test_a_long_past_is_not_forgotten(make):
    p, k, v, a, s = make(1)
    zero = torch.zeros_like(k)
    a = torch.full_like(a, 20.0)
    for _ in range(3):
        _, _, after, _ = kernels(p, zero, v, a, s)
        longer = kernels(*(x.expand(-1, -1, 70, -1) for x in (p, zero, v)), a, s)[2]
        assert (after > a).all()
        assert (longer > after).all()
        a = after
    expected = torch.full_like(a, 3).div(torch.tensor(20.0).double().exp()).log1p()
    # 6e-9 beside 20: float64 leaves six digits of it.
    assert_in_budget(a - 20, expected, expected, torch.float16)


@pytest.mark.thinned(4, L=(1, 10), layout=LAYOUTS)
def test_strides_change_nothing(make, differentiated, L, layout):
    inputs = make(20, L, batch=2, heads=2)
    strided = [LAYOUTS[layout](x) for x in inputs[:3]]

    def gradients(p, k, v):
        leaves = [x.detach().requires_grad_() for x in (p, k, v)]
        out, lse, *state = kernels(*leaves, *inputs[3:])
        gradient = torch.ones((), device=out.device).expand(out.shape)
        return [out.detach(), lse.detach(), *state, *torch.autograd.grad(out, leaves, gradient)]

    assert_all_exact(gradients(*strided), gradients(*(x.contiguous() for x in strided)))


@pytest.mark.parametrize("L", [1, 64])
def test_one_segment_or_several(make, differentiated, monkeypatch, L):
    inputs = make(200, L)
    cut = module.Plan.of(inputs[0], inputs[2])
    assert cut.segments > 1
    monkeypatch.setattr(module.Tiles, "of", lambda L, V, dtype: cut.tile._replace(programs=1))
    assert module.Plan.of(inputs[0], inputs[2]).segments == 1
    assert_is_the_softmax(differentiated, inputs, FP32)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_probabilities_and_values_may_differ_in_dtype(make, differentiated, dtype):
    p, k, v, a, s = make(20)
    for inputs in ([p, k.to(dtype), v.to(dtype), a, s], [p.to(dtype), k.to(dtype), v, a, s]):
        assert_is_the_softmax(differentiated, inputs, dtype)
        assert kernels(*inputs)[0].dtype == inputs[2].dtype


@pytest.mark.thinned(2, L=(10, 1))
def test_it_keeps_torchs_rules(make, device, L):
    p, k, v, a, s = (x.requires_grad_() for x in make(70, L, V=16))
    mask = torch.ones(1, 70, dtype=torch.bool, device=device)
    torch.library.opcheck(running_softmax_op, (p, k, v, mask, a, s, True, True))
    p, k, v, a, s = (x.detach() for x in (p, k, v, a, s))
    torch.library.opcheck(running_softmax_op, (p, k, v, None, None, None, False, False))
    torch.library.opcheck(running_softmax_op, (p[:, :, :1], k[:, :, :1], v[:, :, :1], None, a, s, True, False))
    out, lse, a_end, s_end, *saved = running_softmax_op(p, k, v, mask, a, s, True, True)
    gradients = torch.ones_like(out), torch.ones_like(lse), torch.ones_like(a_end), None
    torch.library.opcheck(running_softmax_backward_op, (*gradients, p, k, v, mask, a, s, a_end, s_end, *saved))


@pytest.mark.thinned(2, L=(10, 1))
def test_it_compiles(make, differentiated, L):
    inputs = make(70, L)
    compiled = torch.compile(lambda *x: kernels(*x), fullgraph=True, backend="aot_eager")
    assert_all_exact(differentiated(compiled, inputs), differentiated(kernels, inputs))


def test_what_kernels_cannot_run_on_is_refused(make, monkeypatch):
    p, k, v, *state = make(5)
    with pytest.raises(ValueError, match=r"running_softmax computes in float32, bfloat16, float16, got torch\.float64"):
        kernels(p, k.double(), v, *state)
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"running_softmax needs tensors on a CUDA device .* got cpu"):
        kernels(*(x.cpu() for x in (p, k, v, *state)))
