"""The `sequential` backends against the definitions: any chunks, every gradient, and how little memory they take."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from subquad.ops import block_attention, block_attention_with_lse, flops, gated_scan, running_softmax
from subquad.ops._sequential import attend as sequential
from subquad.ops._sequential.attend import block_attention_sequential, block_attention_sequential_backward
from subquad.ops._sequential.scan import (
    gated_scan_backward_op,
    gated_scan_op,
    running_softmax_backward_op,
    running_softmax_op,
)
from subquad.ops.backends import use_backend
from subquad.ops.patterns import Causal, Full, Prefix, Segments, Suffix, Window
from subquad.testing import LOW_PRECISION, AttentionContract, assert_exact, assert_in_budget, assert_same_maths

B, H, K, V = 2, 4, 6, 5
PATTERNS = [Causal(), Full(), Window(width=5), Segments(size=7, back=2), Prefix(length=13), Suffix(start=13)]
patterns = pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
some = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes = pytest.mark.parametrize("dtype", LOW_PRECISION)
chunks = st.sampled_from([7, 16, 1000])


@pytest.fixture
def cut(monkeypatch):
    """`cut(queries, keys)`: chunks of so many queries and keys."""

    def change(queries, keys):
        monkeypatch.setattr(sequential, "QUERY_CHUNK", queries)
        monkeypatch.setattr(sequential, "KEY_CHUNK", keys)

    return change


@pytest.fixture
def qkv(random):
    def make(tokens=70, keys=None, kv_heads=H, dtype=torch.float64):
        keys = tokens if keys is None else keys
        return [
            random(B, H, tokens, K, seed=1, dtype=dtype),
            random(B, kv_heads, keys, K, seed=2, dtype=dtype),
            random(B, kv_heads, keys, V, seed=3, dtype=dtype),
        ]

    return make


@pytest.fixture
def assert_attention_agrees(differentiated):
    """Outputs, lse and every gradient, those through lse too, against the dense definition."""

    def check(inputs, pattern, **options):
        def run(backend):
            return lambda q, k, v: block_attention_with_lse(q, k, v, pattern, backend=backend, **options)

        names = ("out", "lse", "gradient of q", "gradient of k", "gradient of v")
        actual, expected = differentiated(run("sequential"), inputs), differentiated(run("reference"), inputs)
        for name, a, e in zip(names, actual, expected, strict=True):
            assert_same_maths(a, e, f"{name}, {pattern}, {options}")

    return check


@some
@given(
    pattern=st.sampled_from(PATTERNS),
    tokens=st.integers(0, 60),
    old=st.integers(0, 30),
    start=st.integers(0, 40),
    kv_heads=st.sampled_from([1, 2, 4]),
    queries=chunks,
    keys=chunks,
)
def test_attention_is_its_definition(
    qkv, cut, assert_attention_agrees, pattern, tokens, old, start, kv_heads, queries, keys
):
    cut(queries, keys)
    inputs = qkv(tokens, tokens + old, kv_heads)
    assert_attention_agrees(inputs, pattern, q_start=start, k_start=start - old, scale=0.3)


@some
@given(
    pattern=st.sampled_from(PATTERNS),
    lengths=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    queries=chunks,
    keys=chunks,
)
def test_attention_with_ragged_lengths(qkv, cut, assert_attention_agrees, pattern, lengths, queries, keys):
    cut(queries, keys)
    assert_attention_agrees(qkv(50), pattern, lengths=torch.tensor(lengths))


@some
@given(
    pattern=st.sampled_from(PATTERNS),
    starts=st.tuples(st.integers(-20, 30), st.integers(-20, 30)),
    queries=chunks,
    keys=chunks,
)
def test_attention_with_positions_by_row(qkv, cut, assert_attention_agrees, pattern, starts, queries, keys):
    cut(queries, keys)
    start = torch.tensor(starts)
    assert_attention_agrees(qkv(20, 45), pattern, q_start=start + 25, k_start=start)


@patterns
def test_attention_within_documents_and_beside_padding(qkv, cut, assert_attention_agrees, pattern):
    cut(8, 16)
    assert_attention_agrees(qkv(), pattern, doc_ids=(torch.arange(70) // 13).expand(B, 70))
    mask = torch.ones(B, 70, dtype=torch.bool)
    mask[0, 5:20] = mask[1, 60:] = False
    assert_attention_agrees(qkv(), pattern, mask=mask)


def test_attention_of_one_query_and_one_key_at_a_time(qkv, cut, assert_attention_agrees):
    cut(1, 1)
    assert_attention_agrees(qkv(9), Window(width=5))


def test_queries_without_keys_give_zeros(qkv):
    q, k, v = (x.requires_grad_() for x in qkv(20))
    out, lse = block_attention_with_lse(q, k, v, Suffix(start=15), backend="sequential")
    assert_exact(out[:, :, :15], torch.zeros_like(out[:, :, :15]))
    assert_exact(lse[:, :, :15], torch.full_like(lse[:, :, :15], -torch.inf))
    for gradient in torch.autograd.grad(out.sum() + lse[:, :, 15:].sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_dropout_acts_on_the_weights_and_is_the_same_in_the_backward_pass(qkv, cut):
    cut(8, 16)
    q, k, _ = qkv(40)
    eye = torch.eye(40, dtype=torch.float64).expand(B, H, 40, 40)
    weights = block_attention(q, k, eye, Causal(), backend="reference")

    def attend(q, k, v):
        torch.manual_seed(5)
        return block_attention(q, k, v, Causal(), dropout_p=0.25, backend="sequential")

    kept = torch.where(weights > 0, attend(q, k, eye) / weights, 0.0)
    allowed = torch.ones(40, 40, dtype=torch.bool).tril().expand_as(kept)
    assert_same_maths(kept[allowed] * (kept[allowed] - 1 / 0.75), torch.zeros_like(kept[allowed]), "0 or 1 / 0.75")
    assert 0.2 < (kept[allowed] == 0).double().mean() < 0.3
    leaves = [x.requires_grad_() for x in (q, k, eye.clone())]
    plain = (leaves[0] @ leaves[1].mT * K**-0.5).masked_fill(~allowed, -torch.inf).softmax(-1) * kept @ leaves[2]
    out = attend(*leaves)
    assert_same_maths(out, plain)
    gradients, expected = (torch.autograd.grad((y * eye.cos()).sum(), leaves) for y in (out, plain))
    for actual, gradient in zip(gradients, expected, strict=True):
        assert_same_maths(actual, gradient)


@dtypes
@pytest.mark.parametrize("sharpness", [1.0, 1e4])
def test_attention_stays_in_budget_at_extreme_logits(random, differentiated, cut, dtype, sharpness):
    cut(8, 16)
    inputs = [sharpness**0.5 * random(B, H, 40, 8, seed=n).to(dtype) for n in (1, 2)] + [
        random(B, H, 40, 8, seed=3).to(dtype)
    ]

    def run(backend, dtype):
        return differentiated(
            lambda *x: block_attention_with_lse(*x, Causal(), backend=backend), [x.to(dtype) for x in inputs]
        )

    exact, plain, actual = run("reference", torch.float64), run("reference", dtype), run("sequential", dtype)
    for n, results in enumerate(zip(actual, plain, exact, strict=True)):
        assert_in_budget(*results, dtype, f"result {n}")


def test_attention_takes_the_memory_of_one_tile(random, cut, largest_allocation):
    cut(16, 32)

    def largest(batch, heads, tokens):
        q = random(batch, heads, tokens, 1, dtype=torch.float32).requires_grad_()
        return largest_allocation(lambda: block_attention(q, q, q, Causal(), backend="sequential").sum().backward())

    assert largest(1, 1, 64) == largest(1, 1, 96) == largest(2, 4, 32) == largest(3, 1, 64)


def test_attention_computes_the_chunks_within_reach_alone(random, cut):
    cut(16, 64)
    flops.register()
    q = random(2, 3, 100, 4, dtype=torch.float32).requires_grad_()
    for pattern, entries in ((Full(), 100 * 100), (Window(width=17), 16 * 16 + 16 * 32 * 5 + 4 * 20)):
        with FlopCounterMode(display=False) as counter:
            out = block_attention(q, q, q, pattern, backend="sequential")
        assert counter.get_total_flops() == 2 * 3 * entries * 2 * (4 + 4)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 2 * 3 * entries * 2 * (3 * 4 + 2 * 4)


# The scans.


def assert_all_same_maths(actual, expected):
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_same_maths(a, e, f"result {n}")


@some
@given(
    tokens=st.integers(0, 60),
    decays=st.sampled_from([0, 1, K]),
    normalise=st.booleans(),
    eps=st.sampled_from([0.0, 0.1]),
    chunk_size=st.sampled_from([None, 1, 7, 100]),
)
def test_gated_scan_is_its_definition(random, differentiated, tokens, decays, normalise, eps, chunk_size):
    q, i = (random(B, H, tokens, K, seed=n).abs() for n in (1, 2))
    v, state = random(B, H, tokens, V, seed=3), random(B, H, K, V + normalise, seed=4).abs()
    log_f = [-random(B, H, tokens, decays, seed=5).abs()] if decays else []

    def run(backend):
        options = {"normalise": normalise, "eps": eps, "chunk_size": chunk_size, "backend": backend}
        return lambda state, q, i, v, log_f=None: gated_scan(q, i, v, log_f, state=state, **options)

    inputs = [state, q, i, v, *log_f]
    assert_all_same_maths(differentiated(run("sequential"), inputs), differentiated(run("reference"), inputs))


@some
@given(
    tokens=st.integers(0, 60),
    sharpness=st.sampled_from([1.0, 30.0, 1e4]),
    chunk_size=st.sampled_from([None, 1, 7, 100]),
)
def test_running_softmax_is_its_definition(random, differentiated, tokens, sharpness, chunk_size):
    p, k = random(B, H, tokens, K, seed=1).softmax(-1), sharpness * random(B, H, tokens, K, seed=2)
    v, a, s = random(B, H, tokens, V, seed=3), random(B, H, K, seed=4), random(B, H, K, V, seed=5)

    def run(backend):
        def f(p, k, v, a, s):
            out, after, lse = running_softmax(p, k, v, state=(a, s), chunk_size=chunk_size, backend=backend)
            return out, lse, *after

        return f

    inputs = [p, k, v, a, s]
    assert_all_same_maths(differentiated(run("sequential"), inputs), differentiated(run("reference"), inputs))


@pytest.mark.parametrize("normalise", [False, True])
def test_scans_do_not_see_padding(random, differentiated, normalise):
    mask = torch.ones(B, 30, dtype=torch.bool)
    mask[0, :9] = mask[1, 12:] = mask[0, 20] = False
    q, i = (random(B, H, 30, K, seed=n).abs() for n in (1, 2))
    v = random(B, H, 30, V, seed=3)
    for f in (
        lambda backend: lambda q, i, v: gated_scan(q, i, v, None, normalise=normalise, mask=mask, backend=backend),
        lambda backend: lambda p, k, v: running_softmax(p, 9 * k, v, mask=mask, backend=backend)[:1],
    ):
        assert_all_same_maths(differentiated(f("sequential"), [q, i, v]), differentiated(f("reference"), [q, i, v]))


def scans(q, i, v, chunk_size=None):
    return (
        gated_scan(q, i, v, -i, chunk_size=chunk_size, backend="sequential").out,
        running_softmax(q, i, v, chunk_size=chunk_size, backend="sequential").out,
    )


def test_scans_keep_one_state_and_square_root_of_them_in_training(random, largest_allocation):
    def largest(tokens, grad):
        q, i = (random(1, 1, tokens, 32, seed=n, dtype=torch.float32).abs().requires_grad_(grad) for n in (1, 2))
        v = random(1, 1, tokens, 64, seed=3, dtype=torch.float32)
        return largest_allocation(lambda: [y.sum().backward() if grad else y for y in scans(q, i, v)])

    state, row = 8 * 32 * 64, 4 * 64
    assert largest(16, False) == state
    assert largest(128, False) == 128 * row  # the outputs
    assert largest(9, True) == 3 * state
    assert largest(36, True) == 6 * state


def test_scans_count_their_products(random):
    flops.register()
    q, i = (random(2, 3, 20, 4, seed=n, dtype=torch.float32).abs().requires_grad_() for n in (1, 2))
    v = random(2, 3, 20, 5, seed=3, dtype=torch.float32)
    for f, channels in (
        (lambda: gated_scan(q, i, v, None, backend="sequential").out, 5),
        (lambda: gated_scan(q, i, v, None, normalise=True, backend="sequential").out, 6),
        (lambda: running_softmax(q, i, v, backend="sequential").out, 5),
    ):
        with FlopCounterMode(display=False) as counter:
            out = f()
        forward = counter.get_total_flops()
        assert forward == 2 * 3 * 20 * 4 * 4 * channels
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert 2 * counter.get_total_flops() == 5 * forward


# What torch asks of an operation.


ALONE = ("test_schema", "test_faketensor")
"""The rules of an operation that nothing is differentiated through."""


def test_the_attention_keeps_torchs_rules(random):
    q, k, v = random(2, 2, 9, 4, seed=1), random(2, 2, 12, 4, seed=2), random(2, 2, 12, 3, seed=3)
    positions = torch.arange(12).expand(2, 12)
    rows = (positions[:, 3:], positions, positions[:, 3:] // 5, positions // 5)
    whole = (Segments(size=4).key(), 0.5, None, 0.0, 4, 5, 3, 0, None, None, None, None, None)
    ragged = (Causal().key(), 0.5, torch.tensor(7), 0.2, 4, 5, 0, 0, None, *rows)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(block_attention_sequential, (*leaves, *ragged))
    torch.library.opcheck(block_attention_sequential, (q, k, v, *whole), test_utils=ALONE)
    for where in (whole, ragged):
        out, lse, m, z = block_attention_sequential(q, k, v, *where)
        arguments = (out.cos(), lse.cos(), out, m, z, q, k, v, *where)
        torch.library.opcheck(block_attention_sequential_backward, arguments, test_utils=ALONE)


@pytest.mark.parametrize("kind", ["gated_scan", "running_softmax"])
def test_the_scans_keep_torchs_rules(random, kind):
    q, i, log_f = (random(2, 9, 4, seed=n).abs() for n in range(3))
    q, i, log_f = (x.float() for x in (q, i, log_f))  # the state is float64 all the same
    v, state, lse = random(2, 9, 3, seed=4).float(), random(2, 4, 3, seed=5), random(2, 4, seed=6)
    gated = kind == "gated_scan"
    operation, last = (gated_scan_op, (-log_f, state)) if gated else (running_softmax_op, (lse, state))
    torch.library.opcheck(operation, (q, i, v, *last, 4, False), test_utils=ALONE)
    leaves = [x.clone().requires_grad_() for x in (q, i, v, *last)]
    torch.library.opcheck(operation, (*leaves, 4, True))
    kept = operation(q, i, v, *last, 4, True)
    if gated:
        arguments = (v.cos(), state.cos(), q, i, v, -log_f, kept[-1], 4)
        torch.library.opcheck(gated_scan_backward_op, arguments, test_utils=ALONE)
    else:
        arguments = (v.cos(), i.cos(), lse.cos(), state.cos(), q, i, v, *kept[-2:], 4)
        torch.library.opcheck(running_softmax_backward_op, arguments, test_utils=ALONE)


@pytest.mark.parametrize(
    "f",
    [
        lambda q, i, v: block_attention(q, i, v, PATTERNS[2], dropout_p=0.1, backend="sequential"),
        lambda q, i, v: gated_scan(q, i, v, -i, normalise=True, backend="sequential").out,
        lambda q, i, v: running_softmax(q, i, v, backend="sequential").out,
    ],
    ids=["block_attention", "gated_scan", "running_softmax"],
)
def test_everything_compiles_whole(random, f):
    torch._dynamo.reset()
    q, i, v = (random(2, 2, 20, 4, seed=n, dtype=torch.float32).abs().requires_grad_() for n in (1, 2, 3))
    results = []
    for g in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        out = g(q, i, v)
        results.append([out, *torch.autograd.grad(out.sum(), (q, i, v))])
    for eager, compiled in zip(*results, strict=True):
        assert_exact(compiled, eager)


# The laws of the mechanisms, on this backend.


class Sequential(AttentionContract):
    """The contract on the sequential backend, in small chunks; mechanisms keep the laws that a backend can break."""

    laws = (2, 3, 7, 8, 14)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _backend(cls):
        before = sequential.QUERY_CHUNK, sequential.KEY_CHUNK
        sequential.QUERY_CHUNK, sequential.KEY_CHUNK = 32, 64
        with use_backend("sequential"):
            yield
        sequential.QUERY_CHUNK, sequential.KEY_CHUNK = before

    def test_law_06_cost_grows_as_the_class_says(self):
        flops.register()
        layer, counts = self.make(torch.float32), []
        for tokens in (512, 1024):
            with FlopCounterMode(display=False) as counter:
                layer(self.inputs(tokens, 1, torch.float32))
            counts.append(counter.get_total_flops() - layer.cost(tokens).projection_flops)
        assert (counts[1] < 2.2 * counts[0]) == (layer.cost_order == "linear")

    # `use_backend` does not act inside torch.compile; the operations are compiled above.
    test_law_12_compiles_whole_with_aot_eager = None
    test_law_12_compiles_whole_with_inductor = None

    def test_law_14_long_inputs_in_low_precision_are_finite(self):
        for dtype in (torch.bfloat16, torch.float16):
            layer = self.make(dtype, num_heads=self.fewest_heads)
            x = self.inputs(2048, 1, dtype).requires_grad_()
            y = layer(x)[0]
            (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
            assert y.isfinite().all()
            assert gradient.isfinite().all()


class TestFull(Sequential):
    name = "full"


class TestWindow(Sequential):
    name = "window"
    options = {"width": 40, "rope": True}


class TestLinear(Sequential):
    name = "linear"


class TestLatte(Sequential):
    name = "latte"
    options = {"num_latents": 10}
