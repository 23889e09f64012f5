"""What an import loads, seen from a fresh process."""

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

from subquad import attention


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_loads_nothing_heavy():
    loaded = run("import sys, subquad; print(*sys.modules)").split()
    assert {"torch", "numpy", "triton", "transformers", "datasets", "matplotlib"}.isdisjoint(loaded)


def test_attention_loads_no_mechanism_before_it_is_asked_for():
    loaded, used, refused = run("""
        import sys
        from subquad import attention
        names = ("attention.latte", "attention.linear", "ops.loss", "ops._sequential.scan", "hf", "testing")
        loaded = lambda: [name for name in names if f"subquad.{name}" in sys.modules]
        print(loaded(), [name for name in ("yaml", "rich", "PIL", "tokenizers") if name in sys.modules])
        attention.Latte
        print(loaded())
        try:
            type("Mine", (attention.Attention,), {"name": "linear", "__module__": "mine.linear"})
        except TypeError as error:
            print(error)
    """).splitlines()
    assert loaded == "[] []"
    assert used == "['attention.latte']"
    assert refused.startswith("attention 'linear' is already subquad.attention.linear.Linear")


def test_mechanisms_and_configurations_load_and_need_nothing_heavy_but_torch():
    loaded, ran = run("""
        import sys
        import torch
        before = set(sys.modules)
        import subquad.adaptation.config, subquad.data.config
        from subquad import attention
        from subquad.testing import assert_exact, tools
        optional = {"triton", "transformers", "datasets", "matplotlib", "hypothesis"}
        print(optional & (set(sys.modules) - before))
        sys.modules.update(dict.fromkeys(optional))  # None: an import fails
        for name in attention.names():
            layer = attention.build(name, dim=16, num_heads=2)
            y, state = layer(torch.randn(2, 5, 16))[:2]
            assert y.shape == (2, 5, 16) and y.isfinite().all(), name
            if layer.causal:
                layer(torch.randn(2, 3, 16), state)
        print(attention.names())
    """).splitlines()
    assert loaded == "set()"
    assert ran == str(attention.names())


def test_the_contract_of_independence_is_for_every_mechanism():
    settings = tomllib.loads(Path(__file__).resolve().parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = [c for c in contracts if c["name"].startswith("mechanisms")]
    assert contract["modules"] == ["subquad.attention.*"]
    shared = {line.removeprefix("subquad.attention.* -> subquad.attention.") for line in contract["ignore_imports"]}
    assert shared.isdisjoint(attention.names())
    modules = {file.stem for file in Path(attention.__file__).parent.glob("*.py")} - {"__init__"}
    assert modules | {"memories.*"} == shared | set(attention.names())
