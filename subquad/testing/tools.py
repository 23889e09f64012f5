"""The three tolerances, and the parts of the contract's tests: masks, pieces, gradients, allocations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from subquad.attention import Attention
from subquad.ops.chunks import block_sizes as block_sizes
from subquad.state import State

Compare = Callable[[Tensor, Tensor, str], None]
LINEAR_GROWTH = 2.2
"""Largest ratio of the costs at 2T and T tokens that counts as linear."""
# If T tokens cost a + b T + c T log2 T, those after 2T up to 4T cost 2 + 2 c / (b + c (2 + log2 T)) times as much as
# those after T up to 2T. From T = 1024 on that is 2 for linear costs, and 2.02 to 2.17 for T log T unless b > 88 c.
# Quadratic costs come near 4. Totals at two lengths would not tell: those of T log T are 2.18 times as much, those of
# a window of 512 tokens 2.14 times, since its first tokens see fewer.
GROWTH: dict[str, tuple[float, float]] = {"linear": (0.0, 2.02), "T log T": (2.02, 2.25), "quadratic": (3.0, 4.04)}
"""Least and largest ratio of two costs for each order: of tokens 2049 to 4096, and of tokens 1025 to 2048."""
LOW_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose error has a budget, for `assert_in_budget`; float64 is what they are compared with."""


def assert_exact(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert that both are the same to the last bit (0.0 equals -0.0, and NaN equals NaN)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def assert_same_maths(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert that both float64 tensors agree up to the order of sums (1e-9, relative or absolute)."""
    if actual.dtype != torch.float64 or expected.dtype != torch.float64:
        raise TypeError(f"assert_same_maths compares float64, got {actual.dtype} and {expected.dtype}")
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def assert_same_state(actual: State, expected: State, compare: Compare, what: str) -> None:
    """Assert that both states have the same entries: numbers and integers exactly, other tensors by `compare`."""
    assert actual.config_hash == expected.config_hash, f"{what}: of another configuration"
    names = sorted(actual.entries), sorted(expected.entries)
    assert names[0] == names[1], f"{what}: entries {names[0]}, expected {names[1]}"
    for name, entry in expected.entries.items():
        own, where = actual.entries[name], f"{what}, entry {name!r}"
        if isinstance(entry, State):
            assert_same_state(actual.child(name), entry, compare, where)
        elif isinstance(entry, Tensor) and entry.is_floating_point():
            compare(actual.tensor(name), entry, where)
        else:
            assert_exact(torch.as_tensor(own), torch.as_tensor(entry), where)


def assert_in_budget(actual: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """Assert that `actual` errs at most twice as much as `plain`, plus one rounding in `dtype` of the largest entry.

    float32 on a GPU has five: compiled kernels approximate exp, log and division to 2 units in the last place.
    """
    exact = exact.double()
    roundings = 5 if dtype == torch.float32 and actual.is_cuda else 1
    band = roundings * torch.finfo(dtype).eps * exact.abs().max().item() if exact.numel() else 0.0
    error, plain_error = ((x.double() - exact).abs().max().item() if x.numel() else 0.0 for x in (actual, plain))
    budget = 2 * plain_error + band
    if not error <= budget < float("inf"):  # also fails if the plain form is not finite: it proves nothing
        raise AssertionError(f"{what}: error {error:.3e} exceeds {budget:.3e} (plain form {plain_error:.3e}, {dtype})")


def largest_allocation(f: Callable[[], object]) -> int:
    """Return the bytes of the largest CPU tensor that `f` allocates, inside custom operations too."""
    # `acc_events`: torch 2.11 warns of cycles without it, of which there is one.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        f()
    # The raw events: `record.events()` builds a tree of all calls, which takes longer than `f`.
    assert record.profiler is not None
    raw = record.profiler.kineto_results.events()
    return max(event.nbytes() for event in raw if event.name() == "[memory]")


def mask_with(lengths: list[tuple[int, int, int]]) -> Tensor:
    """Return a mask with `(left, real, right)` slots in each row: padding, tokens, padding. Row 0 also has a hole."""
    rows = [[False] * left + [True] * real + [False] * right for left, real, right in lengths]
    mask_BT = torch.tensor(rows)
    mask_BT[0, len(rows[0]) // 2] = False
    return mask_BT


def in_pieces(layer: Attention, x_BTD: Tensor, cuts: list[int]) -> Tensor:
    """Return the outputs of the pieces between `cuts`, with the state carried from piece to piece."""
    state, outputs = None, []
    for start, stop in zip([0, *cuts], [*cuts, x_BTD.shape[1]], strict=True):
        y, state = layer(x_BTD[:, start:stop], state)[:2]
        outputs.append(y)
    return torch.cat(outputs, 1)


def sharpened(layer: Attention, factor: float) -> Attention:
    """Scale the query and key projections of `layer` in place, so that logits reach about `factor`."""
    with torch.no_grad():
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and any(word in name for word in ("query", "key")):
                module.weight.mul_(factor**0.5 if layer.rotates else factor)
    return layer


def with_gradients(
    layer: Attention, f: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None = None
) -> dict[str, Tensor]:
    """Return `f(x)` and the gradients of its sum weighted by `weight` (None: random) by x and every parameter."""
    leaf = x.clone().requires_grad_()
    parameters = dict(layer.named_parameters())
    y = f(leaf)
    if weight is None:
        weight = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    gradients = torch.autograd.grad((y * weight).sum(), [leaf, *parameters.values()], materialize_grads=True)
    return {"output": y.detach(), **{f"gradient of {n}": g for n, g in zip(["x", *parameters], gradients, strict=True)}}
