"""`subquad doctor` shows what the engines themselves choose, and what is missing."""

import sys
from types import SimpleNamespace

import pytest
import torch

from subquad.cli import doctor
from subquad.ops import backends
from subquad.ops.backends import defaults_taken, no_kernels
from subquad.program import install

ENGINES = ["gated_scan", "running_softmax", "delta_scan", "block_attention"]


def test_it_shows_versions_the_machine_engines_and_extras(printed, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for package in ("fastapi", "tensorboard", "tokenizers"):  # of `serve`, of its `train`, and of that one's `hf`
        monkeypatch.setitem(sys.modules, package, None)
    lines = [" ".join(line.split()) for line in printed("doctor").splitlines()]
    assert f"torch {torch.__version__}" in lines
    assert f"threads {torch.get_num_threads()} (OMP_NUM_THREADS=1)" in lines
    assert all(f"{engine} cpu torch kernels are for GPUs" in lines for engine in ENGINES)
    assert "serve subquad serve train fastapi, tensorboard, tokenizers" in lines
    assert "hf subquad.hf in your own program tokenizers" in lines
    assert "testing AttentionContract in tests of your own nothing" in lines
    assert lines[-1] == f"An extra is installed by {install('subquad[EXTRA]')}"


def test_it_takes_no_arguments(refused):
    assert "unexpected argument 'more'" in refused("doctor", "more")
    assert "unknown option 'tokens'" in refused("doctor", "--tokens", "3")


def test_engines_answer_for_a_gpu_that_need_not_be_there(monkeypatch):
    """The rows are the choice of the engines: with Triton its kernels, without it what the engines take then."""
    gpu = torch.device("cuda")
    shared = {"shared_memory_per_block": 48 * 1024, "shared_memory_per_block_optin": 99 * 1024}
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, **shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(doctor, "ENGINES", doctor.ENGINES[:3])  # the fourth slices, for which PyTorch must have CUDA
    assert [row[::2] for row in doctor.engines(gpu)] == [(engine, "triton") for engine in ENGINES[:3]]
    assert {row[3] for row in doctor.engines(gpu)} == {"a GPU with tensor cores"}
    monkeypatch.setattr(properties, "major", 7)
    assert [row[2:] for row in doctor.engines(gpu)] == [("torch", no_kernels(gpu))] * 3
    assert no_kernels(gpu) == "compute capability below 8.0: no tensor cores"
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    assert no_kernels(gpu) == "the package triton is missing"


def test_only_defaults_within_the_block_are_collected():
    x = torch.ones(1, 1, 3, 2)
    with defaults_taken() as taken:
        backends.choose("asked", "torch", ("torch",), None, [x])
        assert taken == {}
        backends.choose("left", None, ("torch",), "torch", [x])
    backends.choose("later", None, ("torch",), "torch", [x])
    assert taken == {"left": "torch"}


def test_compilers_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = dict(doctor.found([torch.device("cpu")]))
    assert found["C++ compiler, for torch.compile"] == "none of c++, g++, clang++ is found"
    assert found["C compiler, for Triton"] == "none of gcc, clang is found"
    assert found["GPUs"].startswith("none")


@pytest.mark.gpu
def test_a_gpu_is_named_with_what_each_engine_takes_there(printed):
    assert torch.cuda.get_device_name(0) in printed("doctor")
    assert [row[0] for row in doctor.engines(torch.device("cuda", 0))] == ENGINES
