"""What the kernels' tests share. They run on a GPU where there is one, else in Triton's interpreter.

No package is needed but torch, triton, numpy and pytest with
`pytest -c /dev/null --rootdir . -m "not slow" --confcutdir tests/ops/triton tests/ops/triton`.
"""

import os
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

# Before triton is imported: kernels are made for the interpreter, or not, when they are decorated.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes longer than a test should")
    config.addinivalue_line("markers", "thinned(every, **axes): all combinations; interpreted, most of them are slow")


def pytest_generate_tests(metafunc):
    """Of the combinations of `thinned` one in `every` is not slow, so that each value of each axis is among them.

    In Triton's interpreter all together take minutes. On a GPU none is slow.
    """
    for marker in metafunc.definition.iter_markers("thinned"):
        (every,), axes = marker.args, marker.kwargs
        parameters = []
        for places in product(*(range(len(values)) for values in axes.values())):
            values = [list(values)[n] for n, values in zip(places, axes.values(), strict=True)]
            long = DEVICE == "cpu" and sum(places) % every
            name = "-".join(str(value).removeprefix("torch.") for value in values)
            parameters.append(pytest.param(*values, marks=pytest.mark.slow if long else (), id=name))
        metafunc.parametrize(tuple(axes), parameters)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(DEVICE, dtype)


def _differentiated(f: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = list(f(*leaves))
    total = sum((y * _random(*y.shape, seed=100 + n, dtype=y.dtype)).sum() for n, y in enumerate(outputs))
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    return [*(y.detach() for y in outputs), *gradients]


@pytest.fixture(scope="session")
def device():
    """Where the kernels run: "cuda" or, interpreted, "cpu"."""
    return DEVICE


@pytest.fixture(scope="session")
def random():
    """`random(*shape, seed=0, dtype=torch.float64)`: normal, the same at every call, on `device`."""
    return _random


@pytest.fixture(scope="session")
def differentiated():
    """`differentiated(f, inputs)`: the outputs of f, then the gradients of a fixed random projection of them."""
    return _differentiated
