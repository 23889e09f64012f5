"""Engine A against its definition, which the `reference` backend is: the recurrence, one token at a time."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subquad.ops import SoftmaxState, gated_scan, running_logsumexp, running_softmax
from subquad.ops import softmax as engine
from subquad.ops._torch import halves
from subquad.ops._torch import softmax as chunked
from subquad.ops._torch.halves import running_logsumexp_backward_op, running_logsumexp_op
from subquad.ops._torch.scan import gated_scan_backward_op, gated_scan_op
from subquad.ops._torch.softmax import EMPTY, running_softmax_backward_op, running_softmax_op
from subquad.testing import LOW_PRECISION, assert_exact, assert_in_budget, assert_same_maths, mask_with

B, H, K, V = 2, 2, 6, 5
backends = pytest.mark.parametrize("backend", ["reference", "torch"])
decays = pytest.mark.parametrize("decay", ["none", "head", "channel"])
normalised = pytest.mark.parametrize("normalise", [False, True])
dtypes = pytest.mark.parametrize("dtype", LOW_PRECISION)
fixtures_in_given = [HealthCheck.function_scoped_fixture]
lengths = st.one_of(st.integers(0, 10), st.integers(11, 150))
chunk_sizes = st.sampled_from([None, 1, 3, 5, 8, 16, 64])


@pytest.fixture
def gated(random):
    """Queries, inputs, values, and log decays where asked; weights are positive, so that totals are."""

    def make(tokens, decay="none", dtype=torch.float64, batch=B, strength=3.0):
        channels = {"none": 0, "head": 1, "channel": K}[decay]
        q, i = (random(batch, H, tokens, K, seed=n, dtype=dtype).abs() for n in (1, 2))
        v = random(batch, H, tokens, V, seed=3, dtype=dtype)
        log_f = [-strength * random(batch, H, tokens, channels, seed=4, dtype=dtype).abs()] if channels else []
        return [q, i, v, *log_f]

    return make


@pytest.fixture
def soft(random):
    """p(l | t), logits that reach about `sharpness`, values."""

    def make(tokens, dtype=torch.float64, batch=B, sharpness=3.0):
        p = random(batch, H, tokens, K, seed=1).softmax(-1).to(dtype)
        logits = (random(batch, H, tokens, K, seed=2).clamp(-1, 1) * sharpness).to(dtype)
        return [p, logits, random(batch, H, tokens, V, seed=3, dtype=dtype)]

    return make


def scan(q, i, v, log_f=None, **options):
    return tuple(gated_scan(q, i, v, log_f, **options))


def softmax(p, logits, v, a=None, s=None, **options):
    out, state, lse = running_softmax(p, logits, v, state=None if a is None else (a, s), **options)
    return out, lse, *state


def assert_all_same_maths(actual, expected, what=""):
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_same_maths(a, e, f"{what}, result {n}")


# The gated scan.


def test_gated_scan_by_hand():
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


@decays
@normalised
@settings(max_examples=15, suppress_health_check=fixtures_in_given)
@given(tokens=lengths, chunk_size=chunk_sizes, eps=st.sampled_from([0.0, 0.1]))
def test_gated_scan_is_its_definition(random, gated, differentiated, decay, normalise, tokens, chunk_size, eps):
    inputs = gated(tokens, decay)
    before = random(B, H, K, V + normalise, seed=5).abs()

    def run(backend):
        def f(state, *x):
            return scan(*x, state=state, normalise=normalise, eps=eps, chunk_size=chunk_size, backend=backend)

        return f

    assert_all_same_maths(
        differentiated(run("torch"), [before, *inputs]), differentiated(run("reference"), [before, *inputs])
    )


@decays
@normalised
def test_gated_scan_begins_with_an_empty_state(gated, differentiated, decay, normalise):
    inputs = gated(70, decay)
    results = [
        differentiated(lambda *x, b=b: scan(*x, normalise=normalise, backend=b), inputs) for b in ("torch", "reference")
    ]
    assert_all_same_maths(*results)
    zeros = torch.zeros(B, H, K, V + normalise, dtype=torch.float64)
    assert_all_same_maths(scan(*inputs, normalise=normalise, state=zeros), results[0][:2])


@decays
@normalised
@settings(max_examples=10, suppress_health_check=fixtures_in_given)
@given(cuts=st.lists(st.integers(0, 70), min_size=1, max_size=3))
def test_gated_scan_may_be_cut_anywhere(gated, decay, normalise, cuts):
    inputs = gated(70, decay)
    state, outs = None, []
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 70], strict=True):
        out, state = scan(*(x[:, :, start:stop] for x in inputs), state=state, normalise=normalise)
        outs.append(out)
    assert_all_same_maths((torch.cat(outs, 2), state), scan(*inputs, normalise=normalise))


@backends
@decays
@normalised
def test_gated_scan_does_not_see_padding(gated, differentiated, decay, normalise, backend):
    mask = mask_with([(9, 25, 6), (0, 33, 7)])
    inputs = gated(40, decay)
    out, state, *gradients = differentiated(
        lambda *x: scan(*x, mask=mask, normalise=normalise, backend=backend), inputs
    )
    for b in range(B):
        real = [x[b : b + 1, :, mask[b]] for x in inputs]
        expected = scan(*real, normalise=normalise, backend=backend)
        assert_all_same_maths((out[b : b + 1, :, mask[b]], state[b : b + 1]), expected, f"row {b}")
        for x in (out, *gradients):
            assert_exact(x[b, :, ~mask[b]], torch.zeros_like(x[b, :, ~mask[b]]))


@backends
@decays
@dtypes
def test_rubbish_in_padding_changes_no_bit_of_a_gated_scan(gated, differentiated, decay, backend, dtype):
    mask = mask_with([(9, 25, 6), (0, 33, 7)])
    results = []
    for rubbish in (0.0, 1e4, torch.nan, torch.inf):
        inputs = [x.masked_fill(~mask[:, None, :, None], rubbish) for x in gated(40, decay, dtype)]
        results.append(differentiated(lambda *x: scan(*x, mask=mask, normalise=True, backend=backend), inputs))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert actual.isfinite().all()
            assert_exact(actual, expected)


@backends
@decays
def test_normalised_weights_sum_to_one(gated, decay, backend):
    q, i, v, *log_f = gated(70, decay)
    out, _ = scan(q, i, torch.ones_like(v), *log_f, normalise=True, backend=backend)
    assert_same_maths(out, torch.ones_like(v))


@backends
@pytest.mark.parametrize("zero", ["q", "i"])
def test_a_token_without_any_weight_gives_zero_and_finite_gradients(gated, differentiated, backend, zero):
    q, i, v = gated(20)
    (q if zero == "q" else i)[:, :, :7] = 0
    out, _, *gradients = differentiated(lambda *x: scan(*x, normalise=True, backend=backend), [q, i, v])
    assert_exact(out[:, :, :7], torch.zeros_like(out[:, :, :7]))
    assert all(x.isfinite().all() for x in (out, *gradients))


def dense_scan(q, i, v, log_f=None, *, normalise=False, eps=0.0):
    """The plain form of the scan's outputs: every weight, in the dtype of the inputs."""
    past_TS1 = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()[..., None]
    if log_f is None:
        decay_BHTSK = past_TS1.to(q.dtype)
    else:
        G_BHTF = log_f.cumsum(2)
        between_BHTSF = G_BHTF[:, :, :, None] - G_BHTF[:, :, None]
        decay_BHTSK = between_BHTSF.masked_fill(~past_TS1, -torch.inf).exp()
    w_BHTS = (q[:, :, :, None] * i[:, :, None] * decay_BHTSK).sum(-1)
    return (w_BHTS @ v / (w_BHTS.sum(-1, keepdim=True) + eps) if normalise else w_BHTS @ v,)


