"""FlexAttention as a backend of engine B, against the definition.

Most tests run its plain form, which is not compiled; block masks, which that form does not read, are compared with the
masks that torch makes from all entries.
"""

import functools
import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from subquad.ops import _flex as flex
from subquad.ops import block_attention, block_attention_with_lse, patterns
from subquad.ops.patterns import Band, Causal, Full, Segments, Sinks, Window
from subquad.ops.patterns.sparse import Columns, Ranks
from subquad.ops.slots import Slots
from subquad.testing import LOW_PRECISION, assert_exact, assert_in_budget, mask_with
from tests.ops.cases import assert_all_exact, normal, shared_patterns

PATTERNS = [
    Causal(), Full(), Window(width=20), Window(width=200), Band(before=30, after=9), Segments(size=70),
    patterns.Shifted(size=160, shift=8), patterns.Blocks(size=64, back=1, ahead_blocks=1), patterns.Prefix(length=130),
    patterns.Suffix(start=130), Sinks(count=3, back=4), patterns.Globals(count=1, back=1, ahead_blocks=1, size=8),
    patterns.SinkTokens(count=70, back=1, size=64, offset=8),
    patterns.Random(size=8, index=1, of=2, skip=1, back=0),
    patterns.Random(size=64, index=0, of=2, skip=1, back=0, blocks=5), patterns.Dilated(width=4, dilation=3),
    patterns.DilatedBand(before=2, after=1, dilation=3), patterns.Strided(stride=5), Columns(size=160, last=3),
    Ranks(size=8, last=3),
]  # fmt: skip
every_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
COMPILERS = ("c++", "g++", "clang++")
compiles = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
MASK = mask_with([(9, 25, 6), (0, 33, 7)])


