"""Law 11 on the backend of GPUs: the Triton kernels, in their interpreter on a CPU."""

import pytest
import torch

from subquad.attention import build, names
from subquad.ops.backends import use_backend
from subquad.testing import LOW_PRECISION, assert_in_budget, with_gradients

# Patterns of gathered keys and unions have no kernel; their mechanisms run on the default backend.
WITHOUT_KERNELS = {"bigbird", "dilated", "strided"}
# Few global tokens, causal, see few keys: gradients near zero leave no budget.
OPTIONS = {"longformer": {"num_global": 8, "width": 8}, "window": {"width": 8}, "llp": {"segment": 8}}
TOKENS = 21


def layer_and_inputs(name, dtype):
    torch.manual_seed(0)
    layer = build(name, dim=16, num_heads=2, **OPTIONS.get(name, {})).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    return layer, torch.randn(2, TOKENS, 16, generator=generator, dtype=torch.float64).to(dtype)


# The kernels treat the two halves alike.
HALVES = [pytest.param(x, marks=pytest.mark.slow) if x == torch.float16 else x for x in LOW_PRECISION]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", names())
def test_the_kernels_stay_in_budget(name, dtype):
    layer, x = layer_and_inputs(name, dtype)
    exact_layer = layer_and_inputs(name, dtype)[0].double()

    def forward(x):
        return layer(x)[0]

    with use_backend("triton"):
        if name in WITHOUT_KERNELS:
            with pytest.raises(ValueError, match="backend 'triton'"):
                forward(x)
            return
        actual = with_gradients(layer, forward, x)
    exact = with_gradients(exact_layer, exact_layer.definition, x.double())
    plain = with_gradients(layer, layer.definition, x)
    for what in exact:
        assert_in_budget(actual[what], plain[what], exact[what], dtype, f"{what} of {name}")


@pytest.mark.parametrize("name", sorted(set(names()) - WITHOUT_KERNELS))
def test_the_kernels_stay_in_budget_under_autocast(name):
    layer, x = layer_and_inputs(name, torch.float32)
    exact_layer = layer_and_inputs(name, torch.float32)[0].double()

    def forward(f):
        return torch.autocast("cpu", torch.bfloat16)(lambda x: f(x).float())

    with use_backend("triton"):
        actual = with_gradients(layer, forward(lambda x: layer(x)[0]), x)
    exact = with_gradients(exact_layer, exact_layer.definition, x.double())
    plain = with_gradients(layer, forward(layer.definition), x)
    for what in exact:
        assert_in_budget(actual[what], plain[what], exact[what], torch.bfloat16, f"{what} of {name}")
