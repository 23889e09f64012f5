"""Engine B in Triton: online softmax over the keys that a pattern allows, forward and backward.

Shape letters: B batch, H query heads, G key heads, T queries, S keys, K key channels, V value channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from subquad.ops import patterns
from subquad.ops._triton import common
from subquad.ops._triton.attend_kernels import forward_kernel, keys_kernel, queries_kernel
from subquad.ops.patterns import Pattern
from subquad.ops.slots import SCHEMA, Starts
from subquad.tracing import without_tangents

FAR = 1 << 28
"""Larger than any position, and small enough that sums of a few fit into 32 bits."""
SPLIT_KEYS = 4096
"""Most keys that one program reads for a single token: more are split among programs, to fill the device."""


class Range(NamedTuple):
    """Range of keys that a query sees, in the kernels' formula (see attend_kernels.py)."""

    lo_step: int = 1
    before: int = FAR
    hi_step: int = 1
    after: int = 0
    offset: int = 0
    prefix: int = 0
    last: int = FAR
    start: int = -FAR


RANGES: dict[type[Pattern], Callable[[Any], Range]] = {
    patterns.Band: lambda p: Range(before=p.before, after=p.after),
    patterns.Blocks: lambda p: Range(p.size, p.back * p.size, p.size, p.ahead_blocks * p.size),
    patterns.Causal: lambda p: Range(),
    patterns.Full: lambda p: Range(after=FAR),
    patterns.Prefix: lambda p: Range(prefix=p.length),
    patterns.Segments: lambda p: Range(p.size, p.back * p.size),
    patterns.Shifted: lambda p: Range(p.size, p.back * p.size, offset=p.offset),
    **dict.fromkeys(
        (patterns.Sinks, patterns.SinkTokens),
        lambda p: Range(hi_step=p.size, after=-(p.back + 1) * p.size, offset=p.offset, last=p.tokens),
    ),
    patterns.Suffix: lambda p: Range(start=p.start),
    patterns.Window: lambda p: Range(before=p.width - 1),
}


class Tiles(NamedTuple):
    """Queries and keys per tile, warps per program, tiles loaded ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


class Sizes(NamedTuple):
    """Tiles of each kernel, for cards with at least `shared` KiB of shared memory for a block."""

    shared: int
    forward: Tiles
    decode: Tiles
    queries: Tiles
    keys: Tiles


SIZES: dict[tuple[int, int], tuple[Sizes, ...]] = {
    (2, 64): (
        Sizes(200, Tiles(128, 64, 4, 3), Tiles(16, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
        Sizes(99, Tiles(128, 64, 4, 3), Tiles(16, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(32, 128, 8, 2)),
    ),
    (2, 128): (
        Sizes(200, Tiles(128, 64, 8, 3), Tiles(16, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(32, 128, 8, 2)),
        Sizes(128, Tiles(128, 64, 8, 3), Tiles(16, 64, 4, 3), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
        Sizes(99, Tiles(128, 64, 8, 2), Tiles(16, 64, 4, 3), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
    ),
    (2, 256): (
        Sizes(209, Tiles(128, 64, 8, 2), Tiles(16, 64, 4, 2), Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 2)),
        Sizes(145, Tiles(128, 64, 8, 2), Tiles(16, 64, 4, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
        Sizes(99, Tiles(64, 32, 4, 2), Tiles(16, 64, 4, 2), Tiles(64, 32, 4, 1), Tiles(32, 32, 8, 2)),
    ),
    (2, 512): (
        Sizes(200, Tiles(64, 32, 8, 1), Tiles(16, 32, 4, 1), Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1)),
        Sizes(99, Tiles(32, 32, 8, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 8, 1), Tiles(16, 16, 8, 1)),
    ),
    (4, 64): (Sizes(99, Tiles(64, 32, 8, 2), Tiles(16, 32, 4, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),),
    (4, 128): (Sizes(99, Tiles(32, 32, 8, 2), Tiles(16, 32, 4, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),),
    (4, 256): (
        Sizes(128, Tiles(16, 32, 8, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 8, 2), Tiles(16, 32, 8, 2)),
        Sizes(99, Tiles(16, 32, 8, 2), Tiles(16, 32, 4, 2), Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 2)),
    ),
    (4, 512): (Sizes(160, Tiles(16, 32, 8, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 1)),),
}
"""By bytes per entry and most channels per head; never by the length, so that a new length doesn't recompile.

