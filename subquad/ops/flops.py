"""Count floating-point operations of the engines: two per multiply-add, none for exponentials and element-wise work.

Shape letters: N batch times heads, T tokens, K key channels, V value channels, L latents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from subquad.ops._sequential.attend import key_chunks
from subquad.ops._torch import delta, scan, softmax
from subquad.ops._torch.tiles import Group, tile_groups
from subquad.ops.backends import HAS_TRITON
from subquad.ops.patterns import Pattern
from subquad.ops.slots import Slots


def attention_flops(groups: tuple[Group, ...], key_channels: int, value_channels: int) -> int:
    """Count one head's scores and their product with the values, masked entries included."""
    return sum(2 * g.rows * g.keys * g.count * (key_channels + value_channels) for g in groups)


def gated_scan_flops(
    T: int, K: int, V: int, *, groups: int = 1, heads: int = 1, chunk: int = scan.CHUNK, normalise: bool = False
) -> int:
    """Count at most one decay a head: scores of groups in chunks, their product with values, state read and written."""
    total = 0
    for start in range(0, T, chunk):
        C = min(chunk, T - start)
        total += groups * 2 * C * C * K + heads * (2 * C * C * V + 2 * C * K * (V + normalise) + 2 * C * K * V)
    return total


FORWARD, BACKWARD = (4, 3, 6), (12, 10, 14)
"""Products of a chunk of the delta scan: C C K of a group, C C V and C K V of a head; solving a system is one C C V."""


def delta_scan_flops(
    T: int,
    K: int,
    V: int,
    *,
    groups: int = 1,
    heads: int = 1,
    chunk: int = delta.CHUNK,
    products: tuple[int, int, int] = FORWARD,
) -> int:
    """Count at most one decay a head: scores of queries and keys with keys, a triangular system, products with values.

    The backward pass (`BACKWARD`) includes what it computes again.
    """
    sizes = [min(chunk, T - start) for start in range(0, T, chunk)]
    keys, values, states = products
    return sum(groups * keys * C * C * K + heads * (values * C * C * V + states * C * K * V) for C in sizes)


def running_softmax_flops(T: int, L: int, V: int, *, chunk: int = softmax.CHUNK) -> int:
    """Count a head: scores in chunks, products with values, the state; with one latent running sums replace scores."""
    return 4 * T * V if L == 1 else gated_scan_flops(T, L, V, chunk=chunk)