def qkv(tokens, keys=None, K=6, batch=2, dtype=torch.float32):
    keys = tokens if keys is None else keys
    shapes = (4, tokens, K), (2, keys, K), (2, keys, 5)
    return [normal(batch, *shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


def rows_of(T, S):
    """Return rows that differ: the T queries are the last of S keys, or begin elsewhere."""
    documents = {"q_start": S - T, "doc_ids": (torch.arange(2 * S) // 17).view(2, S)}
    starts = torch.tensor([S, 12])
    return {
        "documents": documents,
        "documents and lengths": {**documents, "lengths": torch.tensor([0, S - 10])},
        "lengths": {"q_start": S - T, "lengths": torch.tensor([S, 31])},
        "starts": {"q_start": starts, "k_start": starts - (S - T)},
        "elsewhere": {"q_start": S - T + 7, "k_start": -10},
    }


@pytest.fixture
def plain_masks(monkeypatch):
    """The dispatch runs the plain form; the list of its block masks."""
    made, run = [], flex._run
    monkeypatch.setattr(flex, "_run", lambda q, k, v, mask, *rest: made.append(mask) or run(q, k, v, mask, *rest))
    monkeypatch.setattr(flex, "attend", functools.partial(flex.attend, compiled=False))
    return made


plain_form = pytest.mark.usefixtures("plain_masks")


def assert_is_the_definition(inputs, pattern, with_lse=True, **options):
    def run(backend, *inputs):
        if with_lse:
            return block_attention_with_lse(*inputs, pattern, backend=backend, **options)
        return [block_attention(*inputs, pattern, backend=backend, **options)]

    actual, plain = run("flex", *inputs), run("reference", *inputs)
    exact = run("reference", *(x.double() for x in inputs))
    for name, a, p, e in zip(("out", "lse"), actual, plain, exact, strict=False):
        assert a.dtype == p.dtype
        assert_exact(torch.isneginf(a), torch.isneginf(e))
        a, p, e = (x.masked_fill(torch.isneginf(x), 0.0) for x in (a, p, e))
        assert_in_budget(a, p, e, inputs[0].dtype, f"{name}, {pattern}, {options}")


def test_every_pattern_is_tried():
    assert {type(pattern) for pattern in PATTERNS} == set(shared_patterns())


@plain_form
@every_pattern
def test_every_pattern_is_its_definition(pattern):
    assert_is_the_definition(qkv(150), pattern)


@plain_form
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_every_dtype_stays_in_budget(dtype):
    assert_is_the_definition(qkv(70, dtype=dtype), Segments(size=16))


@plain_form
@pytest.mark.parametrize("pattern", [Causal(), Full(), Segments(size=7, back=2)], ids=repr)
@pytest.mark.parametrize("rows", rows_of(30, 150))
def test_rows_may_differ(pattern, rows):
    assert_is_the_definition(qkv(30, 150), pattern, **rows_of(30, 150)[rows])


@plain_form
def test_padding_and_cross_attention():
    assert_is_the_definition(qkv(40), Window(width=9), mask=MASK)
    assert_is_the_definition(qkv(20, 30), Full(), key_lengths=torch.tensor([0, 13]))


@plain_form
def test_more_queries_than_keys_may_see_none():
    inputs = qkv(300, 100)
    assert_is_the_definition(inputs, Window(width=20))
    out = block_attention(*inputs, Window(width=20), backend="flex")
    assert_exact(out[:, :, 119:], torch.zeros_like(out[:, :, 119:]))


@plain_form
def test_leaves_without_a_graph_are_taken():
    q, k, v = (x.requires_grad_() for x in qkv(20))
    with torch.no_grad():
        out = block_attention(q, k, v, Causal(), backend="flex")
    assert not out.requires_grad


def assert_same_blocks(mask, expected, names):
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", *names):
        assert_exact(getattr(mask, name), getattr(expected, name), name)


@every_pattern
@pytest.mark.parametrize(("tokens", "keys"), [(300, 300), (256, 140), (1, 257)])
def test_the_blocks_are_those_of_the_dense_mask(pattern, tokens, keys):
    mask = flex._pattern_mask(pattern, tokens, keys, torch.device("cpu"))
    expected = create_block_mask(lambda b, h, t, s: pattern.allowed(t, s), 1, 1, tokens, keys, device="cpu")
    assert mask.seq_lengths == expected.seq_lengths
    assert_same_blocks(mask, expected, ("q_num_blocks", "q_indices"))


@pytest.mark.parametrize("pattern", [Causal(), Window(width=20), Band(before=30, after=200), Sinks(count=3, back=0)])
@pytest.mark.parametrize("rows", rows_of(200, 300))
def test_the_blocks_of_rows_are_those_of_the_dense_mask(rows, pattern, plain_masks):
    block_attention(*qkv(200, 300), pattern, backend="flex", **rows_of(200, 300)[rows])
    (mask,) = plain_masks
    expected = create_block_mask(mask.mask_mod, mask.kv_num_blocks.shape[0], 1, 200, 300, device="cpu")
    assert_same_blocks(mask, expected, ())


@pytest.mark.parametrize("documents", [False, True])
def test_a_window_is_looked_at_and_no_more(documents, monkeypatch):
    looked, allowed = [], Window.allowed

    def counted(pattern, q_pos, k_pos):
        looked.append(allowed(pattern, q_pos, k_pos).numel())
        return allowed(pattern, q_pos, k_pos)

    monkeypatch.setattr(Window, "allowed", counted)
    T = 8 * flex.BLOCK
    at = torch.arange(T).expand(2, T)
    slots = Slots(0, 0, None, at, at, at // 99, at // 99) if documents else Slots(7, 7)
    x = torch.zeros(2, 1, T, 6)
    flex._mask(x, x, Window(width=20), slots)
    assert len(looked) == 8
    assert max(looked) <= 2 * flex.BLOCK * 2 * flex.BLOCK


@pytest.fixture(params=["eager", pytest.param("inductor", marks=[pytest.mark.slow, compiles])])
def graphs(request, monkeypatch):
    """The number of graphs that were compiled, by a backend of torch."""
    monkeypatch.setattr(flex.torch, "compile", functools.partial(torch.compile, backend=request.param))
    flex._graph.cache_clear()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    flex._graph.cache_clear()


def test_a_shape_is_compiled_once_and_shapes_are_counted_apart(graphs):
    with torch._dynamo.config.patch(recompile_limit=2):  # of each code object
        for tokens in (200, 200, 300, 200, 300, 400, 500):
            assert_is_the_definition(qkv(tokens, batch=1), Segments(size=70), with_lse=False)
    assert graphs() == flex._graph.cache_info().misses == 4


def test_the_steps_of_a_decoder_share_one_graph(graphs):
    for position in (60, 61, 80):
        inputs, starts = qkv(1, 40, K=8), {"q_start": position, "k_start": position - 39}
        assert_is_the_definition(inputs, Window(width=40), with_lse=False, **starts)
    assert graphs() == 1


def test_the_number_of_kept_graphs_is_bounded():
    for size in range(1, 2 * flex.GRAPHS):
        flex._graph((size,))
    assert flex._graph.cache_info().currsize == flex.GRAPHS
    flex._graph.cache_clear()


def test_masks_are_kept_and_their_number_is_bounded():
    flex._pattern_mask.cache_clear()
    cpu = torch.device("cpu")
    assert flex._pattern_mask(Causal(), 20, 20, cpu) is flex._pattern_mask(Causal(), 20, 20, cpu)
    for tokens in range(1, 2 * flex.MASKS):
        flex._pattern_mask(Causal(), tokens, 1, cpu)
    assert flex._pattern_mask.cache_info().currsize == flex.MASKS


def test_kept_masks_serve_training_after_inference():
    flex._pattern_mask.cache_clear()
    flex._pattern_blocks.cache_clear()
    with torch.inference_mode():
        block_attention_with_lse(*qkv(20), Causal(), backend="flex")
    mask = flex._pattern_mask(Causal(), 20, 20, torch.device("cpu"))
    assert flex._pattern_mask.cache_info().misses == 1
    assert not any(x.is_inference() for x in mask.as_tuple() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("rows", ["layout", "documents", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_a_callers_graph_takes_it_in(rows):
    options = {} if rows == "layout" else rows_of(150, 150)[rows]

    def run(*x):
        return block_attention_with_lse(*x, Segments(size=70), backend="flex", **options)

    inputs = qkv(150)
    assert_all_exact(torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs), run(*inputs))


def test_a_callers_graph_has_one_size_and_keeps_its_mask():
    sizes = []

    def backend(graph, _):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    flex._pattern_blocks.cache_clear()
    for tokens in (100, 400):
        torch._dynamo.reset()
        run = torch.compile(lambda *x: block_attention(*x, Causal(), backend="flex"), fullgraph=True, backend=backend)
        for _ in range(2):
            run(*qkv(tokens, batch=1))
    assert len(set(sizes)) == 1
    assert len(sizes) == flex._pattern_blocks.cache_info().misses == 2


def test_the_op_of_blocks_is_sound():
    at = torch.arange(300).expand(2, 300)
    for slots in (Slots(0, 0), Slots(7, 3), Slots(0, 0, None, at, at, at // 17, at // 17)):
        torch.library.opcheck(flex.listed_blocks, (Causal().key(), 2, 300, 300, at.device, *slots))


X = torch.zeros(2, 2, 5, 6)
NO_GRADIENTS = "has no gradients on a CPU, got inputs that require one; valid: reference, "
ERRORS = {
    "gradients": ({"q": X.clone().requires_grad_()}, NO_GRADIENTS),
    "dtype": ({"k": X.double()}, "computes in float32, bfloat16, float16, got torch.float64"),
    "dropout": ({"dropout_p": 0.5}, r"has no dropout, got dropout_p=0\.5; valid: reference, torch, sequential"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_options_that_it_lacks_are_refused(case):
    options, match = ERRORS[case]
    inputs = [options.get(name, X) for name in "qkv"]
    rest = {name: option for name, option in options.items() if name not in "qkv"}
    with pytest.raises(ValueError, match=f"backend 'flex' of block_attention {match}"):
        block_attention(*inputs, Causal(), backend="flex", **rest)
