"""The kernels of the delta scan against its definition, token by token, in float64.

A scan is named by its decays, and `shared` if its heads share queries and keys.
"""

from functools import partial

import pytest
import torch

from subquad.ops import delta_scan
from subquad.ops._torch import delta as chunked
from subquad.ops._triton import common
from subquad.ops._triton.delta import delta_scan_triton, delta_scan_triton_backward
from subquad.testing.tools import LOW_PRECISION, assert_exact, mask_with
from tests.ops.cases import (
    ALONE,
    DEVICE,
    LAYOUTS,
    assert_all_exact,
    assert_all_in_budget,
    differentiated,
    plain_delta,
    random,
    thinned,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
KINDS = ("none", "head", "channel")
kinds = pytest.mark.parametrize("kind", KINDS)
# Lengths around those of chunks (32 in float32, else 64), head sizes around those of tiles: kind, tokens, K, V, dtype.
CASES = [
    ("head", 40, 16, 20, FP32), ("none", 1, 3, 1, BF16), ("channel shared", 33, 16, 3, FP32),
    ("channel", 65, 16, 16, BF16), ("none", 64, 16, 64, FP16), ("none", 32, 43, 16, FP32),
    ("head shared", 66, 43, 40, BF16), ("channel", 2, 16, 16, FP32), ("channel", 129, 16, 16, FP16),
    ("none shared", 70, 16, 16, FP32), ("head", 17, 80, 130, FP16), ("channel shared", 100, 16, 80, BF16),
    ("head", 200, 16, 16, BF16), ("none", 200, 64, 64, FP32), ("channel", 63, 130, 16, FP32),
    ("head", 20, 256, 256, BF16), ("none", 20, 200, 300, FP32), ("channel shared", 20, 256, 40, FP16),
]  # fmt: skip


def make(kind, tokens, dtype=FP32, K=16, V=16, *, batch=1, heads=1):
    """Return queries, keys of length 1, values, beta up to 2 and any log decays; then a state."""
    shared = "shared" in kind
    heads = 2 * heads if shared else heads
    shape = batch, heads, tokens
    q, k = (random(batch, heads // (1 + shared), tokens, K, seed=n) for n in (1, 2))
    F = {"none": 0, "head": 1, "channel": K}[kind.split()[0]]
    beta = 2 * random(*shape, 1, seed=4).sigmoid()
    log_f = [-0.3 * random(*shape, F, seed=5).abs()] if F else []
    inputs = [q, k / k.norm(dim=-1, keepdim=True), random(*shape, V, seed=3), beta, *log_f]
    return [x.to(dtype) for x in inputs], random(batch, heads, K, V, seed=6, dtype=FP32)


def scan(*tensors, mask=None, state=None, backend="triton", chunk_size=None):
    options = {"mask": mask, "state": state, "backend": backend, "chunk_size": chunk_size}
    return tuple(delta_scan(*(*tensors, None)[:5], **options))


def after(state, *inputs, **options):
    """Return results and gradients of the inputs and the state."""
    return differentiated(lambda *x: scan(*x[:-1], state=x[-1], **options), [*inputs, state])


def assert_is_the_definition(inputs, state, dtype, **options):
    """Return results and gradients, whose errors are at most twice those of the chunks in torch.

    In float16 these round the solved values as the kernels do, whose products of them have operands of float16's digits
    (the state, a float32, is such a product). In bfloat16 what is stored is rounded more than that.
    """
    results, exact = after(state, *inputs, **options), [x.double() for x in inputs]
    times = chunked._times
    with pytest.MonkeyPatch.context() as patch:
        if dtype == FP16:
            patch.setattr(chunked, "_times", lambda *x, **o: times(*x, **o).to(dtype).float())
        measured = after(state, *inputs, backend="torch", **options)
    assert_all_in_budget(results, measured, after(state.double(), *exact, backend="reference", **options), dtype)
    return results


@thinned(6, case=CASES)
def test_outputs_states_and_gradients(case):
    kind, tokens, K, V, dtype = case
    inputs, state = make(kind, tokens, dtype, K, V)
    assert_is_the_definition(inputs, state, dtype)


@thinned(2, beta=(2.0, 1.0), dtype=LOW_PRECISION)
def test_equal_keys_are_solved_by_substitution(beta, dtype, monkeypatch):
    """Measured from every weight in half precision, in float32 by chunks in torch that round as often."""
    monkeypatch.setattr(chunked, "_wide", lambda q, _: q.dtype)  # products of float32, as the kernels have them
    (q, k, v, b), _ = make("none", 64, dtype, K=32)
    inputs = [q, k[:, :, :1].expand_as(k), v, torch.full_like(b, beta)]
    measure = partial(scan, backend="torch", chunk_size=64) if dtype == FP32 else plain_delta
    calls = (scan, inputs), (measure, inputs), (plain_delta, [x.double() for x in inputs])
    assert_all_in_budget(*(differentiated(lambda *x, f=f: f(*x)[:1], x) for f, x in calls), dtype)


@thinned(3, dtype=LOW_PRECISION, kind=("channel", "head"))
def test_strong_decays(kind, dtype):
    """Logarithms of decays from -1e-3 to -1e4 side by side, and some that forget all."""
    (*inputs, log_f), state = make(kind, 70, dtype)
    log_f = -(3 * random(*log_f.shape, seed=6)).exp().to(dtype)
    log_f[:, :, ::7] = -1e-3
    assert_is_the_definition([*inputs, log_f], state, dtype)
    log_f[:, :, 40] = -torch.inf
    out, last, *gradients = after(state, *inputs, log_f)
    assert all(x.isfinite().all() for x in gradients)
    rest = [x[:, :, 40:] for x in (*inputs, log_f)]
    forms = (rest, "torch"), ([x.double() for x in rest], "reference")
    assert_all_in_budget((out[:, :, 40:], last), *(scan(*x, backend=form) for x, form in forms), dtype)


@thinned(3, kind=("channel shared", "head", "none"), tokens=(40, 1))
def test_padding_does_not_exist(kind, tokens):
    mask = mask_with([(9, 25, 6), (0, 33, 7)])[:, 40 - tokens :].to(DEVICE)
    inputs, state = make(kind, tokens, batch=2)
    results = assert_is_the_definition(inputs, state, FP32, mask=mask)
    padded = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    assert_all_exact(after(state, *padded, mask=mask), results)
    for x in (results[0], *results[2:-1]):
        x = x.transpose(1, 2)[~mask]
        assert_exact(x, torch.zeros_like(x))


@kinds
def test_a_scan_may_be_cut_anywhere(kind):
    inputs, state = make(kind, 70)
    outs, last = [], state
    for start, stop in ((0, 1), (1, 17), (17, 17), (17, 69), (69, 70)):
        out, last = scan(*(x[:, :, start:stop] for x in inputs), state=last)
        outs.append(out)
    measured, exact = scan(*inputs, state=state, backend="torch"), [x.double() for x in inputs]
    exact = scan(*exact, state=state.double(), backend="reference")
    assert_all_in_budget((torch.cat(outs, 2), last), measured, exact, FP32)
    assert_all_exact(scan(*inputs), scan(*inputs, state=torch.zeros_like(state)))


@thinned(2, kind=("head shared", "channel", "none"), dtype=LOW_PRECISION)
def test_a_token_at_a_time_is_one_launch_each(kind, dtype, monkeypatch):
    launched, launch = [], common.launch
    monkeypatch.setattr(common, "launch", lambda kernel, *x, **y: launched.append(kernel) or launch(kernel, *x, **y))
    inputs, state = make(kind, 3, dtype, 80, 70, batch=2)
    outs, last = [], state
    for t in range(3):
        out, last = scan(*(x[:, :, t : t + 1] for x in inputs), state=last)
        outs.append(out)
    assert [kernel.__name__ for kernel in launched] == ["delta_step_kernel"] * 3
    measured, exact = scan(*inputs, state=state, backend="torch"), [x.double() for x in inputs]
    exact = scan(*exact, state=state.double(), backend="reference")
    assert_all_in_budget((torch.cat(outs, 2), last), measured, exact, dtype)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@thinned(4, what=("values", "keys"), at=(20, 0, 31, 40), dtype=(FP32, BF16))
def test_an_overflow_leaves_earlier_rows_their_bits(what, at, dtype):
    (q, k, v, beta), _ = make("none", 70, dtype)
    before, _ = scan(q, k, v, beta)
    (k if what == "keys" else v)[:, :, at:] *= 1e38 if what == "keys" else 1e39
    out, last = scan(q, k, v, beta)
    assert_exact(out[:, :, :at], before[:, :, :at])
    assert not last.isfinite().all()


@kinds
def test_no_bit_depends_on_the_future(kind):
    inputs, state = make(kind, 40, BF16)
    expected, _ = scan(*inputs, state=state)
    for now in (5, 33):
        later = torch.arange(40, device=DEVICE)[:, None] > now
        others = [torch.where(later, 3 * x.flip(2), x) for x in inputs]
        assert_exact(scan(*others, state=state)[0][:, :, : now + 1], expected[:, :, : now + 1])


@thinned(3, kind=("head shared", "channel shared", "none shared"))
def test_heads_that_share_keys_are_copies(kind):
    (q, k, *rest), state = make(kind, 20)
    copies = [x.repeat_interleave(2, 1) for x in (q, k)]
    assert_all_exact(scan(q, k, *rest, state=state), scan(*copies, *rest, state=state))


@thinned(6, layout=LAYOUTS, kind=("head", "channel"))
def test_strides_change_nothing(layout, kind):
    inputs, state = make(kind, 5, batch=2, heads=2)
    strided = [LAYOUTS[layout](x) for x in inputs]

    def gradients(tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, _ = scan(*leaves, state=state)
        return [out, *torch.autograd.grad(out, leaves, torch.ones((), device=DEVICE).expand(out.shape))]

    assert_all_exact(gradients(strided), gradients([x.contiguous() for x in strided]))


@pytest.mark.parametrize("shape", [(1, 2, 0), (0, 2, 5), (2, 0, 5)])
def test_nothing_at_all(shape):
    batch, heads, tokens = shape
    inputs, state = make("channel", tokens, batch=batch, heads=heads)
    out, last, *gradients = after(state, *inputs)
    assert out.shape == (*shape, 16)
    assert_exact(last, state)
    assert [x.shape for x in gradients] == [x.shape for x in (*inputs, state)]


def test_errors_states_and_triangles_are_kept():
    """One unit is the bytes of a tensor of T x K; states of K x V and triangles of C x C a chunk of C rows."""
    inputs, state = make("head", 128, BF16, 64, 64)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x) or x, lambda x: x):
        scan(*(x.requires_grad_() for x in inputs), state=state)
    own = {x.data_ptr() for x in inputs}
    kept = [x for x in shapes if x.data_ptr() not in own]
    assert sorted(x.shape[2:] for x in kept) == [(2, 64, 64), (2, 64, 64), (128, 64)]
    assert sum(x.numel() * x.element_size() for x in kept) == 3 * inputs[2].numel() * inputs[2].element_size()


@pytest.mark.parametrize("kind", ["channel", "head shared"])
def test_the_operations_keep_torchs_rules(kind):
    inputs, state = make(kind, 3)
    mask = torch.tensor([[True, False, True]], device=DEVICE)
    out, last, *kept = delta_scan_triton(*inputs, state, mask, True)
    arguments = (torch.ones_like(out), torch.ones_like(last), *inputs, mask, *kept)
    torch.library.opcheck(delta_scan_triton_backward, arguments, test_utils=ALONE)
    if kind == "channel":
        torch.library.opcheck(delta_scan_triton, (*inputs, None, None, False), test_utils=ALONE)
        leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
        torch.library.opcheck(delta_scan_triton, (*leaves, mask, True))


def test_compiled_is_eager():
    inputs, state = make("head", 20)
    compiled = torch.compile(lambda *x: scan(*x[:-1], state=x[-1]), fullgraph=True, backend="aot_eager")
    assert_all_exact(differentiated(compiled, [*inputs, state]), after(state, *inputs))


def test_other_sizes_dtypes_and_devices_are_refused(monkeypatch):
    inputs, _ = make("channel", 3)
    for n in range(len(inputs)):
        wide = [x.double() if n == m else x for m, x in enumerate(inputs)]
        with pytest.raises(
            ValueError, match=r"'triton' of delta_scan computes in float32, bfloat16, float16, got .*64"
        ):
            scan(*wide)
    with pytest.raises(ValueError, match="'triton' of delta_scan holds at most 256 key channels per head, got 257"):
        scan(*make("none", 3, K=257)[0])
    with pytest.raises(ValueError, match="'triton' of delta_scan holds at most 512 value channels per head, got 513"):
        scan(*make("none", 3, V=513)[0])
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"'triton' of delta_scan needs tensors on a CUDA device .*, got cpu"):
        scan(*(x.cpu() for x in inputs))


@thinned(3, kind=("head", "channel", "none"))
def test_cards_before_hopper(kind, monkeypatch):
    monkeypatch.setattr(common, "card", lambda device: common.Card((8, 0), 163 * 1024))
    inputs, state = make(kind, 17, BF16, 80)
    assert_is_the_definition(inputs, state, BF16)
