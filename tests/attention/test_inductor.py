"""Law 12 with inductor for what `make test` leaves out, where every mechanism and variant compiles with `aot_eager`.

There inductor compiles `full`, `window`, `llp`, `linear` and `latte`: plain attention, a band, blocks, and both scans.
"""

import importlib.util
import inspect
from pathlib import Path

import pytest

from subquad.testing import AttentionContract


def variants():
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"variants_of_{path.stem}", path)
        if path == Path(__file__) or "with_inductor" not in path.read_text(encoding="utf-8"):
            continue
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, AttentionContract)]
        yield from (c for c in classes if not c.with_inductor)


@pytest.mark.slow
@pytest.mark.parametrize("contract", list(variants()), ids=lambda c: c.__name__)
def test_a_variant_compiles_with_inductor(contract, monkeypatch):
    monkeypatch.setattr(contract, "with_inductor", True)
    contract().test_law_12_compiles_whole_with_inductor()
