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


FAMILIES = ("gated_scan", "running_softmax", "gated_mean", "block_attention")


def compiled(which, *families):
    """Return the reports of families of kernels, which fit on the device."""
    script = Path(__file__).with_name("sm90.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, which, *families], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    for family in families:
        assert len(reports[family]["kernels"]) > 2, family
        for kernel in reports[family]["kernels"]:
            assert kernel["shared"] <= SHARED, kernel
            assert kernel["spills"] <= SPILLS, kernel
    return reports


def test_kernels_fit_and_compile_once_whatever_the_length():
    for family, report in compiled("quick", *FAMILIES).items():
        assert len(report["compiled again"]) == 20
        again = {tokens: count for tokens, count in report["compiled again"].items() if count}
        assert not again, f"how many kernels of {family} were compiled again, by length: {again}"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_of_all_sizes_fit(family, dtype):
    compiled(dtype, family)
