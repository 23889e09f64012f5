"""`python -m benchmarks` and other libraries: their operators run, and those with our mask give our outputs."""

import dataclasses

import pytest
import torch

from benchmarks import peers as _peers
from benchmarks import timing
from benchmarks.config import ModelConfig, OpsConfig
from benchmarks.model import measure_model
from benchmarks.operators import Shape, our_cases
from benchmarks.ops import measure_ops
from subquad.testing import assert_in_budget, assert_same_maths

TINY = {"repeats": 1, "seconds": 1.0}


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    monkeypatch.setattr(timing, "COPIED", {"cpu": 2**16})
    monkeypatch.setattr(timing, "MULTIPLIED", {"cpu": 32})


def cases(name):
    """Return a peer's cases on its first device."""
    (peer,) = (peer for peer in _peers.PEERS if peer.name == name)
    return {case.name: case for case in peer.cases(peer.devices[0])}


def shape():
    sizes = {"batch": 2, "heads": 2, "tokens": 64, "channels": 16, "latents": 8, "segment": 16}
    return Shape(**sizes, device="cpu", dtype=torch.float64)


def test_every_operator_runs_on_a_cpu():
    libraries = ["local-attention", "linear-attention-transformer", "transformers"]
    sizes = {"heads": 2, "channels": 16, "segment": [16], "tokens": [128]}
    mechanisms = ["llp", "window", "linear", "mamba2", "gated_delta_net"]
    report = measure_ops(OpsConfig(mechanisms=mechanisms, peers=libraries, **sizes, **TINY))
    found = {row["name"]: row["status"] for row in report.rows if row["kind"] == "peer"}
    assert set(found) == {name for library in libraries for name in cases(library)}
    assert set(found.values()) == {"ok"}
    assert [peer["status"] for peer in report.peers] == ["installed"] * 3


def test_perceiver_ar_runs_as_a_model():
    sizes = {"layers": 2, "dim": 64, "heads": 2, "vocab": 17, "tokens": [16]}
    report = measure_model(ModelConfig(mechanisms=["perceiver_ar"], peers=["perceiver-ar-pytorch"], **sizes, **TINY))
    assert {row["status"] for row in report.rows} == {"ok"}
    assert ("perceiver-ar-pytorch", "step") in {(row["name"], row["pass"]) for row in report.rows}


def test_local_attention_has_the_mask_of_llp():
    theirs = cases("local-attention")["local-attention, llp"].make(shape())
    ours = our_cases(["llp"], [None])[0].make(shape())
    assert_same_maths(theirs.call(*theirs.inputs), ours.call(*ours.inputs))


def assert_ours(case):
    """Assert that a case without kernels for a GPU gives the outputs of the operator beside it, on its inputs."""
    small = dataclasses.replace(shape(), dtype=torch.float32, tokens=300)
    theirs, plain = case.make(small), our_cases([case.beside], ["reference"])[0].make(small)
    exact = plain.call(*(x.double() for x in plain.inputs))
    assert_in_budget(theirs.call(*theirs.inputs).transpose(1, 2), plain.call(*plain.inputs), exact, torch.float32)


@pytest.mark.parametrize("name", ["transformers, mamba2", "transformers, gated_delta_net"])
def test_transformers_scans_are_ours(name):
    assert_ours(cases("transformers")[name])


@pytest.mark.parametrize(("name", "naive", "names"), [
    ("retnet", "simple_gla.naive.naive_recurrent_simple_gla", ["g"]),
    ("gla", "gla.naive.naive_recurrent_gla", ["gk"]),
    ("delta_net", "gated_delta_rule.naive.naive_recurrent_gated_delta_rule", ["beta"]),
    ("gated_delta_net", "gated_delta_rule.naive.naive_recurrent_gated_delta_rule", ["beta", "g"]),
    ("kda", "kda.naive.naive_recurrent_kda", ["beta", "g"]),
])  # fmt: skip
def test_flash_linear_attentions_scans_are_ours(name, naive, names, monkeypatch, peer):
    """With the library's own definitions, which divide queries by sqrt(K), in the place of its kernels for a GPU."""
    module, _, function = f"fla.ops.{naive}".rpartition(".")

    def kernel(q, k, v, scale, **others):
        given = dict(zip(names, others.values(), strict=True))
        given |= {"g": torch.zeros_like(others["beta"])} if name == "delta_net" else {}
        return getattr(peer(module), function)(q * scale * q.shape[-1] ** 0.5, k, v, **given)

    monkeypatch.setattr(_peers, "own", lambda *_: kernel)
    assert_ours(cases("fla")[f"fla, {name}"])


def test_the_route_through_chunk_gla_is_causal_latte(monkeypatch, peer):
    """With the library's own definition in the place of its kernel, which needs a GPU."""
    naive = peer("fla.ops.gla.naive").naive_recurrent_gla

    class Gla:
        @staticmethod
        def chunk_gla(q, k, v, log_f, scale):
            return naive(q * scale * q.shape[-1] ** 0.5, k, v, log_f)  # it divides by that root

    monkeypatch.setattr(_peers, "load", lambda module: Gla)
    small = dataclasses.replace(shape(), dtype=torch.float32)
    theirs = cases("fla")["fla, chunk_gla"].make(small)
    plain = our_cases(["latte"], ["reference"])[0].make(small)
    exact = plain.call(*(x.double() for x in plain.inputs))
    assert_in_budget(theirs.call(*theirs.inputs).transpose(1, 2), plain.call(*plain.inputs), exact, torch.float32)