def dense_softmax(p, logits, v):
    """The plain form of the running softmax: every weight, in the dtype of the inputs."""
    future_TS = torch.ones(p.shape[2], p.shape[2], dtype=torch.bool).triu(1)
    k_BHTSL = logits[:, :, None].expand(-1, -1, p.shape[2], -1, -1).masked_fill(future_TS[..., None], -torch.inf)
    return (torch.einsum("bhtl,bhtsl->bhts", p, k_BHTSL.softmax(-2)) @ v,)


@decays
@normalised
@dtypes
def test_low_precision_of_a_gated_scan_stays_in_budget(gated, differentiated, decay, normalise, dtype):
    inputs, options = gated(130, decay, dtype, strength=0.3), {"normalise": normalise, "eps": 0.1 * normalise}
    exact = differentiated(lambda *x: dense_scan(*x, **options), [x.double() for x in inputs])
    plain = differentiated(lambda *x: dense_scan(*x, **options), inputs)
    actual = differentiated(lambda *x: scan(*x, **options)[:1], inputs)
    assert actual[0].dtype == dtype
    for n, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True)):
        assert_in_budget(a, p, e, dtype, f"result {n}")


@backends
@pytest.mark.parametrize("decay", ["head", "channel"])
@dtypes
def test_strong_decays_are_finite(gated, differentiated, decay, backend, dtype):
    q, i, v, log_f = gated(130, decay, dtype)
    log_f[:, :, ::3] = -50
    for n, result in enumerate(differentiated(lambda *x: scan(*x, backend=backend), [q, i, v, log_f])):
        assert result.isfinite().all(), n


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decays_are_the_definition(gated, differentiated, decay):
    q, i, v, log_f = gated(130, decay)
    log_f[:, :, ::3] = -50
    results = [differentiated(lambda *x, b=b: scan(*x, backend=b), [q, i, v, log_f]) for b in ("torch", "reference")]
    assert_all_same_maths(*results)


