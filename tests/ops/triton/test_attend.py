"""The Triton kernels of engine B against its definition: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from subquad.ops import backends, block_attention, block_attention_with_lse
from subquad.ops._triton import attend as kernels
from subquad.ops._triton import common
from subquad.ops._triton.attend import block_attention_triton, block_attention_triton_backward
from subquad.ops.attend import softmax_weights
from subquad.ops.patterns import (
    Band,
    Blocks,
    Causal,
    Dilated,
    Full,
    Pattern,
    Prefix,
    Segments,
    Shifted,
    Sinks,
    Suffix,
    Window,
)
from subquad.testing.tools import LOW_PRECISION, assert_exact, assert_in_budget, mask_with

PATTERNS = [
    Causal(),
    Full(),
    Window(width=2),
    Window(width=20),
    Window(width=100),
    Segments(size=8),
    Segments(size=7, back=2),
    Segments(size=100),
    Shifted(size=8, shift=3, back=1),
    Blocks(size=9),
    Blocks(size=8, back=1, ahead_blocks=1),
    Band(before=3, after=9),
    Band(before=30, after=0),
    Prefix(length=13),
    Prefix(length=100),
    Suffix(start=13),
    Suffix(start=90),
    Sinks(count=3, back=4),
    Sinks(count=1, back=1, size=8),
]
every_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
SOME = [Causal(), Window(width=20), Segments(size=7, back=2), Blocks(size=9), Suffix(start=13)]
dtypes = pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
NAMES = ("out", "lse", "dq", "dk", "dv")


EMPTY = 7.0
"""Stands for the logsumexp of a query that sees no key, -inf, so that errors and gradients are numbers."""


def attended(*inputs, backend="triton", **options):
    out, lse = block_attention_with_lse(*inputs, backend=backend, **options)
    return out, lse.masked_fill(torch.isneginf(lse), EMPTY)


@pytest.fixture
def qkv(random):
    def make(tokens, keys=None, heads=2, kv_heads=1, K=16, V=16, batch=1, dtype=torch.float32):
        keys = tokens if keys is None else keys
        shapes = (heads, tokens, K), (kv_heads, keys, K), (kv_heads, keys, V)
        # Halved: where one weight is nearly 1, its error is that of the interpreter's products, which depend on tiles.
        return [random(batch, *shape, seed=n, dtype=dtype) / 2 for n, shape in enumerate(shapes)]

    return make


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles of few tokens: every kind of edge."""
    tiles = kernels.Tiles(16, 16, 4, 2)
    sizes = dict.fromkeys(kernels.SIZES, kernels.Sizes(tiles, tiles, tiles, tiles))
    monkeypatch.setattr(kernels, "SIZES", sizes)


@pytest.fixture
def launches(monkeypatch):
    """The kernels that were launched, in order."""
    names, launch = [], common.launch

    def counted(kernel, *arguments, **constants):
        names.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(common, "launch", counted)
    return names


@pytest.fixture
def assert_is_the_definition(differentiated):
    """Outputs, lse and every gradient, those through lse too, in the error budget of the dtype."""

    def check(inputs, pattern, **options):
        def run(backend, *inputs):
            return differentiated(lambda *x: attended(*x, pattern, backend=backend, **options), inputs)

        actual, plain = run("triton", *inputs), run("reference", *inputs)
        exact = run("reference", *(x.double() for x in inputs))
        for name, a, p, e in zip(NAMES, actual, plain, exact, strict=True):
            assert a.dtype == p.dtype
            assert_in_budget(a, p, e, inputs[0].dtype, f"{name}, {pattern}, {options}")

    return check


@pytest.mark.usefixtures("small_tiles")
@every_pattern
def test_every_pattern_is_its_definition(pattern, qkv, assert_is_the_definition):
    assert_is_the_definition(qkv(41), pattern)


@pytest.mark.usefixtures("small_tiles")
def test_a_window_of_one_gives_each_token_its_own_value(qkv):
    q, k, v = qkv(41)
    assert_exact(block_attention(q, k, v, Window(width=1), backend="triton"), v.expand(-1, 2, -1, -1))


@pytest.mark.thinned(3, tokens=[1, 2, 15, 16, 17, 63, 65, 64, 127, 129, 128, 200])
def test_any_length(tokens, qkv, assert_is_the_definition):
    pattern = PATTERNS[tokens % len(PATTERNS)]
    assert_is_the_definition(qkv(tokens, heads=1), pattern)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 16), (16, 3), (43, 64), (64, 43), (128, 16), (1, 256)])
