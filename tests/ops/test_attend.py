"""Engine B against its definition, which the `reference` backend is: dense scores, a mask, a softmax."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subquad.ops import block_attention, block_attention_with_lse
from subquad.ops._reference import softmax_weights as dense_weights
from subquad.ops._torch import attend as torch_attend
from subquad.ops._torch.attend import block_attention_cpu, block_attention_cpu_backward
from subquad.ops._torch.gathered import gathered
from subquad.ops.attend import softmax_weights
from subquad.ops.patterns import (
    Band,
    Blocks,
    Causal,
    Dilated,
    DilatedBand,
    Full,
    Globals,
    Prefix,
    Random,
    Segments,
    Shifted,
    Sinks,
    Strided,
    Suffix,
    Window,
)
from subquad.ops.patterns.sparse import Columns
from subquad.ops.slots import Slots
from subquad.testing import LOW_PRECISION, assert_exact, assert_in_budget, assert_same_maths, mask_with

B, H, K = 2, 4, 6
PATTERNS = [
    Causal(),
    Full(),
    Window(width=1),
    Window(width=5),
    Window(width=20),
    Window(width=100),
    Segments(size=8),
    Segments(size=7, back=2),
    Segments(size=16, back=0),
    Segments(size=100),
    Prefix(length=0),
    Prefix(length=13),
    Prefix(length=100),
    Suffix(start=0),
    Suffix(start=13),
    Suffix(start=90),
    Band(before=3, after=9),
    Band(before=30, after=0),
    Shifted(size=16, shift=8),
    Shifted(size=8, shift=3, back=1),
    Blocks(size=9),
    Blocks(size=8, back=1, ahead_blocks=1),
    Sinks(count=3, back=4),
    Sinks(count=1, back=1, size=8),
    Globals(count=3, back=4, ahead_blocks=2),
    Globals(count=1, back=1, ahead_blocks=1, size=8),
    Random(size=8, index=1, of=2, skip=1, back=0),
    Random(size=8, index=0, of=2, skip=1, back=0, blocks=9),
    Dilated(width=4, dilation=3),
    DilatedBand(before=2, after=1, dilation=3),
    Strided(stride=5),
    Columns(size=8, last=3),
]
patterns = pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
some_patterns = pytest.mark.parametrize(
    "pattern",
    [Causal(), Full(), Window(width=5), Segments(size=7, back=2), Prefix(length=13), Suffix(start=13)],
    ids=repr,
)
backends = pytest.mark.parametrize("backend", ["reference", "torch"])
few = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["fused", "gathered"])
def cpu_path(request, monkeypatch):
    """Both forms of the `torch` backend: the fused one, and the one for other devices and for dropout."""
    if request.param == "gathered":
        monkeypatch.setattr(torch_attend, "_on_cpu", lambda *args: gathered(*args, 0.0))


@pytest.fixture
def qkv(random):
    def make(tokens=70, keys=None, heads=H, kv_heads=None, values=K, batch=B, dtype=torch.float64):
        keys = tokens if keys is None else keys
        return [
            random(batch, heads, tokens, K, seed=1, dtype=dtype),
            random(batch, kv_heads or heads, keys, K, seed=2, dtype=dtype),
            random(batch, kv_heads or heads, keys, values, seed=3, dtype=dtype),
        ]

    return make


@pytest.fixture
def assert_backends_agree(differentiated):
    """Outputs, lse and every gradient, those through lse too."""

    def check(inputs, pattern, **options):
        def run(backend):
            return lambda q, k, v: block_attention_with_lse(q, k, v, pattern, backend=backend, **options)

        names = ("out", "lse", "gradient of q", "gradient of k", "gradient of v")
        actual, expected = differentiated(run("torch"), inputs), differentiated(run("reference"), inputs)
        for name, a, e in zip(names, actual, expected, strict=True):
            assert_same_maths(a, e, f"{name}, {pattern}, {options}")

    return check


def test_the_definition_by_hand(random):
    q, k, v = random(1, 1, 2, 3, seed=1), random(1, 1, 2, 3, seed=2), random(1, 1, 2, 3, seed=3)
    w = torch.softmax((q[0, 0, 1] * k[0, 0]).sum(-1) / 3**0.5, 0)
    out = block_attention(q, k, v, Causal(), backend="reference")
    assert_same_maths(out[0, 0, 0], v[0, 0, 0])
    assert_same_maths(out[0, 0, 1], w[0] * v[0, 0, 0] + w[1] * v[0, 0, 1])
    assert_same_maths(softmax_weights(q, k, Causal())[0, 0], torch.stack([torch.tensor([1.0, 0.0]).double(), w]))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale_is_taken(qkv, scale):
    q, k, v = qkv(20)
    weights = softmax_weights(q, k, Full(), scale=scale)
    assert_same_maths(weights, (scale * q @ k.mT).softmax(-1))
    for backend in ("reference", "torch"):
        assert_same_maths(block_attention(q, k, v, Full(), scale=scale, backend=backend), weights @ v)


@pytest.mark.usefixtures("cpu_path")
@patterns
def test_every_pattern_is_its_definition(pattern, qkv, assert_backends_agree):
    assert_backends_agree(qkv(), pattern)


@pytest.mark.usefixtures("cpu_path")
@few
@given(
    pattern=st.sampled_from(PATTERNS),
    tokens=st.integers(0, 140),
    old=st.integers(0, 40),
    start=st.integers(0, 60),
    kv_heads=st.sampled_from([1, 2, 4]),
    values=st.sampled_from([1, 4, 6, 9]),
    scale=st.sampled_from([None, 0.3]),
)
def test_any_sizes_and_offsets(qkv, assert_backends_agree, pattern, tokens, old, start, kv_heads, values, scale):
    inputs = qkv(tokens, tokens + old, kv_heads=kv_heads, values=values)
    assert_backends_agree(inputs, pattern, q_start=start, k_start=start - old, scale=scale)


@few
@given(
    pattern=st.sampled_from(PATTERNS),
    tokens=st.integers(1, 60),
    keys=st.integers(1, 60),
    q_start=st.integers(0, 60),
    k_start=st.integers(-20, 60),
)
def test_queries_and_keys_may_stand_anywhere(qkv, assert_backends_agree, pattern, tokens, keys, q_start, k_start):
    assert_backends_agree(qkv(tokens, keys), pattern, q_start=q_start, k_start=k_start)


@st.composite
def ragged(draw):
    """Rows that start apart, have lengths of their own, or hold several documents."""
    tokens, old = draw(st.integers(1, 50)), draw(st.integers(0, 40))
    starts = draw(st.sampled_from([[0, 0], [50, 40], [3, 70]]))
    options = {"q_start": torch.tensor(starts), "k_start": torch.tensor(starts) - old}
    if draw(st.booleans()):
        options = {"q_start": starts[0], "k_start": starts[0] - old}
    if draw(st.booleans()):
        options["lengths"] = torch.tensor(draw(st.lists(st.integers(0, tokens + old), min_size=B, max_size=B)))
    if draw(st.booleans()):
        size = draw(st.integers(1, 30))
        options["doc_ids"] = (torch.arange(B * (tokens + old)) // size).view(B, -1)
    return tokens, tokens + old, options


@pytest.mark.usefixtures("cpu_path")
@few
@given(pattern=st.sampled_from(PATTERNS), rows=ragged())
def test_ragged_rows(qkv, assert_backends_agree, pattern, rows):
    tokens, keys, options = rows
    assert_backends_agree(qkv(tokens, keys), pattern, **options)


@backends
@some_patterns
def test_ragged_starts_are_rows_apart(qkv, pattern, backend):
    q, k, v = qkv(20, 50)
    starts = [30, 12]
    whole = block_attention(
        q, k, v, pattern, q_start=torch.tensor(starts), k_start=torch.tensor(starts) - 30, backend=backend
    )
    for b, start in enumerate(starts):
        row = slice(b, b + 1)
        alone = block_attention(q[row], k[row], v[row], pattern, q_start=start, k_start=start - 30, backend=backend)
        assert_same_maths(whole[row], alone, f"row {b}")


@backends
@patterns
def test_slots_before_position_zero_hold_no_key(qkv, pattern, backend):
    q, k, v = qkv(20, 30)
    with_empty_slots = block_attention(q, k, v, pattern, k_start=-10, backend=backend)
    without = block_attention(q, k[:, :, 10:], v[:, :, 10:], pattern, backend=backend)
    assert_same_maths(with_empty_slots, without)


@backends
@patterns
def test_lengths_cut_the_keys_and_zero_the_queries(qkv, pattern, backend):
    q, k, v = qkv(30, 30)
    lengths = torch.tensor([30, 17])
    out, lse = block_attention_with_lse(q, k, v, pattern, lengths=lengths, backend=backend)
    alone = block_attention(q[1:, :, :17], k[1:, :, :17], v[1:, :, :17], pattern, backend=backend)
    assert_same_maths(out[1:, :, :17], alone)
    assert_exact(out[1, :, 17:], torch.zeros_like(out[1, :, 17:]))
    assert torch.isneginf(lse[1, :, 17:]).all()


@backends
@patterns
def test_padding_anywhere_is_as_if_removed(qkv, differentiated, pattern, backend):
    mask = mask_with([(9, 25, 6), (0, 33, 7)])
    q, k, v = qkv(40)
    results = differentiated(
        lambda q, k, v: block_attention_with_lse(q, k, v, pattern, mask=mask, backend=backend), (q, k, v)
    )
    for b in range(B):
        real = [x[b : b + 1, :, mask[b]] for x in (q, k, v)]
        out, lse = block_attention_with_lse(*real, pattern, backend=backend)
        assert_same_maths(results[0][b : b + 1, :, mask[b]], out)
        assert_same_maths(results[1][b : b + 1, :, mask[b]], lse)
        assert torch.isneginf(results[1][b, :, ~mask[b]]).all()
        for x in (results[0], *results[2:]):
            assert_exact(x[b, :, ~mask[b]], torch.zeros_like(x[b, :, ~mask[b]]))


@backends
@some_patterns
@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_rubbish_in_padding_changes_no_bit(qkv, differentiated, pattern, backend, dtype):
    mask = mask_with([(9, 25, 6), (0, 33, 7)])
    results = []
    for rubbish in (0.0, 1e4, torch.nan, -torch.inf):
        inputs = [x.masked_fill(~mask[:, None, :, None], rubbish) for x in qkv(40, dtype=dtype)]
        results.append(
            differentiated(
                lambda q, k, v: block_attention_with_lse(q, k, v, pattern, mask=mask, backend=backend), inputs
            )
        )
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert not actual.isnan().any()
            assert_exact(actual, expected)


@backends
@pytest.mark.parametrize("pattern", [Causal(), Full(), Window(width=9)], ids=repr)
def test_packed_documents_are_documents_alone(qkv, pattern, backend):
    sizes = [7, 20, 13]
    doc_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes)).expand(B, -1)
    q, k, v = qkv(40)
    packed = block_attention(q, k, v, pattern, doc_ids=doc_ids, backend=backend)
    alone = [
        block_attention(*x, pattern, backend=backend) for x in zip(*(t.split(sizes, 2) for t in (q, k, v)), strict=True)
    ]
    assert_same_maths(packed, torch.cat(alone, 2))


@backends
@some_patterns
def test_grouped_heads_are_repeated_heads(qkv, differentiated, pattern, backend):
    inputs = qkv(40, kv_heads=2)

    def repeated(q, k, v):
        return (block_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), pattern, backend=backend),)

    actual = differentiated(lambda q, k, v: (block_attention(q, k, v, pattern, backend=backend),), inputs)
    for a, e in zip(actual, differentiated(repeated, inputs), strict=True):
        assert_same_maths(a, e)


@pytest.mark.usefixtures("cpu_path")
@backends
@patterns
@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (0, 5), (5, 0), (1, 1), (1, 30)])
def test_nothing_and_one_token(qkv, differentiated, pattern, backend, tokens, keys):
    start = max(0, keys - tokens)
    out, lse, *gradients = differentiated(
        lambda q, k, v: block_attention_with_lse(q, k, v, pattern, q_start=start, backend=backend),
        qkv(tokens, keys, values=3),
    )
    assert out.shape == (B, H, tokens, 3)
    assert lse.shape == (B, H, tokens)
    assert all(x.isfinite().all() for x in (out, *gradients))
    if keys == 0:
        assert_exact(out, torch.zeros_like(out))
        assert torch.isneginf(lse).all()


@backends
def test_a_query_without_keys_gives_zeros_and_no_gradient(qkv, differentiated, backend):
    out, lse, dq, dk, dv = differentiated(
        lambda q, k, v: block_attention_with_lse(q, k, v, Suffix(start=25), backend=backend), qkv(40)
    )
    assert_exact(out[:, :, :25], torch.zeros_like(out[:, :, :25]))
    assert torch.isneginf(lse[:, :, :25]).all()
    assert lse[:, :, 25:].isfinite().all()
    assert_exact(dq[:, :, :25], torch.zeros_like(dq[:, :, :25]))
    assert all(x.isfinite().all() for x in (dk, dv))


@some_patterns
def test_lse_alone_has_its_gradients(qkv, differentiated, pattern):
    inputs = qkv(40)
    actual, expected = (
        differentiated(lambda q, k, v, b=b: block_attention_with_lse(q, k, v, pattern, backend=b)[1:], inputs)
        for b in ("torch", "reference")
    )
    for a, e in zip(actual, expected, strict=True):
        assert_same_maths(a, e)


@backends
def test_lse_merges_attention_to_halves_of_the_keys(qkv, backend):
    q, k, v = qkv(20, 40)
    halves = [
        block_attention_with_lse(q, k[:, :, s], v[:, :, s], Full(), backend=backend)
        for s in (slice(0, 20), slice(20, 40))
    ]
    out, lse = block_attention_with_lse(q, k, v, Full(), backend=backend)
    assert_same_maths(torch.logaddexp(halves[0][1], halves[1][1]), lse)
    assert_same_maths(sum((part_lse - lse).exp()[..., None] * part for part, part_lse in halves), out)


@backends
@some_patterns
def test_dropout_zeroes_weights_scales_the_others_and_passes_gradients(qkv, differentiated, pattern, backend):
    q, k, _ = qkv(40, heads=2)
    v = torch.eye(40, dtype=torch.float64).expand(B, 2, 40, 40)  # outputs are then the weights

    def run(q, k, v):
        torch.manual_seed(0)
        return (block_attention(q, k, v, pattern, dropout_p=0.5, backend=backend),)

    weights = softmax_weights(q, k, pattern)
    (dropped,) = run(q, k, v)
    kept = dropped != 0
    assert_same_maths(dropped, 2 * weights * kept)
    assert kept.any()
    assert (weights[~kept] > 0).any()

    actual = differentiated(run, (q, k, v))
    expected = differentiated(lambda q, k, v: (2 * softmax_weights(q, k, pattern) * kept @ v,), (q, k, v))
    for a, e in zip(actual, expected, strict=True):
        assert_same_maths(a, e)


def plain(q, k, v, pattern):
    """The plain form, in the dtype of its inputs."""
    position = torch.arange(q.shape[2])
    allowed = pattern.allowed(position[:, None], position[None])[None]
    return (dense_weights(q, k, allowed, K**-0.5)[0] @ v,)


@backends
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@some_patterns
def test_low_precision_stays_in_budget(qkv, differentiated, pattern, dtype, backend):
    inputs = qkv(dtype=dtype)
    exact = differentiated(lambda q, k, v: plain(q, k, v, pattern), [x.double() for x in inputs])
    expected = differentiated(lambda q, k, v: plain(q, k, v, pattern), inputs)
    actual = differentiated(lambda q, k, v: (block_attention(q, k, v, pattern, backend=backend),), inputs)
    for name, a, p, e in zip(("out", "dq", "dk", "dv"), actual, expected, exact, strict=True):
        assert a.dtype == dtype
        assert_in_budget(a, p, e, dtype, name)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@some_patterns
def test_logits_of_ten_thousand_are_finite(qkv, differentiated, pattern, dtype):
    q, k, v = qkv(dtype=dtype)
    results = differentiated(
        lambda q, k, v: block_attention_with_lse(q, k, v, pattern, scale=1.0),
        (100 * q.sign(), 100 * k.sign(), v),
    )
    assert not torch.isnan(results[1]).any()
    assert all(x.isfinite().all() for x in (results[0], *results[2:]))


@pytest.mark.usefixtures("cpu_path")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=st.sampled_from([p for p in PATTERNS if p.causal]),
    tokens=st.integers(1, 300),
    fraction=st.floats(0, 1),
    dtype=st.sampled_from(LOW_PRECISION),
    sharpness=st.sampled_from([1.0, 10.0, 100.0]),
)
def test_no_bit_depends_on_the_future(qkv, pattern, tokens, fraction, dtype, sharpness):
    now = int(fraction * (tokens - 1))
    q, k, v = qkv(tokens, heads=1, batch=1, dtype=dtype)
    q, k = q * sharpness, k * sharpness
    others = [torch.cat([x[:, :, : now + 1], -3 * x[:, :, now + 1 :].flip(2)], 2) for x in (q, k, v)]
    before, after = (block_attention_with_lse(*x, pattern) for x in ((q, k, v), others))
    for a, b in zip(before, after, strict=True):
        assert_exact(b[:, :, : now + 1], a[:, :, : now + 1], f"tokens after {now}")


@patterns
def test_strides_change_no_bit(qkv, pattern):
    def run(q, k, v, expand_gradient):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = block_attention(*leaves, pattern)
        ones = torch.ones((), dtype=torch.float64)
        gradient = ones.expand(out.shape) if expand_gradient else torch.ones_like(out)
        return [out, *torch.autograd.grad(out, leaves, gradient)]

    contiguous = qkv(40)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in contiguous]
    columns = [x.mT.contiguous().mT for x in contiguous]
    expected = run(*contiguous, False)
    for inputs, expand_gradient in ((contiguous, True), (transposed, False), (columns, True)):
        for a, e in zip(run(*inputs, expand_gradient), expected, strict=True):
            assert_exact(a, e)


def test_expanded_inputs_give_the_same_bits(qkv):
    q, k, v = (x[:1, :1].expand(B, H, -1, -1) for x in qkv(40))
    same = block_attention(q.contiguous(), k.contiguous(), v.contiguous(), Window(width=9))
    assert_exact(block_attention(q, k, v, Window(width=9)), same)
    assert_exact(block_attention(q, k[:, :1], v[:, :1], Window(width=9)), same)


@pytest.fixture
def assert_no_square(random, largest_allocation):
    tokens = 2048
    q, k, v = (random(1, 1, tokens, 8, seed=n, dtype=torch.float32).requires_grad_() for n in range(3))
    square = tokens * tokens * 4

    def check(pattern, start):
        def run(backend=None):
            block_attention(q, k, v, pattern, q_start=start, k_start=start, backend=backend).sum().backward()

        assert largest_allocation(run) <= square // 8
        assert largest_allocation(lambda: run("reference")) >= square, "the measure sees a square where there is one"

    return check


starts = pytest.mark.parametrize("start", [0, torch.tensor([0])], ids=["static", "ragged"])


@starts
@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize(
    "pattern",
    [Causal(), Full(), Prefix(length=100), Suffix(start=900), Window(width=40), Segments(size=32)],
    ids=repr,
)
def test_no_tensor_has_a_square_of_entries(pattern, start, assert_no_square):
    assert_no_square(pattern, start)


OPERATION_CASES = {
    "causal": (Causal(), None),
    "folded": (Segments(size=8), None),
    "bounded": (Suffix(start=10), None),
    "ragged": (Window(width=5), torch.tensor([0, 3])),
}


@pytest.mark.parametrize("case", OPERATION_CASES)
def test_the_operations_keep_torchs_rules(qkv, case):
    pattern, start = OPERATION_CASES[case]
    q, k, v = (x.requires_grad_() for x in qkv(24))
    positions = None if start is None else torch.arange(24) + start[:, None]
    static = (pattern.key(), 0.4, 0, 0, None, positions, positions, None, None)
    torch.library.opcheck(block_attention_cpu, (q, k, v, *static))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = block_attention_cpu(q, k, v, *static)
    for grad_lse in (None, torch.ones_like(lse)):
        torch.library.opcheck(
            block_attention_cpu_backward, (torch.ones_like(out), grad_lse, q, k, v, out, lse, *static)
        )


def test_gathered_takes_documents(qkv):
    q, k, v = qkv(30)
    position, docs = torch.arange(30).expand(B, -1), (torch.arange(30) // 11).expand(B, -1)
    out, _ = gathered(q, k, v, Causal(), Slots(0, 0, None, position, position, docs, docs), 0.4, 0.0)
    assert_same_maths(out, block_attention(q, k, v, Causal(), doc_ids=docs, scale=0.4, backend="reference"))


X = torch.zeros(B, H, 5, K)
ERRORS = {
    "pattern": (lambda: block_attention(X, X, X, "causal"), TypeError, "pattern must be a Pattern, got str; valid: "),
    "ndim": (
        lambda: block_attention(X, X[0], X, Causal()),
        ValueError,
        r"k must have shape \[B, H, T, channels\], got \(4, 5, 6\)",
    ),
    "dtype": (
        lambda: block_attention(X.long(), X, X, Causal()),
        TypeError,
        r"q must be floating point, got torch\.int64",
    ),
    "channels": (
        lambda: block_attention(X, X[..., :3], X, Causal()),
        ValueError,
        r"q \[B, H, T, K\], k \[B, G, S, K\] and v \[B, G, S, V\] must agree in B, K, G and S, got \(2, 4, 5, 6\), ",
    ),
    "batch": (lambda: block_attention(X[:1], X, X, Causal()), ValueError, "must agree in B, K, G and S"),
    "keys": (lambda: block_attention(X, X, X[:, :, :3], Causal()), ValueError, "must agree in B, K, G and S"),
    "heads": (
        lambda: block_attention(X, X[:, :3], X[:, :3], Causal()),
        ValueError,
        "the query heads must be a multiple of the key heads, got 4 and 3",
    ),
    "no key heads": (
        lambda: block_attention(X, X[:, :0], X[:, :0], Causal()),
        ValueError,
        "the query heads must be a multiple of the key heads, got 4 and 0",
    ),
    "dropout": (
        lambda: block_attention(X, X, X, Causal(), dropout_p=1.0),
        ValueError,
        r"dropout_p must be at least 0 and below 1, got 1\.0",
    ),
    "negative dropout": (
        lambda: block_attention(X, X, X, Causal(), dropout_p=-0.1),
        ValueError,
        "dropout_p must be at",
    ),
    "mask with lengths": (
        lambda: block_attention(
            X, X, X, Causal(), mask=torch.ones(B, 5, dtype=torch.bool), lengths=torch.tensor([5, 5])
        ),
        ValueError,
        "mask needs as many queries as keys, and neither lengths nor doc_ids, got T=5, S=5, lengths=True, ",
    ),
    "mask with documents": (
        lambda: block_attention(
            X, X, X, Causal(), mask=torch.ones(B, 5, dtype=torch.bool), doc_ids=torch.zeros(B, 5).long()
        ),
        ValueError,
        "lengths=False, doc_ids=True",
    ),
    "mask of a continuation": (
        lambda: block_attention(X[:, :, :2], X, X, Causal(), mask=torch.ones(B, 2, dtype=torch.bool)),
        ValueError,
        "mask needs as many queries as keys, .* got T=2, S=5",
    ),
    "mask's dtype": (
        lambda: block_attention(X, X, X, Causal(), mask=torch.ones(B, 5)),
        TypeError,
        "mask must be a bool tensor",
    ),
    "lengths' shape": (
        lambda: block_attention(X, X, X, Causal(), lengths=torch.tensor([5])),
        ValueError,
        r"lengths must hold integers in the shape \(2,\), got torch\.int64 \(1,\)",
    ),
    "documents' dtype": (
        lambda: block_attention(X, X, X, Causal(), doc_ids=torch.zeros(B, 5)),
        ValueError,
        r"doc_ids must hold integers in the shape \(2, 5\), got torch\.float32 \(2, 5\)",
    ),
    "more queries than keys": (
        lambda: block_attention(X, X[:, :, :3], X[:, :, :3], Causal(), lengths=torch.tensor([3, 3])),
        ValueError,
        "with lengths or doc_ids the queries are the last of the keys, got T=5 > S=3",
    ),
    "queries that are not the last": (
        lambda: block_attention(X[:, :, :2], X, X, Causal(), lengths=torch.tensor([3, 3])),
        ValueError,
        r"the queries must be the last of the keys: q_start - k_start = S - T, got q_start=0, k_start=0, S=5, T=2",
    ),
    "start's shape": (
        lambda: block_attention(X, X, X, Causal(), q_start=torch.tensor([1, 2, 3])),
        ValueError,
        r"a start must be an int or an integer tensor \[2\], got torch\.int64 \(3,\)",
    ),
    "start's dtype": (
        lambda: block_attention(X, X, X, Causal(), k_start=torch.tensor([1.0, 2.0])),
        ValueError,
        r"a start must be an int or an integer tensor \[2\], got torch\.float32 \(2,\)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_does_not_fit_is_refused(case):
    call, error, match = ERRORS[case]
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("entries", [40 * 80 * 2, 40 * 80, 1])
def test_tiles_of_some_heads_at_a_time(random, differentiated, monkeypatch, entries):
    """Three heads in groups of two and one, one at a time, or too many scores for the caches."""
    q, k, v = (random(2, 3, 130, 4, seed=seed) for seed in range(3))

    def run(backend):
        return differentiated(lambda *x: block_attention_with_lse(*x, Segments(size=40), backend=backend), [q, k, v])

    expected = run("reference")
    monkeypatch.setattr(torch_attend, "ENTRIES", entries)
    for actual, result in zip(run("torch"), expected, strict=True):
        assert_same_maths(actual, result)