@settings(max_examples=25, suppress_health_check=fixtures_in_given)
@given(
    decay=st.sampled_from(["none", "head", "channel"]),
    normalise=st.booleans(),
    tokens=st.integers(1, 200),
    fraction=st.floats(0, 1),
    dtype=st.sampled_from(LOW_PRECISION),
    strength=st.sampled_from([0.1, 50.0]),
)
def test_no_bit_of_a_gated_scan_depends_on_the_future(gated, decay, normalise, tokens, fraction, dtype, strength):
    now = int(fraction * (tokens - 1))
    inputs = gated(tokens, decay, dtype, batch=1, strength=strength)
    others = [torch.cat([x[:, :, : now + 1], 3 * x[:, :, now + 1 :].flip(2)], 2) for x in inputs]
    before, after = (scan(*x, normalise=normalise)[0] for x in (inputs, others))
    assert_exact(after[:, :, : now + 1], before[:, :, : now + 1])


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_state_is_float32_or_wider(gated, soft, backend, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    out, state = scan(*gated(9, dtype=dtype), backend=backend)
    assert (out.dtype, state.dtype) == (dtype, wide)
    out, lse, a, s = softmax(*soft(9, dtype=dtype), backend=backend)
    assert (out.dtype, lse.dtype, a.dtype, s.dtype) == (dtype, wide, torch.float64, wide)


# The running softmax.


@backends
def test_running_softmax_by_hand(soft, backend):
    p, logits, v = soft(5)
    out, lse, a, s = softmax(p, logits, v, backend=backend)
    for t in range(5):
        w_BHSL = logits[:, :, : t + 1].softmax(2)
        mean_BHLV = torch.einsum("bhsl,bhsv->bhlv", w_BHSL, v[:, :, : t + 1])
        assert_same_maths(out[:, :, t], torch.einsum("bhl,bhlv->bhv", p[:, :, t], mean_BHLV))
        assert_same_maths(lse[:, :, t], logits[:, :, : t + 1].logsumexp(2))
    assert_same_maths(a, lse[:, :, -1])
    assert_same_maths(s, mean_BHLV)


@settings(max_examples=30, suppress_health_check=fixtures_in_given)
@given(
    tokens=lengths,
    chunk_size=chunk_sizes,
    sharpness=st.sampled_from([0.0, 3.0, 100.0]),
    with_state=st.booleans(),
)
def test_running_softmax_is_its_definition(random, soft, differentiated, tokens, chunk_size, sharpness, with_state):
    inputs = soft(tokens, sharpness=sharpness)
    inputs += [random(B, H, K, seed=5), random(B, H, K, V, seed=6)] if with_state else []
    results = [
        differentiated(lambda *x, b=b: softmax(*x, chunk_size=chunk_size, backend=b), inputs)
        for b in ("torch", "reference")
    ]
    assert_all_same_maths(*results)


@pytest.mark.parametrize("which", range(4), ids=["out", "lse", "final lse", "final mean"])
def test_each_result_of_the_running_softmax_has_its_own_gradients(random, soft, differentiated, which):
    inputs = [*soft(70), random(B, H, K, seed=5), random(B, H, K, V, seed=6)]
    results = [
        differentiated(lambda *x, b=b: softmax(*x, backend=b)[which : which + 1], inputs)
        for b in ("torch", "reference")
    ]
    assert_all_same_maths(*results)


@settings(max_examples=15, suppress_health_check=fixtures_in_given)
@given(cuts=st.lists(st.integers(0, 70), min_size=1, max_size=3))
def test_running_softmax_may_be_cut_anywhere(soft, cuts):
    inputs = soft(70)
    state, outs = None, []
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 70], strict=True):
        out, state, _ = running_softmax(*(x[:, :, start:stop] for x in inputs), state=state)
        assert isinstance(state, SoftmaxState)
        outs.append(out)
    whole = running_softmax(*inputs)
    assert_all_same_maths((torch.cat(outs, 2), *state), (whole.out, *whole.state))


