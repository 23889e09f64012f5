"""The Triton kernels of engine B against its definition: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from subquad.ops import block_attention, block_attention_with_lse
from subquad.ops._triton import attend as kernels
from subquad.ops._triton import common
from subquad.ops._triton.attend import block_attention_triton, block_attention_triton_backward
from subquad.ops.attend import softmax_weights
from subquad.ops.patterns import Blocks, Causal, Dilated, Full, Segments, Shifted, Sinks, Suffix, Window
from subquad.testing.tools import LOW_PRECISION, assert_exact, assert_in_budget, mask_with
from tests.ops import cases
from tests.ops.cases import ALONE, DEVICE, LAYOUTS, assert_all_exact, differentiated, random, thinned

PATTERNS = [pattern for pattern in cases.PATTERNS if kernels.supports(pattern)]
SOME = [Causal(), Window(width=20), Segments(size=7, back=2), Blocks(size=9), Suffix(start=13)]
DECODED = [Causal(), Window(width=20), Segments(size=12), Shifted(size=30, shift=8)]
NAMES = ("out", "lse", "dq", "dk", "dv")
EMPTY = 7.0
"""Stands for the logsumexp of a query that sees no key, -inf, so that errors and gradients are numbers."""


def attended(*inputs, backend="triton", **options):
    out, lse = block_attention_with_lse(*inputs, backend=backend, **options)
    return out, lse.masked_fill(torch.isneginf(lse), EMPTY)


def qkv(tokens, keys=None, heads=2, kv_heads=1, K=16, V=16, batch=1, dtype=torch.float32):
    keys = tokens if keys is None else keys
    shapes = (heads, tokens, K), (kv_heads, keys, K), (kv_heads, keys, V)
    # Halved: where one weight is nearly 1, its error is that of the interpreter's products, which depend on tiles.
    return [random(batch, *shape, seed=n, dtype=dtype) / 2 for n, shape in enumerate(shapes)]


@pytest.fixture
def _small_tiles(monkeypatch):
    """Many tiles of few tokens: every kind of edge."""
    tiles = kernels.Tiles(16, 16, 4, 2)
    sizes = kernels.Sizes(99, tiles, tiles, tiles, tiles)
    monkeypatch.setattr(kernels, "SIZES", dict.fromkeys(kernels.SIZES, (sizes,)))


small_tiles = pytest.mark.usefixtures("_small_tiles")


def assert_is_the_definition(inputs, pattern, results=slice(None), **options):
    """Return outputs, lse and every gradient, those through lse too, which are in the error budget of the dtype."""

    def run(backend, *inputs):
        return differentiated(lambda *x: attended(*x, pattern, backend=backend, **options)[results], inputs)

    actual, plain = run("triton", *inputs), run("reference", *inputs)
    exact = run("reference", *(x.double() for x in inputs))
    names = (*NAMES[:2][results], *NAMES[2:])
    for name, a, p, e in zip(names, actual, plain, exact, strict=True):
        assert a.dtype == p.dtype
        assert_in_budget(a, p, e, inputs[0].dtype, f"{name}, {pattern}, {options}")
    return actual


def test_which_patterns_have_kernels():
    kinds = {"Band", "Blocks", "Causal", "Full", "Prefix", "Segments", "Shifted", "SinkTokens", "Sinks", "Suffix"}
    kinds |= {"Window"}
    assert {type(pattern).__name__ for pattern in PATTERNS} == kinds == {kind.__name__ for kind in kernels.RANGES}


@small_tiles
@thinned(2, pattern=PATTERNS)
def test_every_pattern_is_its_definition(pattern):
    assert_is_the_definition(qkv(35, heads=1), pattern)


@small_tiles
def test_a_window_of_one_gives_each_token_its_own_value():
    q, k, v = qkv(41)
    assert_exact(block_attention(q, k, v, Window(width=1), backend="triton"), v.expand(-1, 2, -1, -1))


@thinned(3, tokens=[1, 2, 15, 16, 17, 63, 65, 64, 127, 129, 128, 200])
def test_any_length(tokens):
    # The queries of a window of one token have no gradient but rounding.
    patterns = [pattern for pattern in PATTERNS if pattern != Window(width=1)]
    assert_is_the_definition(qkv(tokens, heads=1), patterns[tokens % len(patterns)])


@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 16), (16, 3), (43, 64), (64, 43), (128, 16), (1, 256), (300, 16)])
def test_any_head_size(K, V):
    assert_is_the_definition(qkv(20, heads=1, K=K, V=V), Window(width=7))


@small_tiles
@thinned(3, pattern=SOME, dtype=LOW_PRECISION)
def test_every_dtype_stays_in_budget(pattern, dtype):
    assert_is_the_definition(qkv(50, heads=1, dtype=dtype), pattern)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_heads_share_keys_in_groups(heads, kv_heads):
    assert_is_the_definition(qkv(12, heads=heads, kv_heads=kv_heads, batch=2), Segments(size=6))


def test_inputs_of_several_dtypes_are_widened_to_one():
    q, k, v = qkv(20)
    mixed = block_attention(q, k, v.bfloat16(), Causal(), backend="triton")
    assert_exact(mixed, block_attention(q, k, v.bfloat16().float(), Causal(), backend="triton").bfloat16())


WHERE = [(20, 50, 12, -18), (20, 50, 100, 70), (20, 20, 0, 40), (33, 17, 5, 9), (20, 20, -7, -3), (1, 40, 39, 0)]


ANYWHERE = (Blocks(size=8, back=1, ahead_blocks=1), Window(width=20), Shifted(size=8, shift=3, back=1))


@small_tiles
@thinned(3, pattern=ANYWHERE, where=WHERE)
def test_queries_and_keys_may_stand_anywhere(pattern, where):
    tokens, keys, q_start, k_start = where
    assert_is_the_definition(qkv(tokens, keys, heads=1), pattern, q_start=q_start, k_start=k_start)


STARTS = {"q_start": torch.tensor([30, 12]), "k_start": torch.tensor([10, -8])}
DOCUMENTS = {"q_start": 20, "doc_ids": (torch.arange(100) // 17).view(2, 50)}
ROWS = {
    "starts": STARTS,
    "lengths": {"q_start": 20, "lengths": torch.tensor([50, 31])},
    "lengths without queries": {"q_start": 20, "lengths": torch.tensor([20, 0])},
    "both": {**STARTS, "lengths": torch.tensor([27, 45])},
    "documents": DOCUMENTS,
    "documents and lengths": {**DOCUMENTS, "lengths": torch.tensor([50, 31])},
}


@small_tiles
@thinned(3, pattern=(Causal(), Full(), Segments(size=7, back=2)), rows=ROWS)
def test_rows_may_differ(pattern, rows):
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in ROWS[rows].items()}
    assert_is_the_definition(qkv(30, 50, heads=1, batch=2), pattern, **options)


def test_a_cross_attention_has_keys_of_its_own_lengths():
    assert_is_the_definition(qkv(20, 30, batch=2), Full(), key_lengths=torch.tensor([0, 13], device=DEVICE))


@small_tiles
@pytest.mark.parametrize("pattern", [Causal(), Blocks(size=9)], ids=repr)
def test_padding_may_stand_anywhere(pattern):
    mask = mask_with([(5, 13, 6), (0, 21, 3)]).to(DEVICE)
    inputs = qkv(24, heads=1, batch=2)
    results = assert_is_the_definition(inputs, pattern, mask=mask)
    inputs = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    assert_all_exact(differentiated(lambda *x: attended(*x, pattern, mask=mask), inputs), results)
    assert not any(x.isnan().any() for x in results)


def test_strides_change_no_bit():
    def run(q, k, v, gradient):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = block_attention_with_lse(*leaves, Window(width=4), backend="triton")
        return [out, lse, *torch.autograd.grad(out, leaves, gradient)]

    inputs = [*qkv(6, kv_heads=2, batch=2), random(2, 2, 6, 16, seed=9, dtype=torch.float32)]
    expected = run(*inputs)
    for name in ("heads inside tokens", "a slice", "channels apart"):
        assert_all_exact(run(*map(LAYOUTS[name], inputs)), expected, name)
    one = torch.ones((), device=DEVICE).expand(2, 2, 6, 16)
    expanded = [*(x[:1, :1].expand(2, 2, -1, -1) for x in inputs[:3]), one]
    assert_all_exact(run(*expanded), run(*(x.contiguous() for x in expanded)), "expanded")


@thinned(3, pattern=SOME, dtype=LOW_PRECISION)
def test_logits_of_ten_thousand(pattern, dtype):
    q, k, v = qkv(40, heads=1, dtype=dtype)
    results = assert_is_the_definition((25 * q.sign(), 25 * k.sign(), v), pattern, scale=1.0)
    assert all(x.isfinite().all() for x in results)


def test_gradients_of_scores_may_exceed_float16():
    """The gradients of queries and keys are finite, those of the scores between them are not."""
    q, k, v = qkv(10, heads=1, dtype=torch.float16)
    q, k, v = (x[:, :, :5] for x in (q / 1000, k / 1000, 60000 * v.sign()))
    dw = random(1, 1, 5, 16, seed=100).double() @ v.mT.double()
    w = softmax_weights(q.double(), k.double(), Full())
    assert (w * (dw - (w * dw).sum(-1, keepdim=True))).abs().max() > torch.finfo(torch.float16).max
    assert_is_the_definition((q, k, v), Full())


@thinned(5, pattern=(*DECODED, Sinks(count=2, back=3)), sharpness=(1.0, 100.0), dtype=LOW_PRECISION)
def test_no_bit_depends_on_the_future(pattern, sharpness, dtype):
    now = 29
    q, k, v = qkv(140, heads=1, dtype=dtype)
    q, k = q * sharpness, k * sharpness
    others = [torch.cat([x[:, :, : now + 1], -100 * x[:, :, now + 1 :].flip(2)], 2) for x in (q, k, v)]
    results = [block_attention_with_lse(*x, pattern, backend="triton") for x in ((q, k, v), others)]
    for before, after in zip(*results, strict=True):
        assert before.shape[2] == 140
        assert_exact(after[:, :, : now + 1], before[:, :, : now + 1])


def test_a_query_without_keys_gives_zeros_and_no_gradient():
    q, k, v = qkv(40, heads=1)
    _, lse = block_attention_with_lse(q, k, v, Suffix(start=25), backend="triton")
    assert torch.isneginf(lse[:, :, :25]).all()
    assert lse[:, :, 25:].isfinite().all()
    out, _, dq, dk, dv = differentiated(lambda *x: attended(*x, Suffix(start=25)), (q, k, v))
    for x in (out, dq):
        assert_exact(x[:, :, :25], torch.zeros_like(x[:, :, :25]))
    assert all(x.isfinite().all() for x in (dk, dv))


@pytest.mark.parametrize("used", [0, 1], ids=["out", "lse"])
def test_one_output_alone_has_its_gradients(used):
    assert_is_the_definition(qkv(30), Window(width=9), slice(used, used + 1))


@thinned(3, pattern=DECODED, heads=[(2, 2), (6, 2), (20, 1)])
def test_decoding_is_the_last_row_of_the_whole(pattern, heads, monkeypatch):
    launches, launch = [], common.launch
    monkeypatch.setattr(common, "launch", lambda f, *x, **y: launches.append(f.__name__) or launch(f, *x, **y))
    q, k, v = qkv(50, heads=heads[0], kv_heads=heads[1], batch=2)
    kept = 50 if pattern.reach is None else min(50, pattern.reach + 1)
    cache = k[:, :, -kept:], v[:, :, -kept:]
    options = {"q_start": 49, "k_start": 50 - kept, "backend": "triton"}
    results = block_attention_with_lse(q[:, :, -1:], *cache, pattern, **options)
    assert launches == ["forward_kernel"]
    plain = block_attention_with_lse(q, k, v, pattern, backend="reference")
    exact = block_attention_with_lse(*(x.double() for x in (q, k, v)), pattern, backend="reference")
    for actual, p, e in zip(results, plain, exact, strict=True):
        assert_in_budget(actual, p[:, :, -1:], e[:, :, -1:], torch.float32)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_decoding_splits_a_long_walk(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "SPLIT_KEYS", 70)
    q, k, v = qkv(1, 150, heads=1, batch=2, dtype=dtype)
    starts = torch.tensor([149, 100], device=DEVICE)
    assert_is_the_definition((q, k, v), Causal(), q_start=starts, k_start=starts - 149)
    assert_is_the_definition((q, k, v), Full(), key_lengths=torch.tensor([0, 90], device=DEVICE))


def test_a_captured_step_reads_the_position_of_its_replay(monkeypatch):
    """A launch recorded at one position and repeated after the starts changed in place, as a CUDA graph repeats it."""
    launches, launch = [], common.launch
    monkeypatch.setattr(common, "launch", lambda *x, **y: launches.append((x, y)) or launch(*x, **y))
    q, k, v = qkv(1, 24, batch=2)
    starts = torch.tensor([[3, 30], [-20, 7]], device=DEVICE)

    def step():
        return block_attention(q, k, v, Window(width=20), q_start=starts[0], k_start=starts[1], backend="triton")

    step()
    ((arguments, constants),) = launches
    starts += torch.tensor([[9], [9]], device=DEVICE)
    launch(*arguments, **constants)
    replayed = arguments[5][0]
    assert_exact(replayed, step())


def test_float32_has_the_precision_that_the_user_chose(monkeypatch):
    found, launch = [], common.launch
    monkeypatch.setattr(common, "launch", lambda *x, **y: found.append(y["PRECISION"]) or launch(*x, **y))
    chosen = torch.get_float32_matmul_precision()
    try:
        for precision, expected in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(precision)
            found.clear()
            assert_is_the_definition(qkv(20), Causal())
            assert found == [expected] * 3
    finally:
        torch.set_float32_matmul_precision(chosen)


def test_tiles_fit_the_shared_memory_of_the_card():
    for (itemsize, channels), choices in kernels.SIZES.items():
        assert [sizes.shared for sizes in choices] == sorted((sizes.shared for sizes in choices), reverse=True)
        for shared in (163, 227):
            assert kernels.sizes_for(itemsize, channels, shared * 1024).shared <= shared
    with pytest.raises(
        ValueError, match="needs 99 KiB of shared memory for 64 channels of 2 bytes, and this GPU has 64"
    ):
        kernels.sizes_for(2, 64, 64 * 1024)


@pytest.mark.parametrize(("tokens", "keys", "batch"), [(0, 5, 1), (5, 0, 1), (0, 0, 1), (5, 5, 0)])
def test_nothing(tokens, keys, batch):
    inputs = qkv(tokens, keys, V=3, batch=batch)
    out, lse, *gradients = differentiated(lambda *x: attended(*x, Full()), inputs)
    assert_exact(out, torch.zeros_like(out))
    assert out.shape == (batch, 2, tokens, 3)
    assert_exact(lse, torch.full_like(lse, EMPTY))
    for x, gradient in zip(inputs, gradients, strict=True):
        assert_exact(gradient, torch.zeros_like(x))


@thinned(4, case=["documents", "static", "rows", "decoding"])
def test_the_operations_keep_torchs_rules(case):
    q, k, v = qkv(1 if case == "decoding" else 6, 6, heads=1, V=8)
    pos = torch.arange(6, device=DEVICE)[None]
    start = torch.zeros(1, dtype=torch.long, device=DEVICE)
    where = {"rows": (start + 5, start, start, None, None), "documents": (None, start, None, pos // 3, pos // 3)}
    static = (Window(width=5).key(), 0.4, 0, 0, *where.get(case, (None,) * 5))
    torch.library.opcheck(block_attention_triton, (*(x.clone().requires_grad_() for x in (q, k, v)), *static))
    out, lse, m, inverse = block_attention_triton(q, k, v, *static)
    for grad_lse in (None, torch.ones_like(lse)):
        arguments = (torch.ones_like(out), grad_lse, out, m, inverse, q, k, v, *static)
        torch.library.opcheck(block_attention_triton_backward, arguments, test_utils=ALONE)


def test_a_compiled_graph_is_eager():
    def run(*x):
        return attended(*x, Segments(size=6))

    inputs = qkv(10)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_all_exact(differentiated(compiled, inputs), differentiated(run, inputs))


X = torch.zeros(2, 2, 5, 6, device=DEVICE)
ERRORS = {
    "pattern": ({"pattern": Dilated(width=4, dilation=3)}, r"has no kernel for Dilated\(width=4, dilation=3\); "
                "it has: Band, Blocks, Causal, Full, Prefix, Segments, "),
    "dtype": ({"q": X.double()}, "computes in float32, bfloat16, float16, got torch.float64"),
    "channels": ({"v": X[..., :1].expand(2, 2, 5, 600)}, "takes heads of at most 512 channels, got 600"),
    "positions": ({"q_start": 2**28, "k_start": 2**28}, "takes positions up to 268435456, got 268435461"),
    "dropout": ({"dropout_p": 0.5}, r"backend 'triton' of block_attention has no dropout, got dropout_p=0\.5; "
                "valid: reference, torch, sequential"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_inputs_without_a_kernel_are_refused(case):
    options, match = ERRORS[case]
    arguments = {"q": X, "k": X, "v": X, "pattern": Causal()} | options
    inputs = [arguments.pop(name) for name in ("q", "k", "v", "pattern")]
    with pytest.raises(ValueError, match=match):
        block_attention(*inputs, backend="triton", **arguments)
