"""Other libraries as oracles (`make peers`): fixtures that import them, and a table of the differences found."""

import importlib
import inspect
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from subquad.testing import assert_same_maths


def pytest_ignore_collect(collection_path, config):
    """Only `make peers` reads these files: they import other libraries, and one registers a pattern of its own."""
    return None if config.option.markexpr == "peers" else True


def pytest_collection_modifyitems(items):
    for item in items:  # of all folders
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.peers)


SCANS = {"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "mamba2_chunk_scan"}
SCANS |= {"chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"}
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
def agree_in_gradients(agree):
    """As `agree`, of two functions of the same tensors: what they return, and its gradients for all of them."""

    def check(distribution, what, ours, theirs, inputs):
        outputs, gradients = [], []
        for function in (ours, theirs):
            leaves = [x.clone().requires_grad_() for x in inputs]
            outputs.append(function(*leaves))
            weights = torch.arange(outputs[-1].numel(), dtype=torch.float64).cos().view_as(outputs[-1])
            gradients.append(torch.autograd.grad((outputs[-1] * weights).sum(), leaves))
        agree(distribution, what, *outputs)
        for pair in zip(*gradients, strict=True):
            agree(distribution, f"{what}: gradients", *pair)

    return check


class InDouble(TorchFunctionMode):
    """Within it, what asks for float32, or for no dtype, gets float64: the maths of code that rounds to float32."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widened(x):
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widened, args), **{name: widened(x) for name, x in (kwargs or {}).items()})


@pytest.fixture(scope="session")
def in_double():
    """`with in_double():` the code of another library computes in float64, whatever dtype it asks for."""
    return InDouble


@pytest.fixture
def torch_forms(peer, monkeypatch):
    """`torch_forms("qwen3_next")`: that module of transformers, with its own scans, which run on a CPU.

    transformers puts flash-linear-attention's kernels for GPUs in their place, wherever that is installed.
    """

    def unwrap(name):
        module = peer(f"transformers.models.{name}.modeling_{name}")
        for scan in SCANS & set(vars(module)):
            monkeypatch.setattr(module, scan, inspect.unwrap(getattr(module, scan)))
        return module

    return unwrap


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