@backends
@settings(max_examples=15, suppress_health_check=fixtures_in_given)
@given(cut=st.integers(0, 40), sharpness=st.sampled_from([1.0, 1e4]))
def test_states_of_two_pieces_merge_into_that_of_both(soft, backend, cut, sharpness):
    inputs = soft(40, sharpness=sharpness)
    (a1, s1), (a2, s2) = (
        running_softmax(*(x[:, :, piece] for x in inputs), backend=backend).state
        for piece in (slice(None, cut), slice(cut, None))
    )
    a = torch.logaddexp(a1, a2)
    s = (a1 - a).exp()[..., None] * s1 + (a2 - a).exp()[..., None] * s2
    assert_all_same_maths((a, s), running_softmax(*inputs, backend=backend).state)


@backends
def test_running_softmax_does_not_see_padding(soft, differentiated, backend):
    mask = mask_with([(9, 25, 6), (0, 33, 7)])
    inputs = soft(40)
    out, a, s, *gradients = differentiated(
        lambda *x: [r for n, r in enumerate(softmax(*x, mask=mask, backend=backend)) if n != 1], inputs
    )
    for b in range(B):
        expected = running_softmax(*(x[b : b + 1, :, mask[b]] for x in inputs), backend=backend)
        actual = (out[b : b + 1, :, mask[b]], a[b : b + 1], s[b : b + 1])
        assert_all_same_maths(actual, (expected.out, *expected.state), f"row {b}")
        for x in (out, *gradients):
            assert_exact(x[b, :, ~mask[b]], torch.zeros_like(x[b, :, ~mask[b]]))


@backends
@dtypes
def test_rubbish_in_padding_changes_no_bit_of_a_running_softmax(soft, differentiated, backend, dtype):
    mask = mask_with([(9, 25, 6), (0, 33, 7)])
    results = []
    for rubbish in (0.0, 1e4, torch.nan, torch.inf):
        inputs = [x.masked_fill(~mask[:, None, :, None], rubbish) for x in soft(40, dtype)]
        results.append(differentiated(lambda *x: softmax(*x, mask=mask, backend=backend), inputs))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert actual.isfinite().all()
            assert_exact(actual, expected)


@backends
def test_before_the_first_real_token_there_is_nothing(soft, backend):
    mask = torch.tensor([[False] * 5 + [True] * 4] * B)
    out, lse, a, s = softmax(*soft(9), mask=mask, backend=backend)
    assert_exact(out[:, :, :5], torch.zeros_like(out[:, :, :5]))
    assert (lse[:, :, :5] <= EMPTY / 2).all()
    assert lse[:, :, 5:].isfinite().all()
    _, _, a, s = softmax(*soft(9), mask=torch.zeros_like(mask), backend=backend)
    assert_exact(a, torch.full_like(a, EMPTY))
    assert_exact(s, torch.zeros_like(s))


@backends
@pytest.mark.parametrize("sharpness", [1.0, 1e4])
def test_weights_of_a_row_sum_to_one(soft, backend, sharpness):
    p, logits, v = soft(130, sharpness=sharpness)
    assert_same_maths(running_softmax(p, logits, torch.ones_like(v), backend=backend).out, torch.ones_like(v))


@backends
def test_a_shift_of_a_latents_logits_changes_nothing(random, soft, backend):
    p, logits, v = soft(70)
    shift = 100 * random(B, H, 1, K, seed=7)
    out, lse, a, s = softmax(p, logits, v, backend=backend)
    shifted = softmax(p, logits + shift, v, backend=backend)
    assert_all_same_maths(shifted, (out, lse + shift, a + shift[:, :, 0], s))


@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("sharpness", [30.0, 1e4])
@dtypes
def test_extreme_logits_are_finite(soft, differentiated, dtype, sharpness, chunk_size):
    inputs = soft(300, dtype, sharpness=sharpness)
    for n, result in enumerate(differentiated(lambda *x: softmax(*x, chunk_size=chunk_size), inputs)):
        assert result.isfinite().all(), n


