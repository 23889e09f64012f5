"""Fixtures of the benchmarks' tests: small copies and products, a short warm-up, and a report to draw."""

import gc

import pytest

from benchmarks import decode, timing
from benchmarks.report import Report


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """Timing collects garbage, which takes half a second if it walks through all imported modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "COPIED", {"cpu": 2**16})
        patch.setattr(timing, "MULTIPLIED", {"cpu": 32})
        patch.setattr(decode, "WARM", 0.0)
        yield


def row(name, tokens, which, seconds, **more):
    """A row as `measure_ops` makes them."""
    sizes = {"backend": None, "tokens": tokens, "latents": None, "segment": None, "pass": which}
    times = {"median_s": seconds, "p20_s": seconds, "p80_s": seconds, "repeats": 5, "times_faster": 1.0}
    work = {"peak_bytes": 1000 * tokens, "io_bytes": 1000 * tokens, "flops": None, "flops_per_s": None}
    kind = {"name": name, "label": name, "kind": "base" if name == "sdpa" else "ours"}
    return {**kind, **sizes, "status": "ok", "message": "", **times, **work, "bytes_per_s": 1e9, **more}


@pytest.fixture
def made_up():
    """A report of two mechanisms at two lengths; latte's longest ran out of memory."""
    rows = []
    for which in ("forward", "forward_backward"):
        for tokens in (128, 256):
            rows.append(row("sdpa", tokens, which, 1e-3 * tokens))
            for latents in (8, 16):
                rows.append(row("latte", tokens, which, 1e-4 * tokens * latents, latents=latents))
    rows[-1] |= {"status": "out of memory", "message": "needs about 3.0 GiB"}
    sizes = {"batch": 1, "batch_tokens": None, "heads": 2, "channels": 8, "latents": [8, 16], "segment": [64]}
    settings = {"device": "cpu", "dtype": "float32", "passes": ["forward", "forward_backward"], **sizes}
    settings["tokens"] = [128, 256]
    machine = {"cpu": "a processor", "threads": 2}
    provenance = {"date": "2026-01-02", "commit": "abc", "versions": {"torch": "2"}, "machine": machine}
    return Report("ops", settings, rows, provenance, {"copy_bytes_per_s": 3e9}, [], "python -m benchmarks ops")