The first that fits into the shared memory of a block is taken: 227 KiB on an H100 or H200, 163 on an A100, 99 on
consumer cards. Chosen by the compiler's output (docs/gpu.md): few registers spill, and products are not serialised.
"""
MOST_CHANNELS = max(channels for _, channels in SIZES)
"""Most key or value channels per head."""


@torch.compiler.assume_constant_result
def most_channels(itemsize: int, device: torch.device) -> int:
    """Return the most channels per head whose tiles fit on a device."""
    shared = common.card(device).shared
    fitting = (key for key, choices in SIZES.items() if choices[-1].shared * 1024 <= shared)
    return max((channels for size, channels in fitting if size == itemsize), default=0)


def sizes_for(itemsize: int, channels: int, shared: int) -> Sizes:
    """Return the sizes for heads of up to `channels` channels that fit into `shared` bytes; `ValueError` if none do."""
    choices = SIZES[itemsize, channels]
    for sizes in choices:
        if sizes.shared * 1024 <= shared:
            return sizes
    raise ValueError(
        f"backend 'triton' of block_attention needs {choices[-1].shared} KiB of shared memory for {channels} channels "
        f"of {itemsize} bytes, and this GPU has {shared // 1024}; choose backend 'torch' or 'flex'"
    )


class Call:
    """Inputs, strides and sizes shared by all launches of one call."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, starts: Starts, scale: float) -> None:
        self.K, self.V = q.shape[-1], v.shape[-1]
        self.G, self.S = k.shape[1:3]
        self.dtype = q.dtype
        self.K_unit, self.V_unit = (_unit(x) for x in (q, v))
        (q, *q_strides), (k, *k_strides) = (in_units(x, self.K_unit) for x in (q, k))
        v, *v_strides = in_units(v, self.V_unit)
        self.inputs, self.strides = (q, k, v), (*q_strides, *k_strides, *v_strides)
        self.rows = [None if x is None else x.contiguous() for x in starts[2:]]
        # Clamped to FAR: the kernels add these numbers in 32 bits.
        limits = Range(*(min(max(n, -FAR), FAR) for n in RANGES[type(pattern)](pattern)))
        self.where = (starts.q_start, starts.k_start, *limits)
        self.reach = min(self.S, limits.lo_step + limits.before + limits.hi_step + max(0, limits.after))
        self.natural = q.dtype == torch.float32  # see attend_kernels.py
        self.in_nat = 1.0 if self.natural else math.log2(math.e)
        self.score_scale = scale * self.in_nat
        widest = max(common.tile(self.K), common.tile(self.V), 64)
        self.sizes = sizes_for(q.element_size(), widest, common.card(q.device).shared)

    def constants(self, tiles: Tiles, backward: bool = False) -> dict[str, Any]:
        """Return the constants that are built into a kernel: head sizes, dtypes, tiles."""
        kind = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[self.dtype]
        if common.INTERPRETED and self.dtype == torch.bfloat16:
            kind = tl.float32  # the interpreter has no arithmetic in bfloat16
        # Gradients of scores may exceed the range of float16, but not of tf32, which has the same precision.
        wide = {"GRAD_TYPE": tl.float32 if self.dtype == torch.float16 else kind} if backward else {}
        # Loads of less than 4 bytes are not asynchronous: loads ahead would take registers, which would spill.
        narrowest = min(self.K_unit, self.V_unit) * self.dtype.itemsize
        return {
            "K": self.K,
            "V": self.V,
            "K_WIDTH": common.tile(self.K),
            "V_WIDTH": common.tile(self.V),
            "K_UNIT": self.K_unit,
            "V_UNIT": self.V_unit,
            "TYPE": kind,
            **wide,
            "PRECISION": common.float32_products() if self.natural else "tf32",
            "NATURAL": self.natural,
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages if narrowest >= 4 else 1,
        }


