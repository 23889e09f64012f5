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
families = pytest.mark.parametrize("family", ["gated_scan", "running_softmax", "block_attention"])


def compiled(family, which):
    script = Path(__file__).with_name("sm90.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, family, which], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_fits(report):
    for kernel in report["kernels"]:
        assert kernel["shared"] <= SHARED, kernel
        assert kernel["spills"] <= SPILLS, kernel


@families
def test_kernels_fit_and_compile_once_whatever_the_length(family):
    report = compiled(family, "quick")
    assert_fits(report)
    assert len(report["kernels"]) > 2
    assert len(report["compiled again"]) == 20
    again = {tokens: count for tokens, count in report["compiled again"].items() if count}
    assert not again, f"how many kernels were compiled again, by length: {again}"


@pytest.mark.slow
@families
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_of_all_sizes_fit(family, dtype):
    assert_fits(compiled(family, dtype))