def test_any_head_size(K, V, qkv, assert_is_the_definition):
    assert_is_the_definition(qkv(20, heads=1, K=K, V=V), Window(width=7))


@pytest.mark.thinned(3, pattern=SOME, dtype=LOW_PRECISION)
def test_every_dtype_stays_in_budget(pattern, dtype, qkv, assert_is_the_definition):
    assert_is_the_definition(qkv(70, dtype=dtype), pattern)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (3, 1)])
def test_heads_share_keys_in_groups(heads, kv_heads, qkv, assert_is_the_definition):
    assert_is_the_definition(qkv(20, heads=heads, kv_heads=kv_heads, batch=2), Segments(size=6))


def test_inputs_of_several_dtypes_are_widened_to_one(qkv):
    q, k, v = qkv(20)
    mixed = block_attention(q, k, v.bfloat16(), Causal(), backend="triton")
    assert_exact(mixed, block_attention(q, k, v.bfloat16().float(), Causal(), backend="triton").bfloat16())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.thinned(
    3,
    pattern=(Blocks(size=8, back=1, ahead_blocks=1), Window(width=20), Shifted(size=8, shift=3, back=1)),
    where=(
        (20, 50, 30, 0),
        (20, 50, 12, -18),
        (20, 50, 100, 70),
        (20, 20, 0, 40),
        (33, 17, 5, 9),
        (20, 20, -7, -3),
        (1, 40, 39, 0),
    ),
)
def test_queries_and_keys_may_stand_anywhere(pattern, where, qkv, assert_is_the_definition):
    tokens, keys, q_start, k_start = where
    assert_is_the_definition(qkv(tokens, keys), pattern, q_start=q_start, k_start=k_start)