def _unit(x: Tensor) -> int:
    """Return the entries of the widest aligned load: 16 bytes, or less to divide a head's channels."""
    return math.gcd(x.shape[-1], 16 // x.element_size())


def in_units(x: Tensor, unit: int) -> tuple[Any, ...]:
    """Return the tensor with channels side by side, copied if need be, and its other strides in units."""
    if x.stride(-1) != 1 or any(n > 1 and stride % unit for n, stride in zip(x.shape[:-1], x.stride(), strict=False)):
        x = x.contiguous()
    return x, *(stride // unit for stride in x.stride()[:-1])


def supports(pattern: Pattern) -> bool:
    """Return True if each query sees one range of keys that the kernels have a formula for."""
    return type(pattern) in RANGES


def attend(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, pattern: Pattern, starts: Starts, scale: float
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, H, T, V]` in the inputs' common dtype, and logsumexp `[B, H, T]` in float32.

    Raises `ValueError` for a device, dtype, pattern, head size or position that the kernels do not support.
    """
    common.check_device("block_attention", q_BHTK, k_BGSK, v_BGSV)
    if not supports(pattern):
        valid = ", ".join(sorted(kind.__name__ for kind in RANGES))
        raise ValueError(f"backend 'triton' of block_attention has no kernel for {pattern}; it has: {valid}")
    channels = max(q_BHTK.shape[-1], v_BGSV.shape[-1])
    if channels > MOST_CHANNELS:
        raise ValueError(
            f"backend 'triton' of block_attention takes heads of at most {MOST_CHANNELS} channels, got {channels}"
        )
    farthest = max(starts.q_start + q_BHTK.shape[2], starts.k_start + k_BGSK.shape[2])
    if farthest > FAR:
        raise ValueError(f"backend 'triton' of block_attention takes positions up to {FAR}, got {farthest}")
    return block_attention_triton(q_BHTK, k_BGSK, v_BGSV, pattern.key(), scale, *starts)[:2]


@torch.library.custom_op(
    "subquad::block_attention_triton",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, str pattern, float scale, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def block_attention_triton(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, pattern: str, scale: float, *starts: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, the scores' logsumexp (-inf for a query without keys), their maximum m, and 1 / z.

    The backward pass uses m and 1 / z: with large scores, rounding to one logsumexp would cost digits.
    """
    B, H, T, V = *q_BHTK.shape[:3], v_BGSV.shape[-1]
    call = Call(q_BHTK, k_BGSK, v_BGSV, Pattern.from_key(pattern), Starts(*starts), scale)
    if T == 1:
        return _decode(call, B, H, V)
    out_BHTV = q_BHTK.new_empty(B, H, T, V)
    lse_BHT, m_BHT, inverse_BHT = (q_BHTK.new_empty(B, H, T, dtype=torch.float32) for _ in range(3))
    tiles = call.sizes.forward
    common.launch(
        forward_kernel, (-(-T // tiles.rows) * B * H, 1), *call.inputs, out_BHTV, lse_BHT, m_BHT, inverse_BHT,
        *call.rows, *call.strides, H, H // call.G, T, call.S, *call.where, call.score_scale,
        **call.constants(tiles), SAME_POSITION=False,
    )  # fmt: skip
    return out_BHTV, lse_BHT, m_BHT, inverse_BHT


def _decode(call: Call, B: int, H: int, V: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend one token: the rows of a tile are the heads that share keys, and many keys are split among programs.

    With a tile per head all rows except one would be empty, and the shared keys would be read once per head.
    """
    tiles, parts, shared = call.sizes.decode, -(-call.reach // SPLIT_KEYS), H // call.G
    q = call.inputs[0]
    out_NBHTV = q.new_empty(parts, B, H, 1, V, dtype=q.dtype if parts == 1 else torch.float32)
    lse_NBHT, m_NBHT, inverse_NBHT = (q.new_empty(parts, B, H, 1, dtype=torch.float32) for _ in range(3))
    q_b, q_h, _, *strides = call.strides
    common.launch(
        forward_kernel, (-(-shared // tiles.rows) * B * call.G, parts), *call.inputs,
        out_NBHTV, lse_NBHT, m_NBHT, inverse_NBHT,
        *call.rows, q_b, q_h * shared, q_h, *strides, call.G, 1, shared, call.S, *call.where, call.score_scale,
        **call.constants(tiles), SAME_POSITION=True,
    )  # fmt: skip
    if parts == 1:
        return out_NBHTV[0], lse_NBHT[0], m_NBHT[0], inverse_NBHT[0]
    # Merge the parts by their logsumexp, in float32. With the total as maximum, the sum is one (zero without keys).
    lse_BHT = lse_NBHT.logsumexp(0)
    seen_BHT = lse_BHT.isfinite()
    floor_BHT = lse_BHT.masked_fill(~seen_BHT, 0.0)
    out_BHTV = ((lse_NBHT - floor_BHT).exp()[..., None] * out_NBHTV).sum(0)
    return out_BHTV.to(q.dtype), lse_BHT, floor_BHT * call.in_nat, seen_BHT.float()


@block_attention_triton.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    B, H, T, _ = q.shape
    return q.new_empty(B, H, T, v.shape[-1]), *(q.new_empty(B, H, T, dtype=torch.float32) for _ in range(3))


@torch.library.custom_op(
    "subquad::block_attention_triton_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor? grad_lse, Tensor out, Tensor m, Tensor inverse, Tensor q, Tensor k, Tensor v, "
    f"str pattern, float scale, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def block_attention_triton_backward(
    grad_BHTV: Tensor,
    grad_lse_BHT: Tensor | None,
    out_BHTV: Tensor,
    m_BHT: Tensor,
    inverse_BHT: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    pattern: str,
    scale: float,
    *starts: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    (B, H, T, _), G, S = q_BHTK.shape, *k_BGSK.shape[1:3]
    call = Call(q_BHTK, k_BGSK, v_BGSV, Pattern.from_key(pattern), Starts(*starts), scale)
    do, *do_strides = in_units(grad_BHTV, call.V_unit)
    dlse = None if grad_lse_BHT is None else grad_lse_BHT.contiguous()
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BHTK, k_BGSK, v_BGSV))
    delta_BHT = torch.empty_like(m_BHT)
    numbers = *call.strides, *do_strides, H, H // G, T, S, *call.where, scale, call.score_scale
    out, m, inverse = (x.contiguous() for x in (out_BHTV, m_BHT, inverse_BHT))
    tiles = call.sizes.queries
    common.launch(
        queries_kernel, (-(-T // tiles.rows) * B * H,), *call.inputs, do, out, dlse, m, inverse, delta_BHT, dq,
        *call.rows, *numbers, **call.constants(tiles, backward=True),
    )  # fmt: skip
    tiles = call.sizes.keys
    common.launch(
        keys_kernel, (-(-S // tiles.keys) * B * G,), *call.inputs, do, m, inverse, delta_BHT, dk, dv,
        *call.rows, *numbers, **call.constants(tiles, backward=True),
    )  # fmt: skip
    return dq, dk, dv


@block_attention_triton_backward.register_fake
def _(grad, grad_lse, out, m, inverse, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, pattern, scale, q_start, k_start, *rows = inputs
    out, _, m, inverse = output
    ctx.save_for_backward(out, m, inverse, q, k, v, *rows)
    ctx.static = pattern, scale, q_start, k_start
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(m, inverse)


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    out, m, inverse, q, k, v, *rows = ctx.saved_tensors
    rest = (None,) * (len(ctx.static) + len(rows))
    if grad is None and grad_lse is None:
        return None, None, None, *rest
    grad = torch.zeros_like(out) if grad is None else grad
    return *block_attention_triton_backward(grad, grad_lse, out, m, inverse, q, k, v, *ctx.static, *rows), *rest


block_attention_triton.register_autograd(_backward, setup_context=_setup_context)
