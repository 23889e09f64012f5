"""Engine B against its definition: dense scores, a mask and a softmax, as the backend `reference` computes them."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subquad.ops import block_attention, block_attention_with_lse, merge_attention
from subquad.ops._reference import softmax_weights as dense_weights
from subquad.ops._sequential import attend as sequential
from subquad.ops._torch import attend as tiled
from subquad.ops._torch.attend import block_attention_cpu, block_attention_cpu_backward
from subquad.ops._torch.gathered import gathered
from subquad.ops.attend import softmax_weights
from subquad.ops.chunks import block_sizes
from subquad.ops.patterns import (
    Band,
    Causal,
    Full,
    Globals,
    Prefix,
    Segments,
    Shifted,
    Sinks,
    SinkTokens,
    Suffix,
    Window,
)
from subquad.testing import LOW_PRECISION, assert_exact, assert_same_maths, largest_allocation, mask_with
from tests.ops.cases import (
    ALONE,
    LAYOUTS,
    PATTERNS,
    assert_all_exact,
    assert_all_in_budget,
    assert_all_same_maths,
    differentiated,
    normal,
    thinned,
)

B, H, K = 2, 4, 6
SOME = [Causal(), Full(), Window(width=5), Segments(size=7, back=2), Prefix(length=13), Suffix(start=13)]
FORMS = ("reference", "torch", "gathered", "sequential")
computed = pytest.mark.parametrize("form", FORMS[1:])
few = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
MASK = mask_with([(9, 25, 6), (0, 33, 7)])


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture
def backend(form, monkeypatch):
    """The backend of a form, in small chunks. `gathered` is how `torch` computes on other devices and with dropout."""
    monkeypatch.setattr(sequential, "QUERY_CHUNK", 16)
    monkeypatch.setattr(sequential, "KEY_CHUNK", 24)
    if form == "gathered":
        monkeypatch.setattr(tiled, "_on_cpu", lambda *args: gathered(*args, 0.0))
    return "torch" if form == "gathered" else form


def qkv(tokens=70, keys=None, heads=H, kv_heads=None, values=K, batch=B, dtype=torch.float64):
    keys = tokens if keys is None else keys
    shapes = (heads, tokens, K), (kv_heads or heads, keys, K), (kv_heads or heads, keys, values)
    return [normal(batch, *shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes, 1)]


def attention(pattern, backend, **options):
    return lambda q, k, v: block_attention_with_lse(q, k, v, pattern, backend=backend, **options)


def assert_is_the_definition(backend, inputs, pattern, **options):
    """Compare outputs, lse and every gradient, through the lse too."""
    actual, expected = (differentiated(attention(pattern, name, **options), inputs) for name in (backend, "reference"))
    assert_all_same_maths(actual, expected, f"{pattern}, {options}")


def test_the_definition_by_hand():
    q, k, v = (normal(1, 1, 2, 3, seed=n) for n in range(3))
    w = torch.softmax((q[0, 0, 1] * k[0, 0]).sum(-1) / 3**0.5, 0)
    out = block_attention(q, k, v, Causal(), backend="reference")
    assert_same_maths(out[0, 0, 0], v[0, 0, 0])
    assert_same_maths(out[0, 0, 1], w[0] * v[0, 0, 0] + w[1] * v[0, 0, 1])
    assert_same_maths(softmax_weights(q, k, Causal())[0, 0], torch.stack([torch.tensor([1.0, 0.0]).double(), w]))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(scale, backend):
    q, k, v = qkv(20)
    weights = softmax_weights(q, k, Full(), scale=scale)
    assert_same_maths(weights, (scale * q @ k.mT).softmax(-1))
    assert_same_maths(block_attention(q, k, v, Full(), scale=scale, backend=backend), weights @ v)


@computed
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_every_pattern_is_its_definition(pattern, backend):
    assert_is_the_definition(backend, qkv(), pattern)


@st.composite
def places(draw):
    """Tokens, keys and where they begin: often as in a continued sequence, else anywhere."""
    tokens, old, start = draw(st.integers(0, 100)), draw(st.integers(0, 40)), draw(st.integers(0, 60))
    if draw(st.booleans()):
        return tokens, tokens + old, {"q_start": start, "k_start": start - old}
    return tokens, draw(st.integers(1, 60)), {"q_start": start, "k_start": draw(st.integers(-20, 60))}


@st.composite
def ragged(draw):
    """Rows that start apart, have lengths of their own, or hold several documents."""
    tokens, old = draw(st.integers(1, 50)), draw(st.integers(0, 40))
    starts = draw(st.sampled_from([50, 3, torch.tensor([50, 40]), torch.tensor([3, 70])]))
    options = {"q_start": starts, "k_start": starts - old}
    if draw(st.booleans()):
        options["lengths"] = torch.tensor(draw(st.lists(st.integers(0, tokens + old), min_size=B, max_size=B)))
    if draw(st.booleans()):
        options["doc_ids"] = (torch.arange(B * (tokens + old)) // draw(st.integers(1, 30))).view(B, -1)
    return tokens, tokens + old, options


@computed
@settings(few, max_examples=20)
@given(
    pattern=st.sampled_from(PATTERNS),
    where=st.one_of(places(), ragged()),
    kv_heads=st.sampled_from([1, 2, 4]),
    values=st.sampled_from([1, 4, 6, 9]),
)
def test_any_sizes_offsets_and_ragged_rows(backend, pattern, where, kv_heads, values):
    tokens, keys, options = where
    inputs = qkv(tokens, keys, kv_heads=kv_heads, values=values)
    assert_is_the_definition(backend, inputs, pattern, scale=0.3, **options)


@thinned(4, pattern=SOME, form=FORMS)
def test_rows_that_start_apart_are_as_alone(pattern, backend):
    inputs, starts = qkv(20, 50), [30, 12]
    options = {"q_start": torch.tensor(starts), "k_start": torch.tensor(starts) - 30}
    whole = block_attention(*inputs, pattern, **options, backend=backend)
    for b, start in enumerate(starts):
        row = [x[b : b + 1] for x in inputs]
        alone = block_attention(*row, pattern, q_start=start, k_start=start - 30, backend=backend)
        assert_same_maths(whole[b : b + 1], alone, f"row {b}")


@thinned(4, pattern=PATTERNS, form=FORMS)
def test_slots_before_position_zero_hold_no_key(pattern, backend):
    q, k, v = qkv(20, 30)
    with_empty_slots = block_attention(q, k, v, pattern, k_start=-10, backend=backend)
    assert_same_maths(with_empty_slots, block_attention(q, k[:, :, 10:], v[:, :, 10:], pattern, backend=backend))


@thinned(4, pattern=PATTERNS, form=FORMS)
def test_lengths_cut_the_keys_and_zero_the_queries(pattern, backend):
    out, lse, *gradients = differentiated(attention(pattern, backend, lengths=torch.tensor([30, 17])), qkv(30))
    alone = block_attention(*(x[1:, :, :17] for x in qkv(30)), pattern, backend=backend)
    assert_same_maths(out[1:, :, :17], alone)
    assert torch.isneginf(lse[1, :, 17:]).all()
    for x in (out, *gradients):
        assert_exact(x[1, :, 17:], torch.zeros_like(x[1, :, 17:]))


@thinned(4, pattern=PATTERNS, form=FORMS)
def test_padding_anywhere_is_as_if_removed(pattern, backend):
    inputs = qkv(40)
    out, lse, *gradients = differentiated(attention(pattern, backend, mask=MASK), inputs)
    for b in range(B):
        alone = attention(pattern, backend)(*(x[b : b + 1, :, MASK[b]] for x in inputs))
        assert_all_same_maths([x[b : b + 1, :, MASK[b]] for x in (out, lse)], alone)
        assert torch.isneginf(lse[b, :, ~MASK[b]]).all()
        for x in (out, *gradients):
            assert_exact(x[b, :, ~MASK[b]], torch.zeros_like(x[b, :, ~MASK[b]]))


@thinned(4, pattern=SOME, form=FORMS, dtype=LOW_PRECISION)
def test_rubbish_in_padding_changes_no_bit(pattern, backend, dtype):
    expected, *others = (
        differentiated(
            attention(pattern, backend, mask=MASK),
            [x.masked_fill(~MASK[:, None, :, None], rubbish) for x in qkv(40, dtype=dtype)],
        )
        for rubbish in (0.0, 1e4, torch.nan, -torch.inf)
    )
    assert not any(x.isnan().any() for x in expected)
    for actual in others:
        assert_all_exact(actual, expected)


@thinned(3, pattern=(Causal(), Full(), Window(width=9)), form=FORMS)
def test_packed_documents_are_documents_alone(pattern, backend):
    sizes, inputs = [7, 20, 13], qkv(40)
    doc_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes)).expand(B, -1)
    packed = block_attention(*inputs, pattern, doc_ids=doc_ids, backend=backend)
    parts = zip(*(x.split(sizes, 2) for x in inputs), strict=True)
    assert_same_maths(packed, torch.cat([block_attention(*x, pattern, backend=backend) for x in parts], 2))


@thinned(4, pattern=SOME, form=FORMS)
def test_grouped_heads_are_repeated_heads(pattern, backend):
    run, inputs = attention(pattern, backend), qkv(40, kv_heads=2)
    expected = differentiated(lambda q, k, v: run(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)), inputs)
    assert_all_same_maths(differentiated(run, inputs), expected)


@thinned(4, pattern=PATTERNS, form=FORMS)
def test_nothing_and_one_token(pattern, backend):
    for tokens, keys in ((0, 0), (0, 5), (5, 0), (1, 1), (1, 30)):
        run = attention(pattern, backend, q_start=max(0, keys - tokens))
        out, lse, *gradients = differentiated(run, qkv(tokens, keys, values=3))
        assert out.shape == (B, H, tokens, 3)
        assert lse.shape == (B, H, tokens)
        assert all(x.isfinite().all() for x in (out, *gradients))
        if keys == 0:
            assert_exact(out, torch.zeros_like(out))
            assert torch.isneginf(lse).all()


def test_a_query_without_keys_gives_zeros_and_no_gradient(backend):
    out, lse, dq, dk, dv = differentiated(attention(Suffix(start=25), backend), qkv(40))
    assert_exact(out[:, :, :25], torch.zeros_like(out[:, :, :25]))
    assert torch.isneginf(lse[:, :, :25]).all()
    assert lse[:, :, 25:].isfinite().all()
    assert_exact(dq[:, :, :25], torch.zeros_like(dq[:, :, :25]))
    assert all(x.isfinite().all() for x in (dk, dv))


@thinned(3, pattern=SOME, form=FORMS[1:])
def test_lse_alone_has_its_gradients(pattern, backend):
    actual, expected = (
        differentiated(lambda *x, name=name: attention(pattern, name)(*x)[1:], qkv(40))
        for name in (backend, "reference")
    )
    assert_all_same_maths(actual, expected)


@thinned(4, pattern=SOME, form=FORMS)
def test_dropout_zeroes_weights_scales_the_others_and_passes_gradients(pattern, backend):
    q, k, _ = qkv(40, heads=2)
    v = torch.eye(40, dtype=torch.float64).expand(B, 2, 40, 40)  # outputs are then the weights

    def run(q, k, v):
        torch.manual_seed(0)
        return (block_attention(q, k, v, pattern, dropout_p=0.25, backend=backend),)

    weights = softmax_weights(q, k, pattern)
    (dropped,) = run(q, k, v)
    kept = dropped != 0
    assert_same_maths(dropped, weights * kept / 0.75)
    assert 0.7 < kept[weights > 0].double().mean() < 0.8
    expected = differentiated(lambda q, k, v: (softmax_weights(q, k, pattern) * kept / 0.75 @ v,), (q, k, v))
    assert_all_same_maths(differentiated(run, (q, k, v)), expected)


def plain(q, k, v, pattern):
    """The plain form, in the dtype of its inputs."""
    position = torch.arange(q.shape[2])
    allowed = pattern.allowed(position[:, None], position[None])[None]
    return (dense_weights(q, k, allowed, K**-0.5)[0] @ v,)


@thinned(4, pattern=SOME, form=FORMS, dtype=LOW_PRECISION)
def test_low_precision_stays_in_budget(pattern, backend, dtype):
    inputs = qkv(dtype=dtype)
    exact = differentiated(lambda *x: plain(*x, pattern), [x.double() for x in inputs])
    expected = differentiated(lambda *x: plain(*x, pattern), inputs)
    actual = differentiated(lambda *x: attention(pattern, backend)(*x)[:1], inputs)
    assert all(x.dtype == dtype for x in actual)
    assert_all_in_budget(actual, expected, exact, dtype)


@thinned(3, pattern=SOME, form=FORMS[1:], dtype=LOW_PRECISION)
def test_logits_of_ten_thousand_are_finite(pattern, backend, dtype):
    q, k, v = qkv(dtype=dtype)
    out, lse, *gradients = differentiated(attention(pattern, backend, scale=1.0), (100 * q.sign(), 100 * k.sign(), v))
    assert not lse.isnan().any()
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_logits_of_ten_thousand_stay_in_budget_in_sequence(dtype):
    inputs = [factor * normal(B, H, 40, 8, seed=n).to(dtype) for factor, n in ((100, 1), (100, 2), (1, 3))]
    actual = differentiated(attention(Causal(), "sequential", chunk_size=(8, 16)), inputs)
    run = attention(Causal(), "reference")
    plain, exact = (differentiated(run, x) for x in (inputs, [x.double() for x in inputs]))
    assert_all_in_budget(actual, plain, exact, dtype)


@computed
@few
@given(
    pattern=st.sampled_from([p for p in PATTERNS if p.causal]),
    tokens=st.integers(1, 300),
    fraction=st.floats(0, 1),
    dtype=st.sampled_from(LOW_PRECISION),
    sharpness=st.sampled_from([1.0, 10.0, 100.0]),
)
def test_no_bit_depends_on_the_future(backend, pattern, tokens, fraction, dtype, sharpness):
    now = int(fraction * (tokens - 1))
    q, k, v = qkv(tokens, heads=1, batch=1, dtype=dtype)
    q, k = q * sharpness, k * sharpness
    others = [torch.cat([x[:, :, : now + 1], -3 * x[:, :, now + 1 :].flip(2)], 2) for x in (q, k, v)]
    before, after = ([x[:, :, : now + 1] for x in attention(pattern, backend)(*y)] for y in ((q, k, v), others))
    assert_all_exact(after, before, f"tokens after {now}")


@thinned(3, pattern=PATTERNS)
def test_strides_change_no_bit(pattern):
    def run(inputs, gradient):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = block_attention(*leaves, pattern)
        return [out, *torch.autograd.grad(out, leaves, gradient.expand(out.shape))]

    inputs, one = qkv(40), torch.ones((), dtype=torch.float64)
    expected = run(inputs, torch.ones_like(inputs[0]))
    for name in ("heads inside tokens", "channels apart"):
        assert_all_exact(run(map(LAYOUTS[name], inputs), one), expected, name)
    expanded = [x[:1, :1].expand(B, H, -1, -1) for x in inputs]
    assert_all_exact(run(expanded, one), run([x.contiguous() for x in expanded], torch.ones_like(inputs[0])))


SIZE, LONG = 64, 8 * 64
ROWS = {"static": {}, "ragged": {"q_start": torch.tensor([0]), "k_start": torch.tensor([0])}}
UNBOUNDED = (Causal(), Full(), Prefix(length=50), Suffix(start=200), Window(width=20), Segments(size=16))


@pytest.fixture(scope="module")
def long_inputs():
    return [x.requires_grad_() for x in qkv(LONG, heads=1, batch=1, dtype=torch.float32)]


@thinned(2, pattern=UNBOUNDED, rows=ROWS, form=("torch", "gathered"))
@pytest.mark.usefixtures("backend")
def test_no_tensor_has_a_square_of_entries(pattern, rows, long_inputs):
    with block_sizes(SIZE):
        largest = largest_allocation(lambda: block_attention(*long_inputs, pattern, **ROWS[rows]).sum().backward())
    assert largest <= LONG**2 * 4 // 4


def test_the_measure_sees_a_square_and_a_length_needs_none(long_inputs):
    q, k, v = long_inputs
    square = LONG**2 * 4
    assert largest_allocation(lambda: block_attention(q, k, v, Causal(), backend="reference")) >= square
    lengths = torch.tensor([LONG - 3])
    with block_sizes(SIZE):
        assert largest_allocation(lambda: block_attention(q, k, v, Full(), lengths=lengths)) <= square // 4


@pytest.mark.parametrize("entries", [40 * 80 * 2, 40 * 80, 1])
def test_tiles_of_some_heads_at_a_time(monkeypatch, entries):
    """Three heads in groups of two and one, one at a time, or too many scores for the caches."""
    inputs = [normal(2, 3, 130, 4, seed=seed) for seed in range(3)]
    monkeypatch.setattr(tiled, "ENTRIES", entries)
    assert_is_the_definition("torch", inputs, Segments(size=40))


OPERATORS = {
    "ragged": (Window(width=5), torch.arange(24) + torch.tensor([[0], [3]])),
    "causal": (Causal(), None),
    "folded": (Segments(size=8), None),
    "bounded": (Suffix(start=10), None),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_the_operators_keep_torchs_rules(case):
    pattern, positions = OPERATORS[case]
    inputs = qkv(24, heads=1)
    static = (pattern.key(), 0.4, 0, 0, None, positions, positions, None, None)
    if case == "ragged":
        torch.library.opcheck(block_attention_cpu, (*(x.clone().requires_grad_() for x in inputs), *static))
    torch.library.opcheck(block_attention_cpu, (*inputs, *static), test_utils=ALONE)
    out, lse = block_attention_cpu(*inputs, *static)
    for grad_lse in (None, torch.ones_like(lse)):
        arguments = (torch.ones_like(out), grad_lse, *inputs, out, lse, *static)
        torch.library.opcheck(block_attention_cpu_backward, arguments, test_utils=ALONE)


# Attention over a union of disjoint sets of keys.

UNIONS = {
    "window and sinks": [Window(width=4), Sinks(count=3, back=3)],
    "shifted segments and tokens": [Shifted(size=4, shift=1, back=1), SinkTokens(count=6, back=1, size=4, offset=3)],
    "segments and blocks": [Segments(size=4, back=1), Sinks(count=2, back=1, size=4)],
    "band and globals": [Band(before=2, after=1), Globals(count=3, back=2, ahead_blocks=1)],
    "alone": [Causal()],
    "a set that no query sees": [Window(width=4), Sinks(count=0, back=3)],
    "queries that see no set": [Sinks(count=0, back=5), Sinks(count=2, back=5)],
}


@thinned(4, case=UNIONS, form=FORMS)
def test_a_merge_is_the_softmax_over_the_union(case, backend):
    def merged(q, k, v):
        return merge_attention(*zip(*(attention(p, backend)(q, k, v) for p in UNIONS[case]), strict=True))

    def whole(q, k, v):
        weights = softmax_weights(q, k, *UNIONS[case])
        return weights @ v, ((q @ k.mT) / K**0.5).masked_fill(weights == 0, -torch.inf).logsumexp(-1)

    assert_all_same_maths(differentiated(merged, qkv(30)), differentiated(whole, qkv(30)), case)


def test_the_normaliser_of_a_query_without_keys_has_a_gradient_of_zero():
    lses = [torch.tensor([[[-torch.inf, 0.5]]], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    outs = [torch.zeros(1, 1, 2, 3, dtype=torch.float64) for _ in range(2)]
    _, lse = merge_attention(outs, lses)
    assert_same_maths(lse, torch.tensor([[[-torch.inf, 0.5 + math.log(2)]]], dtype=torch.float64))
    for gradient in torch.autograd.grad(lse[lse.isfinite()].sum(), lses):
        assert_same_maths(gradient, torch.tensor([[[0.0, 0.5]]], dtype=torch.float64))


@pytest.mark.parametrize(("outs", "lses"), [(2, 1), (0, 0)])
def test_outputs_and_normalisers_come_in_pairs(outs, lses):
    with pytest.raises(ValueError, match=f"one lse for each of one or more outs, got {lses} and {outs}"):
        merge_attention([torch.zeros(1, 1, 2, 3)] * outs, [torch.zeros(1, 1, 2)] * lses)


@settings(few, max_examples=10)
@given(queries=st.integers(1, 40), keys=st.integers(1, 40), data=st.data())
def test_key_lengths_cut_each_rows_keys(backend, queries, keys, data):
    lengths = data.draw(st.lists(st.integers(1, keys), min_size=B, max_size=B))
    q, k, v = qkv(queries, keys)
    out = block_attention(q, k, v, Full(), key_lengths=torch.tensor(lengths), backend=backend)
    for b, n in enumerate(lengths):
        expected = (q[b] @ k[b, :, :n].mT / K**0.5).softmax(-1) @ v[b, :, :n]
        assert_same_maths(out[b], expected, f"row {b} of {lengths}")


X, TWO, REAL = torch.zeros(B, H, 5, K), torch.tensor([1, 2]), torch.ones(B, 5, dtype=torch.bool)
AGREE = "must agree in B, K, G and S"
MASKED = "mask needs as many queries as keys, and neither lengths nor doc_ids, got T=5, S=5, lengths="
ALONE_MATCH = "key_lengths needs a non-causal pattern, integer starts, and neither lengths, mask nor doc_ids, got "
SEQUENTIAL = {"backend": "sequential"}
ERRORS = {
    "ndim": ({"k": X[0]}, r"k must have shape \[B, H, T, channels\], got \(4, 5, 6\)"),
    "channels": ({"k": X[..., :3]}, rf"q \[B, H, T, K\], k .* {AGREE}, got \(2, 4, 5, 6\), "),
    "batch": ({"q": X[:1]}, AGREE),
    "keys": ({"v": X[:, :, :3]}, AGREE),
    "heads": ({"k": X[:, :3], "v": X[:, :3]}, "query heads must be a multiple of the key heads, got 4 and 3"),
    "no key heads": ({"k": X[:, :0], "v": X[:, :0]}, "query heads must be a multiple of the key heads, got 4 and 0"),
    "dropout": ({"dropout_p": 1.0}, r"dropout_p must be at least 0 and below 1, got 1\.0"),
    "negative dropout": ({"dropout_p": -0.1}, r"dropout_p must be at least 0 and below 1, got -0\.1"),
    "mask and lengths": ({"mask": REAL, "lengths": TWO}, f"{MASKED}True, doc_ids=False"),
    "mask and documents": ({"mask": REAL, "doc_ids": REAL.long()}, f"{MASKED}False, doc_ids=True"),
    "mask of a continuation": ({"q": X[:, :, :2], "mask": REAL[:, :2]}, "mask needs as many .* got T=2, S=5"),
    "lengths": ({"lengths": TWO[:1]}, r"lengths must hold integers in the shape \(2,\), got torch\.int64 \(1,\)"),
    "documents": ({"doc_ids": REAL.float()}, r"doc_ids must hold integers in the shape \(2, 5\), got torch\.float32 "),
    "more queries than keys": ({"k": X[:, :, :3], "v": X[:, :, :3], "lengths": TWO},
                               "with lengths or doc_ids the queries are the last of the keys, got T=5 > S=3"),
    "queries before the last": ({"q": X[:, :, :2], "lengths": TWO}, "the queries must be the last of the keys: "
                                "q_start - k_start = S - T, got q_start=0, k_start=0, S=5, T=2"),
    "start's shape": ({"q_start": torch.tensor([1, 2, 3])},
                      r"a start must be an int or an integer tensor \[\] or \[2\], got torch\.int64 \(3,\)"),
    "start's dtype": ({"k_start": TWO.float()}, r"an int or an integer tensor \[\] or \[2\], got torch\.float32 "),
    "key_lengths' shape": ({"key_lengths": TWO[:1]}, r"key_lengths must hold integers in the shape \(2,\), got "),
    "key_lengths' dtype": ({"key_lengths": TWO.float()}, r"key_lengths must hold integers .*, got torch\.float32"),
    "key_lengths and lengths": ({"pattern": Full(), "key_lengths": TWO, "lengths": TWO}, rf"{ALONE_MATCH}Full\(\)"),
    "key_lengths and starts": ({"pattern": Full(), "key_lengths": TWO, "k_start": TWO}, rf"{ALONE_MATCH}Full\(\)"),
    "causal key_lengths": ({"key_lengths": TWO}, rf"{ALONE_MATCH}Causal\(\)"),
    "chunks of torch": ({"chunk_size": (4, 4)},
                        r"chunk_size is for .* 'sequential', got chunk_size=\(4, 4\) for 'torch'"),
    "empty chunks": ({"chunk_size": (4, 0), **SEQUENTIAL}, r"two numbers of at least 1 .*, got \(4, 0\)"),
    "three chunks": ({"chunk_size": (4, 4, 4), **SEQUENTIAL}, "chunk_size must be two numbers"),
}  # fmt: skip
TYPE_ERRORS = {
    "pattern": ({"pattern": "causal"}, "pattern must be a Pattern, got str; valid: "),
    "dtype": ({"q": X.long()}, r"q must be floating point, got torch\.int64"),
    "mask's dtype": ({"mask": REAL.float()}, "mask must be a bool tensor"),
}


@pytest.mark.parametrize("case", [*ERRORS, *TYPE_ERRORS])
def test_inputs_that_do_not_fit_are_refused(case):
    options, match = (ERRORS | TYPE_ERRORS)[case]
    q, k, v, pattern, *_ = ({"q": X, "k": X, "v": X, "pattern": Causal()} | options).values()
    rest = {name: option for name, option in options.items() if name not in ("q", "k", "v", "pattern")}
    with pytest.raises(ValueError if case in ERRORS else TypeError, match=match):
        block_attention(q, k, v, pattern, **rest)