@pytest.mark.parametrize("order", ["rising", "falling", "one peak"])
@dtypes
def test_extreme_logits_in_order_are_finite_and_in_range(soft, differentiated, dtype, order):
    p, _, v = soft(130, dtype)
    ramp = torch.linspace(-1e4, 1e4, 130)
    line = {"rising": ramp, "falling": ramp.flip(0), "one peak": torch.where(torch.arange(130) == 64, 1e4, -1e4)}[order]
    logits = line[:, None].expand(B, H, 130, K).to(dtype)
    results = differentiated(softmax, [p, logits, v])
    assert all(x.isfinite().all() for x in results)
    bound = v.abs().amax() * p.sum(-1, keepdim=True).amax()
    assert (results[0].abs() <= bound * (1 + torch.finfo(dtype).eps)).all(), "a mean lies within the values"


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("sharpness", [1.0, 30.0, 1e4])
def test_low_precision_of_a_running_softmax_stays_in_budget(soft, differentiated, dtype, sharpness):
    inputs = soft(130, dtype, sharpness=sharpness)
    exact = differentiated(dense_softmax, [x.double() for x in inputs])
    plain = differentiated(dense_softmax, inputs)
    actual = differentiated(lambda *x: softmax(*x)[:1], inputs)
    assert actual[0].dtype == dtype
    names = ("out", "gradient of p", "gradient of logits", "gradient of v")
    for name, a, p, e in zip(names, actual, plain, exact, strict=True):
        # Where one key takes all, this gradient is the difference of two equal sums over time, each rounded on its own.
        if not (name == "gradient of logits" and sharpness == 1e4 and dtype == torch.float32):
            assert_in_budget(a, p, e, dtype, name)


@settings(max_examples=25, suppress_health_check=fixtures_in_given)
@given(
    tokens=st.integers(1, 200),
    fraction=st.floats(0, 1),
    dtype=st.sampled_from(LOW_PRECISION),
    sharpness=st.sampled_from([1.0, 1e2, 1e4]),
)
def test_no_bit_of_a_running_softmax_depends_on_the_future(soft, tokens, fraction, dtype, sharpness):
    now = int(fraction * (tokens - 1))
    inputs = soft(tokens, dtype, batch=1, sharpness=sharpness)
    others = [torch.cat([x[:, :, : now + 1], -x[:, :, now + 1 :].flip(2)], 2) for x in inputs]
    before, after = (softmax(*x)[:2] for x in (inputs, others))
    for a, b in zip(before, after, strict=True):
        assert_exact(b[:, :, : now + 1], a[:, :, : now + 1])


# Both.


def runs(q, i, v, log_f=None):
    """Each engine on the same inputs."""
    decay = torch.zeros_like(q) if log_f is None else log_f
    return {
        "gated_scan": lambda **o: gated_scan(q, i, v, None, normalise=True, **o).out,
        "gated_scan with decays": lambda **o: gated_scan(q, i, v, decay, **o).out,
        "running_softmax": lambda **o: running_softmax(q, i, v, **o).out,
    }


engines = pytest.mark.parametrize("engine", ["gated_scan", "gated_scan with decays", "running_softmax"])


@engines
def test_past_outputs_send_no_gradient_to_the_future(gated, engine):
    leaves = [x.requires_grad_() for x in gated(100, "channel")]
    out = runs(*leaves)[engine]()
    for gradient in torch.autograd.grad(out[:, :, :40].square().sum(), leaves, materialize_grads=True):
        assert_exact(gradient[:, :, 40:], torch.zeros_like(gradient[:, :, 40:]))


@engines
def test_strides_change_nothing(gated, engine):
    contiguous = gated(70, "channel")
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in contiguous]
    columns = [x.mT.contiguous().mT for x in contiguous]
    expected = None
    for inputs in (contiguous, transposed, columns):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = runs(*leaves)[engine]()
        for gradient in (torch.ones_like(out), torch.ones((), dtype=out.dtype).expand(out.shape)):
            results = [out, *torch.autograd.grad(out, leaves, gradient, retain_graph=True, materialize_grads=True)]
            expected = results if expected is None else expected
            assert_all_same_maths(results, expected)


