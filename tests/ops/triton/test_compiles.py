"""The kernels compile for four cards and fit on them; no length of a sequence ever compiles one again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STACK = 1024
"""Bytes a thread that registers may spill, where `NAMED` has no reason for more."""
NAMED = {
    ("walk_kernel", "256", "float32"): 1536, ("walk_back_kernel", "256", "float32"): 1600,
    ("walk_back_kernel", "128", "float32"): 2432, ("walk_kernel", "256", "float16"): 1536,
}  # fmt: skip
"""More bytes for kernels of which a program holds all key channels, by kernel, channels and dtype (docs/gpu.md)."""
FAMILIES = ("gated_scan", "delta_scan", "running_softmax", "gated_mean", "block_attention")
DTYPES = ("bfloat16", "float16", "float32", "tf32")
CARDS = (80, 86, 89, 90)
SOON = "90:quick:gated_mean"
"""Compiled in `make test` too, in seconds: the compiler and what it says can be read."""
LATER = [f"90:quick:{family}" for family in FAMILIES if family not in SOON] + ["86:quick:block_attention"]


def compiled(*specs):
    """Return the reports of specifications ARCH:CASES:FAMILY, whose kernels fit on their cards."""
    script = Path(__file__).with_name("compile_for.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, *specs], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    for spec in specs:
        _, dtype, _ = spec.split(":")
        assert len(reports[spec]["kernels"]) > 2, spec
        for kernel in reports[spec]["kernels"]:
            assert kernel["shared"] <= reports[spec]["limit"], (spec, kernel)
            named = kernel["kernel"], kernel.get("K"), dtype
            assert kernel["stack"] <= NAMED.get(named, STACK), (spec, kernel)
    return reports


@pytest.mark.parametrize("spec", [SOON, *(pytest.param(spec, marks=pytest.mark.slow) for spec in LATER)])
def test_kernels_fit_and_compile_once_whatever_the_length(spec):
    report = compiled(spec)[spec]
    assert len(report["compiled again"]) == 20
    again = {tokens: count for tokens, count in report["compiled again"].items() if count}
    assert not again, f"how many kernels of {spec} were compiled again, by length: {again}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("card", CARDS)
def test_kernels_of_all_sizes_fit(family, dtype, card):
    compiled(f"{card}:{dtype}:{family}")
