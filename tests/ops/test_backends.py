"""Which backend an engine runs on: asked for, or chosen by device, dtype, pattern and options."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode

from subquad.ops import attend, backends, block_attention, gated_scan, running_softmax
from subquad.ops.backends import choose, use_backend, without_autocast
from subquad.ops.patterns import Blocks, Causal, Dilated, Globals, Random, Segments, Shifted, Strided, Window
from subquad.ops.patterns.sparse import Columns
from subquad.ops.scan import BACKENDS
from subquad.ops.softmax import gated_mean

X = torch.ones(1, 1, 3, 2)
ENGINES = {
    "block_attention": lambda backend=None, k=X, v=X: block_attention(k, k, v, Causal(), backend=backend),
    "gated_mean": lambda backend=None, k=X, v=X: gated_mean(k[..., :1], k[..., :1], v, backend=backend),
    "gated_scan": lambda backend=None, k=X, v=X: gated_scan(k, k, v, None, backend=backend),
    "running_softmax": lambda backend=None, k=X, v=X: running_softmax(k, k, v, backend=backend),
}
engines = pytest.mark.parametrize("engine", ENGINES)
BOTH = ("reference", "torch")


@pytest.fixture(autouse=True)
def _nothing_logged_yet():
    backends._log_once.cache_clear()
    yield
    backends._log_once.cache_clear()


@pytest.mark.parametrize("engine", ["gated_mean", "gated_scan", "running_softmax"])
def test_a_backend_that_an_engine_lacks_is_never_replaced_by_another(engine):
    match = f"{engine} has no backend 'flex' here; it has reference, torch, sequential, triton"
    with pytest.raises(ValueError, match=match):
        ENGINES[engine]("flex")
    with use_backend("flex"), pytest.raises(ValueError, match=match):
        ENGINES[engine]()


def test_decays_of_the_values_have_no_kernels(caplog):
    match = "gated_scan has no backend 'triton' here; it has reference, torch, sequential"
    with pytest.raises(ValueError, match=match):
        gated_scan(X, X, X, None, log_g=-X, backend="triton")
    with caplog.at_level(logging.INFO, logger="subquad"), FakeTensorMode():
        x = torch.empty(1, 1, 3, 2, device="cuda")
        assert gated_scan(x, x, x, None, log_g=-x).out.shape == x.shape
    assert [record.message for record in caplog.records] == ["gated_scan runs on the torch backend"]


@engines
def test_kernels_are_refused_without_triton(engine, monkeypatch):
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=f"backend 'triton' of {engine} needs the package triton: .* -m pip install"):
        ENGINES[engine]("triton")


@pytest.mark.parametrize(("engine", "sizes", "match"), [
    ("gated_scan", (600, 4), "at most 512 key channels per head, got 600"),
    ("gated_scan", (4, 600), "at most 512 value channels per head, got 600"),
    ("gated_mean", (1, 600), "at most 512 value channels per head, got 600"),
    ("running_softmax", (600, 4), "at most 512 latents per head, got 600"),
])  # fmt: skip
def test_kernels_refuse_heads_that_they_cannot_hold(engine, sizes, match):
    with pytest.raises(ValueError, match=match):
        ENGINES[engine]("triton", *(torch.ones(1, 1, 2, size) for size in sizes))


@engines
def test_an_unknown_backend_is_answered_with_the_valid_ones(engine):
    with pytest.raises(ValueError, match=f"unknown backend 'troch' for {engine}; did you mean 'torch'"):
        ENGINES[engine]("troch")
    with pytest.raises(ValueError, match="unknown backend 'refrence'; did you mean 'reference'"):
        use_backend("refrence").__enter__()


def test_use_backend_holds_within_its_block_and_nests():
    with use_backend("reference"):
        assert choose("op", None, BOTH, "torch") == "reference"
        with use_backend("torch"):
            assert choose("op", None, BOTH, "reference") == "torch"
        assert choose("op", None, BOTH, "torch") == "reference"
        assert choose("op", "torch", BOTH, "reference") == "torch", "the argument wins"
    with pytest.raises(RuntimeError, match="inside"), use_backend("reference"):
        raise RuntimeError("inside")
    assert choose("op", None, BOTH, "torch") == "torch"


@pytest.mark.parametrize("engine", ["block_attention", "gated_scan"])
def test_a_backend_is_obeyed_in_compiled_code(engine):
    """A function is compiled once for each backend, and a block inside it counts too."""
    graphs = EagerAndRecordGraphs()
    call = torch.compile(ENGINES[engine], backend=graphs, fullgraph=True)
    q = X.clone().requires_grad_()  # a single query without gradients is a product of its own
    call(k=q, v=q)
    for backend in ("reference", "sequential"):
        with use_backend(backend):
            call(k=q, v=q)
    call(k=q, v=q)
    assert ["subquad" in graph.code for graph in graphs.graphs] == [True, False, True]
    assert "sequential" in graphs.graphs[2].code

    @torch.compile(backend=graphs, fullgraph=True)
    def inside(x):
        with use_backend("reference"):
            return ENGINES[engine](k=x, v=x)

    inside(q)
    assert "subquad" not in graphs.graphs[3].code
    with use_backend("reference"):
        assert choose("op", None, BOTH, "torch") == "reference", "the block inside did not end this one"


def test_the_innermost_block_counts_in_compiled_code():
    graphs = EagerAndRecordGraphs()
    with use_backend("reference"), use_backend("torch"):
        with use_backend("reference"):
            pass
        torch.compile(ENGINES["gated_scan"], backend=graphs, fullgraph=True)()
    assert "subquad" in graphs.graphs[0].code


def test_a_backend_that_an_engine_lacks_is_refused_in_compiled_code():
    with use_backend("flex"), pytest.raises(ValueError, match="gated_scan has no backend 'flex' here"):
        torch.compile(ENGINES["gated_scan"], backend="eager")()


def test_only_the_default_is_logged_once_per_engine(caplog):
    with caplog.at_level(logging.INFO, logger="subquad"):
        choose("op", "reference", BOTH, "torch")
        with use_backend("torch"):
            choose("op", None, BOTH, "reference")
        assert caplog.records == []
        for engine in ENGINES.values():
            engine()
            engine()
    assert [record.message for record in caplog.records] == [f"{name} runs on the torch backend" for name in ENGINES]


COMPILING = pytest.mark.parametrize("compiling", [False, True], ids=["eager", "compiled"])


@COMPILING
def test_without_autocast_keeps_the_callers_precision(compiling):
    product = without_autocast(lambda a, b: a @ b)
    if compiling:
        product = torch.compile(product, backend="eager", fullgraph=True)
    a = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert product(a, a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16, "autocast is on again"


@COMPILING
def test_a_device_without_autocast_has_none_to_turn_off(compiling):
    product = without_autocast(lambda a, b: a @ b)
    if compiling:
        product = torch.compile(product, backend="eager", fullgraph=True)
    a = torch.ones(2, 2, device="meta")
    assert product(a, a).shape == (2, 2)


@engines
def test_engines_give_the_dtype_of_the_values_under_autocast(engine):
    with torch.autocast("cpu", torch.bfloat16):
        out = ENGINES[engine]()
    assert (out if isinstance(out, torch.Tensor) else out.out).dtype == torch.float32


# The backend that block attention chooses without a request.

KERNELS = [Causal(), Window(width=4), Segments(size=4), Shifted(size=4, shift=2), Blocks(size=4)]
NO_KERNELS = [Globals(count=1, back=1, ahead_blocks=1), Random(size=8, index=1, of=2, skip=1, back=0)]
FOLDED = [Dilated(width=4, dilation=3), Strided(stride=5), Columns(size=8, last=3)]


@pytest.fixture(autouse=True)
def capable(monkeypatch):
    """Plant a GPU's major compute capability."""

    def plant(major):
        shared = {"shared_memory_per_block": 48 * 1024, "shared_memory_per_block_optin": 99 * 1024}
        found = SimpleNamespace(major=major, minor=0, **shared)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    plant(8)
    return plant


