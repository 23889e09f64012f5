"""What an import loads, seen from a fresh process."""

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from subquad import attention


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = {"triton", "transformers", "datasets", "matplotlib"}


@pytest.mark.parametrize(("first", "then", "heavy"), [
    ("sys", "subquad", {"torch", "numpy", *HEAVY}),
    ("sys", "subquad.adaptation.config, subquad.data.config", HEAVY),
    ("torch", "subquad.attention", HEAVY),
])  # fmt: skip
def test_nothing_heavy_is_loaded(first, then, heavy):
    code = f"import sys, {first}; before = set(sys.modules); import {then}; print(*set(sys.modules) - before)"
    assert heavy.isdisjoint(run(code).split())


def test_every_mechanism_runs_where_triton_and_transformers_cannot_be_imported():
    ran = run("""
        import sys
        sys.modules["triton"] = sys.modules["transformers"] = None
        import torch
        from subquad import attention
        for name in attention.names():
            layer = attention.build(name, dim=16, num_heads=2)
            y, state = layer(torch.randn(2, 5, 16))[:2]
            assert y.shape == (2, 5, 16) and y.isfinite().all(), name
            if layer.causal:
                layer(torch.randn(2, 3, 16), state)
            print(name)
    """)
    assert {"full", "window", "llp", "linear", "latte"} <= set(ran.split())


def test_the_contract_of_independence_is_for_every_mechanism():
    settings = tomllib.loads(Path(__file__).resolve().parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = [c for c in contracts if c["name"].startswith("mechanisms")]
    assert contract["modules"] == ["subquad.attention.*"]
    shared = {line.removeprefix("subquad.attention.* -> subquad.attention.") for line in contract["ignore_imports"]}
    assert shared.isdisjoint(attention.names())
    modules = {file.stem for file in Path(attention.__file__).parent.glob("*.py")} - {"__init__"}
    assert modules == shared | set(attention.names())
