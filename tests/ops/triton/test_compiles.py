"""The kernels compile for an H100 or H200 and fit on it; no length of a sequence ever compiles one again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 227 * 1024
"""Bytes of shared memory that a block may have."""
SPILLS = 1024
"""Bytes a thread that registers may spill."""


def compiled(which):
    """Return the reports of all families of kernels, which fit on the device."""
    script = Path(__file__).with_name("sm90.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, which], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert reports.keys() == {"gated_scan", "running_softmax", "block_attention"}
    for family, report in reports.items():
        assert len(report["kernels"]) > 2, family
        for kernel in report["kernels"]:
            assert kernel["shared"] <= SHARED, kernel
            assert kernel["spills"] <= SPILLS, kernel
    return reports


def test_kernels_fit_and_compile_once_whatever_the_length():
    for family, report in compiled("quick").items():
        assert len(report["compiled again"]) == 20
        again = {tokens: count for tokens, count in report["compiled again"].items() if count}
        assert not again, f"how many kernels of {family} were compiled again, by length: {again}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_of_all_sizes_fit(dtype):
    compiled(dtype)
