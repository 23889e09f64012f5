"""Shared by the engines' tests: random tensors, gradients, comparisons of all results, and parameters mostly slow."""

import os
from itertools import product

import pytest
import torch

from subquad.testing.tools import assert_exact, assert_in_budget, assert_same_maths

ALONE = ("test_schema", "test_faketensor")
"""Torch's rules for an operator that nothing is differentiated through."""


def normal(*shape, seed=0, dtype=torch.float64, device="cpu"):
    """Return random numbers, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)


def differentiated(f, inputs):
    """Return the outputs of `f`, then the gradients of a fixed random projection of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = list(f(*leaves))
    total = sum(
        # An lse of -inf is a constant; it stays out of the projection.
        (y.masked_fill(torch.isneginf(y), 0.0) * normal(*y.shape, seed=100 + n, dtype=y.dtype, device=y.device)).sum()
        for n, y in enumerate(outputs)
    )
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    return [*(y.detach() for y in outputs), *gradients]


def assert_all_exact(actual, expected, what=""):
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_exact(a, e, f"result {n}, {what}")


def assert_all_same_maths(actual, expected, what=""):
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_same_maths(a, e, f"result {n}, {what}")


def assert_all_in_budget(actual, plain, exact, dtype, what=""):
    for n, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True)):
        assert_in_budget(a, p, e, dtype, f"result {n}, {what}")


def thinned(every, **axes):
    """Parametrize with all combinations; all but one in `every` are slow, and each value is in a fast one.

    On a GPU, where kernels are not interpreted, none is slow.
    """
    parameters = []
    for places in product(*(range(len(values)) for values in axes.values())):
        values = [list(values)[n] for n, values in zip(places, axes.values(), strict=True)]
        slow = os.environ.get("TRITON_INTERPRET") == "1" and sum(places) % every
        name = "-".join(str(value).removeprefix("torch.") for value in values)
        parameters.append(pytest.param(*values, marks=pytest.mark.slow if slow else (), id=name))
    return pytest.mark.parametrize(tuple(axes), parameters)
