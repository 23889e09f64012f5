"""The law of precision on the backend of GPUs: the Triton kernels, in their interpreter on a CPU."""

import pytest
import torch

from subquad.attention import build, names
from subquad.ops.backends import use_backend
from subquad.testing import assert_in_budget, with_gradients

# Gathered keys, far keys folded, and decays of the values have no kernel.
WITHOUT_KERNELS = {"bigbird", "dilated", "gated_slots", "logsparse", "strided"}
# With few global tokens, gradients are near zero and leave no budget.
OPTIONS = {"longformer": {"num_global": 8, "width": 8}, "window": {"width": 8}, "llp": {"segment": 8}}
JUDGED_TOGETHER = {"gated_delta_net": 6, "kda": 6, "mamba2": 2}
"""Inputs whose errors are judged together in float32: of one, the plain form's few gradients of a head may be lucky."""
ENGINES = ["full", "latte", "linear"]
"""Block attention, running softmax and scan: the others give the kernels no other roundings in half precision."""
QUICK = [(name, dtype) for name in ENGINES for dtype in ("float32", "bfloat16", "autocast")]
# Delta scan, gated mean, gathered keys, a window beside latents.
QUICK += [(name, "float32") for name in ("delta_net", "elita", "longformer", "latte_macchiato")]
DTYPES = ("float32", "bfloat16", "float16", "autocast")
EVERY = [(name, dtype) for name in sorted(set(names()) - WITHOUT_KERNELS) for dtype in DTYPES]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in EVERY]


def layer_of(name, dtype):
    torch.manual_seed(0)
    return build(name, dim=16, num_heads=2, **OPTIONS.get(name, {})).to(dtype).eval()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_kernels_stay_in_budget(name, dtype):
    autocast = dtype == "autocast"
    budget, dtype = (torch.bfloat16, torch.float32) if autocast else (getattr(torch, dtype),) * 2
    layer, exact_layer = layer_of(name, dtype), layer_of(name, dtype).double()

    def cast(f):
        return torch.autocast("cpu", torch.bfloat16)(lambda x: f(x).float()) if autocast else f

    found = []
    for n in range(JUDGED_TOGETHER.get(name, 1)):
        x = torch.randn(1, 21, 16, generator=torch.Generator().manual_seed(1 + n), dtype=torch.float64).to(dtype)
        with use_backend("triton"):
            actual = with_gradients(layer, cast(lambda x: layer(x)[0]), x)
        plain = with_gradients(layer, cast(layer.definition), x)
        exact = with_gradients(exact_layer, exact_layer.definition, x.double())
        found.append((actual, plain, exact))
    for what in found[0][0]:
        actual, plain, exact = (torch.stack([one[what] for one in forms]) for forms in zip(*found, strict=True))
        assert_in_budget(actual, plain, exact, budget, f"{what} of {name}")
