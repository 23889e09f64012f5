"""What the tests of the engines share: random inputs, gradients, and how large a tensor was ever allocated."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from subquad import testing


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def _differentiated(f: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = list(f(*leaves))
    total = sum(
        # An lse of -inf is a constant; it stays out of the projection.
        (y.masked_fill(torch.isneginf(y), 0.0) * _random(*y.shape, seed=100 + n, dtype=y.dtype)).sum()
        for n, y in enumerate(outputs)
    )
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    return [*(y.detach() for y in outputs), *gradients]


@pytest.fixture(scope="session")
def random():
    """`random(*shape, seed=0, dtype=torch.float64)`: normal, the same at every call."""
    return _random


@pytest.fixture(scope="session")
def differentiated():
    """`differentiated(f, inputs)`: the outputs of f, then the gradients of a fixed random projection of them."""
    return _differentiated


@pytest.fixture(scope="session")
def largest_allocation():
    """`largest_allocation(f)`: the bytes of the largest tensor that f makes, inside custom operations too."""
    return testing.largest_allocation
