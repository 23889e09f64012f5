"""Other libraries as oracles: how they are imported, and the differences found, printed at the end (`make peers`)."""

import importlib
import warnings
from importlib.metadata import version

import pytest
import torch

from subquad.testing import assert_same_maths


def pytest_ignore_collect(collection_path, config):
    """Only `make peers` reads these files: they import other libraries, and register a pattern of their own."""
    return None if config.option.markexpr == "peers" else True


_found: dict[tuple[str, str], float] = {}


def _peer(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say of their own age
        return importlib.import_module(name)


@pytest.fixture(scope="session")
def peer():
    """`peer("module")`: the module of another library. It must be installed: `make peers` does that."""
    return _peer


@pytest.fixture(scope="session")
def note():
    """`note("distribution", "what was compared", difference)`: a line of the table that the run ends with."""

    def add(distribution, what, difference):
        key = f"{distribution} {version(distribution)}", what
        _found[key] = max(_found.get(key, 0.0), float(difference.detach()))

    return add


@pytest.fixture(scope="session")
def agree(note):
    """`agree("distribution", "what", ours, theirs)`: the same number in float64, and noted."""

    def check(distribution, what, ours, theirs):
        note(distribution, what, (ours.detach() - theirs.detach()).abs().max())
        assert_same_maths(ours, theirs, f"{distribution}: {what}")

    return check


@pytest.fixture(scope="session")
def random():
    """`random(*shape, seed=0)`: normal float64, the same at every call."""
    return lambda *shape, seed=0: torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def double():
    """`double(make)`: what `make` makes, with the same random weights at every call, in float64 and eval mode."""

    def convert(make):
        torch.manual_seed(0)
        return make().double().eval()

    return convert


@pytest.fixture(scope="session")
def exact_rotary():
    """`exact_rotary(module)`: its rotary frequencies, kept in float32, computed anew in float64."""

    def repair(module):
        for part in module.modules():
            if "inv_freq" in dict(part.named_buffers(recurse=False)):
                half = part.inv_freq.shape[0]
                part.inv_freq = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        return module

    return repair


def pytest_terminal_summary(terminalreporter):
    """The table of what was compared."""
    if _found:
        terminalreporter.section("largest differences")
        for (library, what), difference in sorted(_found.items()):
            terminalreporter.write_line(f"{library:45} {what:60} {difference:.1e}")
