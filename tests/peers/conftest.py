"""Other libraries as oracles (`make peers`): fixtures that import them, and a table of the differences found."""

import importlib
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from subquad.testing import assert_same_maths


def pytest_ignore_collect(collection_path, config):
    """Only `make peers` reads these files: they import other libraries, and one registers a pattern of its own."""
    return None if config.option.markexpr == "peers" else True


def pytest_collection_modifyitems(items):
    for item in items:  # of all folders
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.peers)


_found: dict[tuple[str, str], float] = {}


def _peer(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of their own
        return importlib.import_module(name)


@pytest.fixture(scope="session")
def peer():
    """`peer("module")`: a module of another library, which `make peers` installs."""
    return _peer


@pytest.fixture(scope="session")
def note():
    """`note("distribution", "what was compared", difference)`: a line of the table printed at the end."""

    def add(distribution, what, difference):
        key = f"{distribution} {version(distribution)}", what
        _found[key] = max(_found.get(key, 0.0), float(difference.detach()))

    return add


@pytest.fixture(scope="session")
def agree(note):
    """`agree("distribution", "what", ours, theirs)`: assert equality in float64, and note the difference."""

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
    """`double(make)`: `make()` in float64 and eval mode, with the same random weights at every call."""

    def convert(make):
        torch.manual_seed(0)
        return make().double().eval()

    return convert


@pytest.fixture(scope="session")
def exact_rotary():
    """`exact_rotary(module)`: the module with its float32 rotary frequencies recomputed in float64."""

    def repair(module):
        for part in module.modules():
            if "inv_freq" in dict(part.named_buffers(recurse=False)):
                half = part.inv_freq.shape[0]
                part.inv_freq = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        return module

    return repair


def pytest_terminal_summary(terminalreporter):
    """Print the largest differences."""
    if _found:
        terminalreporter.section("largest differences")
        for (library, what), difference in sorted(_found.items()):
            terminalreporter.write_line(f"{library:45} {what:60} {difference:.1e}")