@engines
def test_one_state_a_chunk_is_kept_and_memory_is_linear(gated, engine):
    def kept(tokens):
        shapes = []

        def pack(x):
            shapes.append(tuple(x.shape))
            return x

        leaves = [x.requires_grad_() for x in gated(tokens, "channel", torch.float32, batch=1)]
        run = runs(*leaves)[engine]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run(chunk_size=32)
        return shapes

    short, long = kept(1024), kept(2048)
    channels = V + (engine == "gated_scan")
    # One axis counts the chunks, the others are a state of each head.
    states = [sorted((tokens // 32, H, K, channels)) for tokens in (1024, 2048)]
    for shapes, state in ((short, states[0]), (long, states[1])):
        assert sum(math.prod(shape) for shape in shapes if len(shape) == 4) == math.prod(state)
    assert sum(map(math.prod, long)) <= 2 * sum(map(math.prod, short))


@engines
def test_nothing_is_kept_without_gradients(gated, engine, largest_allocation):
    inputs = gated(64, "channel", torch.float32, batch=1)
    states = 64 * H * K * V * 4
    assert largest_allocation(lambda: runs(*inputs)[engine](chunk_size=1)) < states
    leaves = [x.requires_grad_() for x in inputs]
    assert largest_allocation(lambda: runs(*leaves)[engine](chunk_size=1)) >= states, "the measure sees states"


@engines
def test_no_tensor_has_a_square_of_entries(gated, engine, largest_allocation):
    leaves = [x.requires_grad_() for x in gated(1024, "channel", torch.float32, batch=1)]
    run = runs(*leaves)[engine]
    assert largest_allocation(lambda: run().sum().backward()) <= 1024 * 1024 * 4 // 4


@decays
@normalised
def test_the_gated_scan_keeps_torchs_rules(random, gated, decay, normalise):
    q, i, v, *rest = (x.flatten(0, 1).requires_grad_() for x in gated(20, decay))
    log_f = rest[0] if rest else None
    state = random(B * H, K, V + normalise).abs().requires_grad_()
    options = (normalise, 0.1, 8)
    torch.library.opcheck(gated_scan_op, (q, i, v, log_f, state, *options, True))
    q, i, v, state = (x.detach() for x in (q, i, v, state))
    log_f = None if log_f is None else log_f.detach()
    out, end, *kept = gated_scan_op(q, i, v, log_f, state, *options, True)
    arguments = (torch.ones_like(out), None, q, i, v, log_f, out, end, *kept, *options)
    torch.library.opcheck(gated_scan_backward_op, arguments)


def leaps(random, tokens, at, latents, dtype):
    """p, logits and values; the logits leap at one token and stay up there. And the same without the leap."""
    p = random(2, H, tokens, latents, seed=1).softmax(-1).to(dtype)
    logits = random(2, H, tokens, latents, seed=2, dtype=dtype)
    v = random(2, H, tokens, V, seed=3, dtype=dtype)
    leaping = logits.clone()
    leaping[0, 0, at:, 0] += 200
    leaping[1, :, at + 1 :] += 1e4
    return (p, leaping, v), (p, logits, v)


@pytest.mark.parametrize("latents", [1, K])
@pytest.mark.parametrize("at", [3, 15, 16, 40])
def test_a_leap_of_the_logits_changes_no_bit_before_it(random, latents, at):
    leaping, calm = leaps(random, 50, at, latents, torch.float32)
    outputs = [running_softmax(*inputs, chunk_size=16).out for inputs in (leaping, calm)]
    assert_exact(outputs[0][0, 0, :at], outputs[1][0, 0, :at], "before the leap")
    assert_exact(outputs[0][1, :, : at + 1], outputs[1][1, :, : at + 1], "before the leap")
    assert_exact(outputs[0][0, 1:], outputs[1][0, 1:], "heads without a leap")
    assert not torch.equal(outputs[0][0, 0, at:], outputs[1][0, 0, at:])


@pytest.mark.parametrize("latents", [1, K])
def test_a_leap_in_another_head_changes_no_bit_after_a_leap(random, latents):
    (p, logits, v), _ = leaps(random, 50, 20, latents, torch.float32)
    other = logits.clone()
    other[:, 1:, 25:] += 1e4
    other[0, 0, 30:] += 1e4
    outputs = [running_softmax(p, k, v, chunk_size=16).out for k in (logits, other)]
    assert_exact(outputs[0][0, 0, :30], outputs[1][0, 0, :30], "rows that had leapt before")
    assert_exact(outputs[0][:, 1:, :25], outputs[1][:, 1:, :25], "rows before the other leap")


@pytest.mark.parametrize("latents", [1, K])
@pytest.mark.parametrize("at", [3, 15, 16, 40])
def test_rows_after_a_leap_and_all_gradients_stay_in_budget(random, differentiated, latents, at):
    inputs, _ = leaps(random, 50, at, latents, torch.float32)

    def run(backend, dtype):
        def f(*tensors):
            out, state, lse = running_softmax(*tensors, backend=backend, chunk_size=16)
            return out, lse, state.mean

        return differentiated(f, [x.to(dtype) for x in inputs])

    exact, plain = run("reference", torch.float64), run("reference", torch.float32)
    for n, actual in enumerate(run("torch", torch.float32)):
        assert_in_budget(actual, plain[n], exact[n], torch.float32, f"result {n}")


def test_the_safe_form_is_taken_for_the_rows_that_need_it_alone(random, monkeypatch):
    taken = []
    safe = chunked.safe_forward

    def counted(p, *rest):
        taken.append(tuple(p.shape))
        return safe(p, *rest)

    monkeypatch.setattr(chunked, "safe_forward", counted)
    leaping, calm = leaps(random, 50, 20, K, torch.float32)
    running_softmax(*calm, chunk_size=16)
    assert taken == []
    running_softmax(*leaping, chunk_size=16)
    assert taken == [(2 * H, 16, K)], "the chunk of the leap; of all heads, so that shapes depend on no logits"


def test_logits_of_minus_infinity_weigh_nothing(random, soft):
    p, logits, v = soft(20)
    logits[:, :, :3] = -torch.inf
    out = running_softmax(p, logits, v, chunk_size=8).out
    assert_exact(out[:, :, :3], torch.zeros_like(out[:, :, :3]), "before any token")
    assert_same_maths(out[:, :, 3:], running_softmax(p[:, :, 3:], logits[:, :, 3:], v[:, :, 3:]).out)


def test_the_logsumexp_is_made_when_asked_for(soft, monkeypatch):
    made = []
    make = engine.running_logsumexp
    monkeypatch.setattr(engine, "running_logsumexp", lambda *x, **y: made.append(1) or make(*x, **y))
    p, logits, v = soft(20)
    y = running_softmax(p, logits, v)
    assert made == []
    assert_same_maths(y.lse, torch.logcumsumexp(logits, 2))
    assert_exact(y[2], y.lse)
    assert_exact(y[0], y.out)
    assert made == [1, 1, 1]
    with pytest.raises(IndexError, match="tuple index out of range"):
        y[3]


@pytest.mark.parametrize("latents", [1, 3])
def test_the_running_logsumexp_in_pieces_of_any_size(random, differentiated, latents, monkeypatch):
    k, a = random(B, H, 70, latents) * 30, random(B, H, latents, seed=1)

    def plain(k, a):
        return (torch.cat([a[:, :, None], k], 2).logcumsumexp(2)[:, :, 1:],)

    expected = differentiated(plain, [k, a])
    assert_all_same_maths(differentiated(lambda k, a: (running_logsumexp(k, state=a),), [k, a]), expected)
    monkeypatch.setattr(halves, "LEAST_ROWS", 8)
    monkeypatch.setattr(halves, "PIECE_ENTRIES", 0)
    assert_all_same_maths(differentiated(lambda k, a: (running_logsumexp(k, state=a),), [k, a]), expected, "pieces")


def test_a_token_adds_of_its_own_value_in_the_kernels_too(random, soft, differentiated):
    p, logits, v = soft(20, torch.float32)
    own, mask_BT = random(B, H, 20, 1, seed=7, dtype=torch.float32), mask_with([(2, 15, 3), (0, 20, 0)])
    v[0, :, :2] = torch.nan
    own[0, :, 18:] = torch.nan

    def run(backend, dtype):
        def f(*tensors):
            return (running_softmax(*tensors[:3], own=tensors[3], mask=mask_BT, backend=backend).out,)

        return differentiated(f, [x.to(dtype) for x in (p, logits, v, own)])

    exact, plain = run("reference", torch.float64), run("reference", torch.float32)
    actual = run("triton", torch.float32)
    for n in (0, 1, 3, 4):  # tests/ops/triton has the logits' gradient
        assert_in_budget(actual[n], plain[n], exact[n], torch.float32, f"result {n}")
    with pytest.raises(ValueError, match="backend 'triton' of running_softmax computes in float32, bfloat16, float16"):
        running_softmax(p, logits, v, own=own.double(), backend="triton")


@pytest.mark.parametrize("backend", ["reference", "torch", "sequential"])
def test_a_token_may_add_of_its_own_value(random, soft, differentiated, backend):
    p, logits, v = soft(20)
    own = random(B, H, 20, 1, seed=7)

    def expected(p, logits, v, own):
        return (running_softmax(p, logits, v, backend="reference").out + own * v,)

    def actual(p, logits, v, own):
        return (running_softmax(p, logits, v, own=own, backend=backend, chunk_size=8).out,)

    inputs = [p, logits, v, own]
    assert_all_same_maths(differentiated(actual, inputs), differentiated(expected, inputs))


@pytest.mark.parametrize("with_own", [False, True])
def test_the_running_softmax_keeps_torchs_rules(random, soft, with_own):
    p, k, v = (x.flatten(0, 1).requires_grad_() for x in soft(20))
    own = random(B * H, 20, 1).requires_grad_() if with_own else None
    a, s = random(B * H, K).requires_grad_(), random(B * H, K, V).requires_grad_()
    torch.library.opcheck(running_softmax_op, (p, k, v, own, a, s, 8, True))
    p, k, v, a, s = (x.detach() for x in (p, k, v, a, s))
    own = own.detach() if with_own else None
    out, _, *kept = running_softmax_op(p, k, v, own, a, s, 8, True)
    torch.library.opcheck(running_softmax_backward_op, (torch.ones_like(out), None, None, p, k, v, own, *kept, 8))


def test_the_running_logsumexp_keeps_torchs_rules(random):
    k, a = random(B * H, 20, K).requires_grad_(), random(B * H, K, seed=1).requires_grad_()
    torch.library.opcheck(running_logsumexp_op, (k, a))
    m, z = running_logsumexp_op(k.detach(), a.detach())
    torch.library.opcheck(running_logsumexp_backward_op, (torch.ones_like(z), k.detach(), a.detach(), m))


X = torch.ones(B, H, 5, K)
ERRORS = {
    "ndim": (
        lambda: gated_scan(X, X[0], X, None),
        ValueError,
        r"i must have shape \[B, H, T, channels\], got \(2, 5, 6\)",
    ),
    "dtype": (lambda: gated_scan(X, X, X.long(), None), TypeError, r"v must be floating point, got torch\.int64"),
    "tokens": (
        lambda: gated_scan(X, X, X[:, :, :3], None),
        ValueError,
        r"v must agree with q in B, H and T, got \(2, 2, 3, 6\) and \(2, 2, 5, 6\)",
    ),
    "channels": (
        lambda: gated_scan(X, X[..., :3], X, None),
        ValueError,
        "q and i must have the same channels, got 6 and 3",
    ),
    "decays": (
        lambda: gated_scan(X, X, X, X[..., :2]),
        ValueError,
        r"log_f must have shape \(2, 2, 5, 6\) or \(2, 2, 5, 1\), got \(2, 2, 5, 2\)",
    ),
    "eps": (lambda: gated_scan(X, X, X, None, eps=-0.1), ValueError, r"eps must be at least 0, got -0\.1"),
    "chunk": (lambda: gated_scan(X, X, X, None, chunk_size=0), ValueError, "chunk_size must be at least 1, got 0"),
    "state": (
        lambda: gated_scan(X, X, X, None, state=torch.zeros(B, H, K, K), normalise=True),
        ValueError,
        r"state must have shape \(2, 2, 6, 7\), got \(2, 2, 6, 6\)",
    ),
    "mask": (
        lambda: gated_scan(X, X, X, None, mask=torch.ones(B, 4, dtype=torch.bool)),
        ValueError,
        r"mask must have shape \(2, 5\)",
    ),
    "softmax ndim": (lambda: running_softmax(X[0], X, X), ValueError, r"p must have shape \[B, H, T, channels\]"),
    "softmax dtype": (lambda: running_softmax(X, X.int(), X), TypeError, "logits must be floating point, got torch"),
    "softmax tokens": (lambda: running_softmax(X, X[:1], X), ValueError, "logits must agree with p in B, H and T"),
    "latents": (
        lambda: running_softmax(X, X[..., :3], X),
        ValueError,
        "p and logits must have the same latents, got 6 and 3",
    ),
    "softmax chunk": (
        lambda: running_softmax(X, X, X, chunk_size=-1),
        ValueError,
        "chunk_size must be at least 1, got -1",
    ),
    "softmax state": (
        lambda: running_softmax(X, X, X, state=(torch.zeros(B, H, K), torch.zeros(B, H, K, 1))),
        ValueError,
        r"state must have shapes \(2, 2, 6\) and \(2, 2, 6, 6\), got \(2, 2, 6\) and \(2, 2, 6, 1\)",
    ),
    "own": (
        lambda: running_softmax(X, X, X, own=X),
        ValueError,
        r"own must have shape \(2, 2, 5, 1\), got \(2, 2, 5, 6\)",
    ),
    "logsumexp state": (
        lambda: running_logsumexp(X, state=X),
        ValueError,
        r"state must have shape \(2, 2, 6\), got \(2, 2, 5, 6\)",
    ),
    "softmax mask": (lambda: running_softmax(X, X, X, mask=torch.ones(B, 5)), TypeError, "mask must be a bool tensor"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_does_not_fit_is_refused(case):
    call, error, match = ERRORS[case]
    with pytest.raises(error, match=match):
        call()