def default(pattern, device="cuda", dtype=torch.bfloat16, channels=64, training=True, dropout_p=0.0):
    with FakeTensorMode():  # a GPU that need not be there
        q, k, v = (torch.empty(1, 2, 8, channels, dtype=dtype, device=device) for _ in range(3))
        return attend._default_on_gpu(q.requires_grad_(training), k, v, pattern, dropout_p)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", KERNELS, ids=repr)
def test_kernels_run_on_a_gpu_if_they_have_the_pattern(pattern, dtype, training):
    assert default(pattern, dtype=dtype, training=training) == "triton"


@pytest.mark.parametrize("pattern", [*KERNELS, *NO_KERNELS], ids=repr)
def test_flex_attention_trains_patterns_without_kernels(pattern, monkeypatch):
    if pattern in KERNELS:
        monkeypatch.setattr(attend, "HAS_TRITON", False)
    assert default(pattern) == "flex"
    assert default(pattern, training=False) == "torch", "shapes change, and each would be compiled"


@pytest.mark.parametrize("pattern", FOLDED, ids=repr)
def test_patterns_that_fold_to_dense_ones_are_folded(pattern):
    assert default(pattern) == "torch"


@pytest.mark.parametrize("major", [7, 8, 9])
def test_a_gpu_without_tensor_cores_for_bfloat16_runs_torch(major, capable):
    capable(major)
    with FakeTensorMode():
        x = torch.empty(1, 2, 8, 64, device="cuda")
        for pattern, else_name in ((KERNELS[0], "triton"), (NO_KERNELS[0], "flex")):
            assert default(pattern) == ("torch" if major < 8 else else_name)
        assert choose("gated_scan", None, BACKENDS, None, [x]) == ("torch" if major < 8 else "triton")
        assert choose("gated_scan", "triton", BACKENDS, None, [x]) == "triton", "an explicit request"


@pytest.mark.parametrize("pattern", [*KERNELS, *NO_KERNELS], ids=repr)
@pytest.mark.parametrize(
    "option", [{"device": "cpu"}, {"dropout_p": 0.1}, {"dtype": torch.float64}, {"channels": 600}], ids=str
)
def test_torch_runs_everything_else(pattern, option):
    assert default(pattern, **option) == "torch"


def test_kernels_take_the_channels_whose_tiles_fit_on_the_card():
    assert default(KERNELS[0], channels=512) == "triton"
    assert default(KERNELS[0], channels=300, dtype=torch.float32) == "torch", "160 KiB, and the planted card has 99"
    assert default(NO_KERNELS[0], channels=300) == "torch"