@functools.cache
def register() -> None:
    """Register our operators and the fused CPU attention with torch's FlopCounterMode, which counts them as zero."""
    from torch.utils import flop_counter  # it loads triton

    from subquad.ops._sequential import scan as _sequential  # noqa: F401 defines the operators

    def sdpa(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return int(flop_counter.sdpa_flop_count(q, k, v))

    def sdpa_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return int(flop_counter.sdpa_backward_flop_count(grad, q, k, v))

    cpu = "_scaled_dot_product_flash_attention_for_cpu"
    formulas = {getattr(torch.ops.subquad, name): formula for name, formula in FORMULAS.items()}
    if getattr(torch.ops.aten, cpu) not in flop_counter.flop_registry:
        formulas |= {getattr(torch.ops.aten, cpu): sdpa, getattr(torch.ops.aten, f"{cpu}_backward"): sdpa_backward}
    if HAS_TRITON:
        from subquad.ops._triton import attend as _attend  # noqa: F401 defines the operators
        from subquad.ops._triton import delta as _delta  # noqa: F401
        from subquad.ops._triton import gated_mean as _gated_mean  # noqa: F401
        from subquad.ops._triton import scan as _scan  # noqa: F401
        from subquad.ops._triton import softmax as _softmax  # noqa: F401

        formulas |= {getattr(torch.ops.subquad, name): formula for name, formula in KERNELS.items()}
    for op, formula in formulas.items():
        flop_counter.register_flop_formula([op])(formula)


def _attention(q: Any, k: Any, v: Any, pattern: str, scale: float, *slots: Any, **_: Any) -> int:
    groups = tile_groups(Pattern.from_key(pattern), Slots(*slots).starts, q[2], k[2])
    return int(q[0] * q[1] * attention_flops(groups, q[3], v[3]))


def _sequential_attention(*shapes: Any, products: tuple[int, int] = (1, 1), **_: Any) -> int:
    """Count `products` products over key channels and as many over value channels, for each score that is computed."""
    q, k, v, pattern, _scale, _seed, _dropout_p, query_chunk, key_chunk, *slots = shapes
    chunks = key_chunks(Pattern.from_key(pattern), q[2], k[2], Slots(*slots).starts, query_chunk, key_chunk)
    scores = sum((rows.stop - rows.start) * (c.stop - c.start) for rows, keys in chunks for c in keys)
    return int(2 * q[0] * q[1] * scores * (products[0] * q[3] + products[1] * v[3]))


def _sequential_scan(q: Any, i: Any, v: Any, beta: Any = None, *_: Any, **__: Any) -> int:
    """Count a write and a read of the state at every token, and with beta another read."""
    return int((4 if beta is None else 6) * v[0] * q[1] * q[2] * v[2])


def _flat(shape: Any) -> tuple[int, int, int]:
    """Return `[N, T, L]` of `[N, T, L]` or `[B, H, T, L]`."""
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def _gated(q: Any, v: Any, chunk: int = scan.CHUNK, normalise: bool = False) -> int:
    (groups, T, K), (heads, _, V) = _flat(q), _flat(v)
    return gated_scan_flops(T, K, V, groups=groups, heads=heads, chunk=chunk, normalise=normalise)


def _delta(q: Any, v: Any, chunk: int = delta.CHUNK, products: tuple[int, int, int] = FORWARD) -> int:
    (groups, T, K), (heads, _, V) = _flat(q), _flat(v)
    return delta_scan_flops(T, K, V, groups=groups, heads=heads, chunk=chunk, products=products)


def _softmax(p: Any, v: Any, chunk: int = softmax.CHUNK) -> int:
    heads, T, L = _flat(p)
    return heads * running_softmax_flops(T, L, v[-1], chunk=chunk)


# A backward pass has five products where the forward has two.
FORMULAS: dict[str, Callable[..., int]] = {
    "block_attention_cpu": _attention,
    "block_attention_cpu_backward": lambda grad, grad_lse, q, k, v, out, lse, *rest, **_: (
        _attention(q, k, v, *rest) * 5 // 2
    ),
    "gated_scan": lambda q, i, v, log_f, state, normalise, eps, chunk, *_, **__: _gated(q, v, chunk, normalise),
    "gated_scan_backward": lambda grad, grad_state, q, i, v, *rest, **_: 5 * _gated(q, v, rest[-1]) // 2,
    "gated_scan_by_value": lambda q, i, v, log_g, state, chunk, *_, **__: _gated(q, v, chunk),
    "gated_scan_by_value_backward": lambda grad, grad_state, q, i, v, *rest, **_: 5 * _gated(q, v, rest[-1]) // 2,
    "delta_scan": lambda q, k, v, beta, log_f, state, chunk, *_, **__: _delta(q, v, chunk),
    "delta_scan_backward": lambda grad, grad_state, q, k, v, *rest, **_: _delta(q, v, rest[-1], BACKWARD),
    "running_softmax": lambda p, k, v, own, a, s, chunk, save, **_: _softmax(p, v, chunk),
    "running_softmax_backward": lambda grad, ga, gs, p, k, v, *rest, **_: 5 * _softmax(p, v, rest[-1]) // 2,
    "block_attention_sequential": _sequential_attention,
    "block_attention_sequential_backward": lambda grad, grad_lse, out, m, z, *shapes, **_: _sequential_attention(
        *shapes, products=(3, 2)
    ),
    "scan_sequential": _sequential_scan,
    "scan_sequential_backward": lambda grad, grad_state, *inputs, **_: _sequential_scan(*inputs) * 5 // 2,
    "running_softmax_sequential": lambda p, k, v, *_, **__: _sequential_scan(p, k, v),
    "running_softmax_sequential_backward": lambda grad, gl, ga, gs, p, k, v, *_, **__: (
        _sequential_scan(p, k, v) * 5 // 2
    ),
}
"""Formula of each operator, from the shapes of its arguments."""

KERNELS: dict[str, Callable[..., int]] = {
    "block_attention_triton": _attention,
    "block_attention_triton_backward": lambda grad, grad_lse, out, m, inverse, *inputs, **_: (
        _attention(*inputs) * 5 // 2
    ),
    "gated_mean_triton": lambda gate, k, v, *_, **__: _softmax(k, v),
    "gated_mean_triton_backward": lambda grad, ga, gs, gate, k, v, *_, **__: 5 * _softmax(k, v) // 2,
    "gated_scan_triton": lambda q, i, v, f, s, mask, normalise, *_, **__: _gated(q, v, normalise=normalise),
    "gated_scan_triton_backward": lambda grad, grad_state, q, i, v, *_, **__: 5 * _gated(q, v) // 2,
    "delta_scan_triton": lambda q, k, v, *_, **__: _delta(q, v),
    "delta_scan_triton_backward": lambda grad, grad_state, q, k, v, *_, **__: _delta(q, v, products=BACKWARD),
    "running_softmax_triton": lambda p, k, v, *_, **__: _softmax(p, v),
    "running_softmax_triton_backward": lambda grad, gl, ga, gs, p, k, v, *_, **__: 5 * _softmax(p, v) // 2,
}
"""Formulas of the kernels: they count as much as the backend `torch` computes for the same call."""
