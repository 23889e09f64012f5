"""The backend `sequential`: any chunks, the memory of one tile, and the mechanisms' laws."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from subquad.attention.laws import Law
from subquad.ops import block_attention, gated_scan, running_softmax
from subquad.ops._sequential import attend as sequential
from subquad.ops._sequential.attend import block_attention_sequential, block_attention_sequential_backward
from subquad.ops.backends import use_backend
from subquad.ops.patterns import Causal, Segments, Window
from subquad.testing import AttentionContract, assert_same_maths, largest_allocation, with_gradients
from tests.ops.cases import ALONE, assert_all_exact, differentiated, normal


@settings(max_examples=10)
@given(queries=st.integers(1, 40), keys=st.integers(1, 40))
@example(queries=1, keys=1)
def test_any_chunks_give_the_same(queries, keys):
    q, k, v = (normal(2, 2, 33, 6, seed=n) for n in range(3))
    chunked = block_attention(q, k, v, Window(width=7), chunk_size=(queries, keys), backend="sequential")
    assert_same_maths(chunked, block_attention(q, k, v, Window(width=7)), f"{queries} x {keys}")


def test_attention_takes_the_memory_of_one_tile(monkeypatch):
    monkeypatch.setattr(sequential, "QUERY_CHUNK", 16)
    monkeypatch.setattr(sequential, "KEY_CHUNK", 32)

    def largest(batch, heads, tokens):
        q = normal(batch, heads, tokens, 1, dtype=torch.float32).requires_grad_()
        return largest_allocation(lambda: block_attention(q, q, q, Causal(), backend="sequential").sum().backward())

    assert largest(1, 1, 64) == largest(1, 1, 96) == largest(2, 4, 32)


def test_the_attention_keeps_torchs_rules():
    q, k, v = normal(2, 2, 9, 4, seed=1), normal(2, 2, 12, 4, seed=2), normal(2, 2, 12, 3, seed=3)
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


ENGINES = {
    "block_attention": lambda q, i, v: block_attention(q, i, v, Window(width=5), dropout_p=0.1, backend="sequential"),
    "gated_scan": lambda q, i, v: gated_scan(q, i, v, -i, normalise=True, backend="sequential").out,
    "running_softmax": lambda q, i, v: running_softmax(q, i, v, backend="sequential").out,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_compiles_whole(engine):
    torch._dynamo.reset()
    inputs = [normal(2, 2, 20, 4, seed=n, dtype=torch.float32).abs() for n in (1, 2, 3)]
    results = []
    for f in (ENGINES[engine], torch.compile(ENGINES[engine], fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        results.append(differentiated(lambda *x, f=f: [f(*x)], inputs))
    assert_all_exact(*results)


class Sequential(AttentionContract):
    """The contract with every engine in sequence, in small chunks; the engines' own tests show the other laws."""

    laws = (Law.SPLIT, Law.BLOCK_SIZES, Law.LONG, Law.DOCUMENTS)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _backend(cls):
        before = sequential.QUERY_CHUNK, sequential.KEY_CHUNK
        sequential.QUERY_CHUNK, sequential.KEY_CHUNK = 32, 64
        with use_backend("sequential"):
            yield
        sequential.QUERY_CHUNK, sequential.KEY_CHUNK = before

    # tests/attention has the oracles.
    test_the_oracle_agrees = None
    # test_flops.py counts its products: `cost` counts those of the default backend.
    test_cost_grows_as_the_class_says = None
    # `use_backend` does not act inside torch.compile; the operators are compiled above.
    test_compiled_whole_with_aot_eager = None
    test_compiled_whole_with_inductor = None

    def long_inputs(self, dtype):
        layer = self.make(dtype, num_heads=self.fewest_heads)
        values = with_gradients(layer, self.forward_of(layer), self.inputs(2048, 1, dtype))
        assert all(value.isfinite().all() for value in values.values())


class TestWindow(Sequential):
    name = "window"
    options = {"width": 40, "rope": True}


class TestLatte(Sequential):
    name = "latte"
    options = {"num_latents": 10}


@pytest.mark.slow
class TestFull(Sequential):
    name = "full"


@pytest.mark.slow
class TestLinear(Sequential):
    name = "linear"
