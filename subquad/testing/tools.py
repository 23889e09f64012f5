"""The three tolerances, and what the contract's tests are made of: inputs, gradients, block sizes, memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from subquad.attention import Attention
from subquad.ops.chunks import block_sizes as block_sizes

LINEAR_GROWTH = 2.2
"""Twice the tokens may cost at most this much more, where the cost is said to be linear."""
LOW_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


def assert_exact(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert the same numbers, to the last bit (0.0 and -0.0 are one number, and NaN equals NaN)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def assert_same_maths(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert the same numbers in float64, but for the order of sums."""
    if actual.dtype != torch.float64 or expected.dtype != torch.float64:
        raise TypeError(f"assert_same_maths compares float64, got {actual.dtype} and {expected.dtype}")
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def assert_in_budget(actual: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """Assert an error of at most twice the plain form's in the same dtype, plus one rounding of the largest entry."""
    exact = exact.double()
    band = torch.finfo(dtype).eps * exact.abs().max().item() if exact.numel() else 0.0
    error, plain_error = ((x.double() - exact).abs().max().item() if x.numel() else 0.0 for x in (actual, plain))
    budget = 2 * plain_error + band
    if not error <= budget < float("inf"):  # a plain form that is not finite proves nothing
        raise AssertionError(f"{what}: error {error:.3e} exceeds {budget:.3e} (plain form {plain_error:.3e}, {dtype})")


def largest_allocation(f: Callable[[], object]) -> int:
    """Bytes of the largest tensor that `f` makes, inside custom operations too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        f()
    return max(event.self_cpu_memory_usage for event in record.events())


def mask_with(lengths: list[tuple[int, int, int]]) -> Tensor:
    """A mask whose row b has padding, then real tokens, then padding: `(left, real, right)`; row 0 has a hole too."""
    rows = [[False] * left + [True] * real + [False] * right for left, real, right in lengths]
    mask_BT = torch.tensor(rows)
    mask_BT[0, len(rows[0]) // 2] = False
    return mask_BT


def in_pieces(layer: Attention, x_BTD: Tensor, cuts: list[int]) -> Tensor:
    """The outputs of the pieces between the cuts, the state carried from one to the next."""
    state, outputs = None, []
    for start, stop in zip([0, *cuts], [*cuts, x_BTD.shape[1]], strict=True):
        y, state = layer(x_BTD[:, start:stop], state)[:2]
        outputs.append(y)
    return torch.cat(outputs, 1)


def sharpened(layer: Attention, factor: float) -> Attention:
    """The layer with queries and keys made so large that logits reach about `factor`."""
    with torch.no_grad():
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and any(word in name for word in ("query", "key")):
                module.weight.mul_(factor**0.5 if layer.rotates else factor)
    return layer


def with_gradients(layer: Attention, f: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """The output of `f`, and the gradients of a fixed random projection of it to x and to every parameter."""
    leaf = x.clone().requires_grad_()
    parameters = dict(layer.named_parameters())
    y = f(leaf)
    weight = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    gradients = torch.autograd.grad((y * weight).sum(), [leaf, *parameters.values()], materialize_grads=True)
    return {"output": y.detach(), **{f"gradient of {n}": g for n, g in zip(["x", *parameters], gradients, strict=True)}}
