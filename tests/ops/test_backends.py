import logging

import pytest
import torch

from subquad.ops import backends, block_attention, gated_scan, running_softmax
from subquad.ops.backends import choose, use_backend, without_autocast
from subquad.ops.patterns import Causal

X = torch.ones(1, 1, 3, 2)
ENGINES = {
    "block_attention": lambda backend=None: block_attention(X, X, X, Causal(), backend=backend),
    "gated_scan": lambda backend=None: gated_scan(X, X, X, None, backend=backend),
    "running_softmax": lambda backend=None: running_softmax(X, X, X, backend=backend),
}
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def _nothing_logged_yet():
    backends._log_once.cache_clear()
    yield
    backends._log_once.cache_clear()


@pytest.mark.parametrize("engine", ["gated_scan", "running_softmax"])
def test_a_backend_that_an_engine_has_not_is_never_replaced_by_another(engine):
    match = f"{engine} has no backend 'flex' here; it has reference, torch, sequential, triton"
    with pytest.raises(ValueError, match=match):
        ENGINES[engine]("flex")
    with use_backend("flex"), pytest.raises(ValueError, match=match):
        ENGINES[engine]()


@engines
def test_kernels_are_refused_without_triton(engine, monkeypatch):
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=f"backend 'triton' of {engine} needs the package triton: pip install"):
        ENGINES[engine]("triton")


@pytest.mark.parametrize(
    ("engine", "sizes", "match"),
    [
        ("gated_scan", (300, 4), "at most 256 key channels per head, got 300"),
        ("gated_scan", (4, 300), "at most 256 value channels per head, got 300"),
        ("running_softmax", (600, 4), "at most 512 latents per head, got 600"),
    ],
)
def test_kernels_refuse_heads_that_they_cannot_hold(engine, sizes, match):
    q, v = torch.ones(1, 1, 2, sizes[0]), torch.ones(1, 1, 2, sizes[1])
    with pytest.raises(ValueError, match=match):
        gated_scan(q, q, v, None, backend="triton") if engine == "gated_scan" else running_softmax(
            q, q, v, backend="triton"
        )


@engines
def test_an_unknown_backend_is_answered_with_the_valid_ones(engine):
    with pytest.raises(ValueError, match=f"unknown backend 'troch' for {engine}; did you mean 'torch'"):
        ENGINES[engine]("troch")


def test_use_backend_refuses_an_unknown_name_at_once():
    with (
        pytest.raises(ValueError, match="unknown backend 'refrence'; did you mean 'reference'"),
        use_backend("refrence"),
    ):
        pass


@engines
@pytest.mark.parametrize("backend", ["reference", "torch", "sequential"])
def test_a_backend_that_an_engine_has_runs(engine, backend):
    ENGINES[engine](backend)
    with use_backend(backend):
        ENGINES[engine]()


def test_use_backend_holds_within_its_block_and_nests():
    available = ("reference", "torch")
    with use_backend("reference"):
        assert choose("op", None, available, "torch") == "reference"
        with use_backend("torch"):
            assert choose("op", None, available, "reference") == "torch"
        assert choose("op", None, available, "torch") == "reference"
        assert choose("op", "torch", available, "reference") == "torch", "the argument wins"
    assert choose("op", None, available, "torch") == "torch"


def test_use_backend_ends_with_an_error_inside():
    with pytest.raises(RuntimeError, match="inside"), use_backend("reference"):
        raise RuntimeError("inside")
    assert choose("op", None, ("reference", "torch"), "torch") == "torch"


def test_the_default_is_logged_once_per_engine(caplog):
    with caplog.at_level(logging.INFO, logger="subquad"):
        for engine in ENGINES.values():
            engine()
            engine()
    assert [record.message for record in caplog.records] == [f"{name} runs on the torch backend" for name in ENGINES]


def test_an_explicit_choice_is_not_logged(caplog):
    with caplog.at_level(logging.INFO, logger="subquad"):
        choose("op", "reference", ("reference", "torch"), "torch")
        with use_backend("torch"):
            choose("op", None, ("reference", "torch"), "reference")
    assert caplog.records == []


def test_without_autocast_keeps_the_callers_precision():
    product = without_autocast(lambda a, b: a @ b)
    a = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert product(a, a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16, "autocast is on again"


@engines
def test_engines_give_the_dtype_of_the_values_under_autocast(engine):
    with torch.autocast("cpu", torch.bfloat16):
        out = ENGINES[engine]()
    assert (out if isinstance(out, torch.Tensor) else out.out).dtype == torch.float32
