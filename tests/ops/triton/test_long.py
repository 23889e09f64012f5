"""The kernels on a GPU over many waves of programs, with offsets that 32 bits do not hold."""

import pytest
import torch

from subquad.ops import block_attention, gated_scan, running_softmax
from subquad.ops.patterns import Segments
from subquad.testing.tools import assert_in_budget

HEADS, TOKENS, CHANNELS = 520, 1 << 16, 64
ROOM = 60
"""GiB of memory that a test takes at most."""
ENGINES = {
    "llp": lambda q, k, v, backend: block_attention(q, k, v, Segments(size=256), backend=backend),
    "linear": lambda q, k, v, backend: gated_scan(q, k, v, None, normalise=True, backend=backend).out,
    "latte": lambda q, k, v, backend: running_softmax(q / CHANNELS, k, v, backend=backend).out,
}


def results(engine, inputs, backend="triton"):
    """Return the outputs, and the gradients of the sum of their products with the first input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = ENGINES[engine](*leaves, backend)
    return out, *torch.autograd.grad(out, leaves, inputs[0])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < ROOM << 30, reason=f"needs {ROOM} GiB on a GPU"
)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_last_head_of_many_is_that_head_alone(engine):
    assert HEADS * TOKENS * CHANNELS > 1 << 31
    torch.manual_seed(0)
    inputs = [torch.rand(1, HEADS, TOKENS, CHANNELS, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    last = [x[:, -1:].clone() for x in inputs]
    exact = results(engine, [x.double() for x in last], "torch")
    for many, alone, e in zip(results(engine, inputs), results(engine, last), exact, strict=True):
        assert_in_budget(many[:, -1:], alone, e, torch.bfloat16, engine)