ROWS = {
    "starts": lambda: {"q_start": torch.tensor([30, 12]), "k_start": torch.tensor([10, -8])},
    "lengths": lambda: {"q_start": 20, "lengths": torch.tensor([50, 31])},
    "lengths without queries": lambda: {"q_start": 20, "lengths": torch.tensor([20, 0])},
    "both": lambda: {
        "q_start": torch.tensor([30, 12]),
        "k_start": torch.tensor([10, -8]),
        "lengths": torch.tensor([27, 45]),
    },
    "documents": lambda: {"q_start": 20, "doc_ids": (torch.arange(100) // 17).view(2, 50)},
    "documents and lengths": lambda: {
        "q_start": 20,
        "doc_ids": (torch.arange(100) // 17).view(2, 50),
        "lengths": torch.tensor([50, 31]),
    },
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.thinned(3, pattern=(Causal(), Full(), Segments(size=7, back=2)), rows=ROWS)
def test_rows_may_differ(pattern, rows, qkv, device, assert_is_the_definition):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in ROWS[rows]().items()}
    assert_is_the_definition(qkv(30, 50, batch=2), pattern, **options)


def test_a_cross_attention_has_keys_of_its_own_lengths(qkv, device, assert_is_the_definition):
    lengths = torch.tensor([0, 13], device=device)
    assert_is_the_definition(qkv(20, 30, batch=2), Full(), key_lengths=lengths)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("pattern", [Causal(), Blocks(size=9)], ids=repr)
def test_padding_may_stand_anywhere(pattern, qkv, device, differentiated, assert_is_the_definition):
    mask = mask_with([(5, 13, 6), (0, 21, 3)]).to(device)
    inputs = qkv(24, batch=2)
    assert_is_the_definition(inputs, pattern, mask=mask)
    results = [
        differentiated(
            lambda *x: attended(*x, pattern, mask=mask),
            [x.masked_fill(~mask[:, None, :, None], rubbish) for x in inputs],
        )
        for rubbish in (0.0, torch.nan)
    ]
    for actual, expected in zip(*results, strict=True):
        assert_exact(actual, expected)
        assert not actual.isnan().any()


def test_strides_change_no_bit(qkv, random):
    def run(q, k, v, gradient):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = block_attention_with_lse(*leaves, Window(width=9), backend="triton")
        return [out, lse, *torch.autograd.grad(out, leaves, gradient)]

    inputs = qkv(20, kv_heads=2, batch=2)
    gradient = random(2, 2, 20, 16, seed=9, dtype=torch.float32)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*inputs, gradient)]
    columns = [x.mT.contiguous().mT for x in (*inputs, gradient)]
    odd = [torch.cat([x, x[..., :1]], -1)[..., :-1] for x in (*inputs, gradient)]
    for strided in (transposed, columns, odd):
        for a, e in zip(run(*strided), run(*inputs, gradient), strict=True):
            assert_exact(a, e)
    ones = torch.ones((), device=gradient.device)
    expanded = [*(x[:1, :1].expand(2, 2, -1, -1) for x in inputs), ones.expand(2, 2, 20, 16)]
    for a, e in zip(run(*expanded), run(*(x.contiguous() for x in expanded)), strict=True):
        assert_exact(a, e)


@pytest.mark.thinned(3, pattern=SOME, dtype=LOW_PRECISION)
def test_logits_of_ten_thousand(pattern, dtype, qkv, differentiated, assert_is_the_definition):
    q, k, v = qkv(40, dtype=dtype)
    inputs = 25 * q.sign(), 25 * k.sign(), v
    results = differentiated(lambda *x: attended(*x, pattern, scale=1.0), inputs)
    assert all(x.isfinite().all() for x in results)
    assert_is_the_definition(inputs, pattern, scale=1.0)


def test_gradients_of_scores_may_exceed_float16(qkv, random, assert_is_the_definition):
    """The gradients of queries and keys are finite, those of the scores between them are not."""
    q, k, v = qkv(10, heads=1, dtype=torch.float16)
    q, k, v = q / 1000, k / 1000, 60000 * v.sign()
    q, k, v = (x[:, :, :5] for x in (q, k, v))
    dw = random(1, 1, 5, 16, seed=100).double() @ v.mT.double()
    w = softmax_weights(q.double(), k.double(), Full())
    assert (w * (dw - (w * dw).sum(-1, keepdim=True))).abs().max() > torch.finfo(torch.float16).max
    assert_is_the_definition((q, k, v), Full())


@pytest.mark.thinned(
    3,
    pattern=(Causal(), Window(width=20), Segments(size=12), Shifted(size=30, shift=8), Sinks(count=2, back=3)),
    sharpness=(1.0, 100.0),
    dtype=LOW_PRECISION,
)
def test_no_bit_depends_on_the_future(pattern, sharpness, dtype, qkv):
    now = 29
    q, k, v = qkv(140, heads=1, dtype=dtype)
    q, k = q * sharpness, k * sharpness
    others = [torch.cat([x[:, :, : now + 1], -100 * x[:, :, now + 1 :].flip(2)], 2) for x in (q, k, v)]
    results = [block_attention_with_lse(*x, pattern, backend="triton") for x in ((q, k, v), others)]
    for before, after in zip(*results, strict=True):
        assert before.shape[2] == 140
        assert_exact(after[:, :, : now + 1], before[:, :, : now + 1])


def test_a_query_without_keys_gives_zeros_and_no_gradient(qkv, differentiated):
    q, k, v = qkv(40)
    _, lse = block_attention_with_lse(q, k, v, Suffix(start=25), backend="triton")
    assert torch.isneginf(lse[:, :, :25]).all()
    assert lse[:, :, 25:].isfinite().all()
    out, _, dq, dk, dv = differentiated(lambda *x: attended(*x, Suffix(start=25)), (q, k, v))
    assert_exact(out[:, :, :25], torch.zeros_like(out[:, :, :25]))
    assert_exact(dq[:, :, :25], torch.zeros_like(dq[:, :, :25]))
    assert all(x.isfinite().all() for x in (dk, dv))


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_output_alone_has_its_gradients(used, qkv, differentiated):
    def run(backend, inputs):
        index = ("out", "lse").index(used)
        return differentiated(lambda *x: [attended(*x, Window(width=9), backend=backend)[index]], inputs)

    inputs = qkv(30)
    results = run("triton", inputs), run("reference", inputs), run("reference", [x.double() for x in inputs])
    for a, p, e in zip(*results, strict=True):
        assert_in_budget(a, p, e, torch.float32)


@pytest.mark.thinned(
    3,
    pattern=[Causal(), Window(width=20), Segments(size=12), Shifted(size=30, shift=8)],
    heads=[(2, 2), (6, 2), (20, 1)],
)
def test_decoding_is_the_last_row_of_the_whole(pattern, heads, qkv, launches):
    heads, kv_heads = heads
    q, k, v = qkv(50, heads=heads, kv_heads=kv_heads, batch=2)
    kept = 50 if pattern.reach is None else min(50, pattern.reach + 1)
    cache = k[:, :, -kept:], v[:, :, -kept:]
    options = {"q_start": 49, "k_start": 50 - kept, "backend": "triton"}
    results = block_attention_with_lse(q[:, :, -1:], *cache, pattern, **options)
    assert launches == ["forward_kernel"]
    plain = block_attention_with_lse(q, k, v, pattern, backend="reference")
    exact = block_attention_with_lse(*(x.double() for x in (q, k, v)), pattern, backend="reference")
    for actual, p, e in zip(results, plain, exact, strict=True):
        assert_in_budget(actual, p[:, :, -1:], e[:, :, -1:], torch.float32)


@dtypes
def test_decoding_splits_a_long_walk(dtype, qkv, monkeypatch, device, assert_is_the_definition):
    monkeypatch.setattr(kernels, "SPLIT_KEYS", 70)
    q, k, v = qkv(1, 200, batch=2, dtype=dtype)
    starts = torch.tensor([199, 100], device=device)
    assert_is_the_definition((q, k, v), Causal(), q_start=starts, k_start=starts - 199)
    assert_is_the_definition((q, k, v), Full(), key_lengths=torch.tensor([0, 90], device=device))


@pytest.mark.parametrize(("tokens", "keys", "batch"), [(0, 5, 1), (5, 0, 1), (0, 0, 1), (5, 5, 0)])
def test_nothing(tokens, keys, batch, qkv, differentiated):
    inputs = qkv(tokens, keys, V=3, batch=batch)
    out, lse, *gradients = differentiated(lambda *x: attended(*x, Full()), inputs)
    assert_exact(out, torch.zeros_like(out))
    assert out.shape == (batch, 2, tokens, 3)
    assert_exact(lse, torch.full_like(lse, EMPTY))
    for x, gradient in zip(inputs, gradients, strict=True):
        assert_exact(gradient, torch.zeros_like(x))


@pytest.mark.thinned(4, case=["documents", "static", "rows", "decoding"])
def test_the_operations_keep_torchs_rules(case, qkv, device):
    q, k, v = (x.requires_grad_() for x in qkv(1 if case == "decoding" else 12, 12, V=8))
    pos = torch.arange(12, device=device)[None]
    where = {
        "static": (None,) * 5,
        "rows": (None, pos, pos, None, None),
        "documents": (None, pos, pos, pos // 5, pos // 5),
    }
    static = (Window(width=5).key(), 0.4, 0, 0, *where.get(case, where["static"]))
    torch.library.opcheck(block_attention_triton, (q, k, v, *static))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse, m, inverse = block_attention_triton(q, k, v, *static)
    for grad_lse in (None, torch.ones_like(lse)):
        gradients = torch.ones_like(out), grad_lse
        torch.library.opcheck(block_attention_triton_backward, (*gradients, out, m, inverse, q, k, v, *static))


def test_a_compiled_graph_is_eager(qkv, differentiated):
    def run(*x):
        return attended(*x, Segments(size=6))

    inputs = qkv(20, heads=4, kv_heads=2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, e in zip(differentiated(compiled, inputs), differentiated(run, inputs), strict=True):
        assert_exact(a, e)


def test_which_patterns_have_kernels():
    assert {kind.__name__ for kind in kernels.RANGES} <= set(Pattern.registry)
    assert all(kernels.supports(pattern) for pattern in PATTERNS)
    assert not kernels.supports(Dilated(width=4, dilation=3))


X = torch.zeros(2, 2, 5, 6)
ERRORS = {
    "pattern": (
        lambda: (X, X, X, Dilated(width=4, dilation=3)),
        {},
        r"has no kernel for Dilated\(width=4, dilation=3\); it has: Band, Blocks, Causal, Full, Prefix, Segments, ",
    ),
    "dtype": (lambda: (X.double(), X, X, Causal()), {}, "computes in float32, bfloat16, float16, got torch.float64"),
    "channels": (
        lambda: (X, X, X[..., :1].expand(2, 2, 5, 300), Causal()),
        {},
        "takes heads of at most 256 channels, got 300",
    ),
    "positions": (
        lambda: (X, X, X, Causal()),
        {"q_start": 2**28, "k_start": 2**28},
        "takes positions up to 268435456, got 268435461",
    ),
    "dropout": (
        lambda: (X, X, X, Causal()),
        {"dropout_p": 0.5},
        r"backend 'triton' of block_attention has no dropout, got dropout_p=0\.5; valid: reference, torch, sequential",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_the_kernels_do_not_take_is_refused(case, device):
    arguments, options, match = ERRORS[case]
    inputs = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments()]
    with pytest.raises(ValueError, match=match):
        block_attention(*inputs, backend="triton", **options)


def test_a_machine_without_triton_is_told_so(monkeypatch, qkv):
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=r"needs the package triton: pip install 'subquad\[triton\]'"):
        block_attention(*qkv(5), Causal(), backend="triton")
