"""Causal Latte's recurrence in Triton kernels, forward and backward, and one token at a time.

    o_t = sum_l p_tl sum_{j <= t} w_tjl v_j,   w_tjl = exp(k_jl) / sum_{s <= t} exp(k_sl)

See softmax_kernels.py for the method and docs/decisions/0002-running-softmax.md for its derivation. Besides inputs and
outputs, m and z before each chunk and one state per segment of chunks are kept for the backward pass.

Shape letters: B batch, H heads, T tokens, L latents, V value channels, N = B H, M chunks, S segments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops._triton import common
from subquad.ops._triton import softmax_backward_kernels as backward_kernels
from subquad.ops._triton import softmax_kernels as forward_kernels
from subquad.tracing import saves, without_tangents

STATE_LATENTS = 16
"""Latents per tile in the passes over segments, which multiply no matrices."""


class Precision(NamedTuple):
    """Arithmetic of matrix products, by the dtype of v."""

    bounded: tl.dtype
    """Dtype of bounded operands: values, scores, exponentials of numbers that are at most zero."""
    wide: tl.dtype
    """Dtype of operands that need the range of float32."""
    mode: str
    """Triton's precision for float32 operands."""
    bound: float
    """Most that a logit may exceed its window's reference, at a cost of up to `bound` roundings of float32."""
    values: int
    """Most value channels per tile, so that operands fit into registers."""

    def constants(self) -> dict[str, Any]:
        """Return the constants that are built into the kernels."""
        return {
            "DOT": self.bounded,
            "WIDE": self.wide,
            "PRECISION": common.float32_products() if self.mode == "ieee" else self.mode,
            "BOUND": self.bound,
        }


PRECISIONS = {
    torch.float32: Precision(tl.float32, tl.float32, "ieee", 4.0, 32),
    torch.bfloat16: Precision(tl.bfloat16, tl.bfloat16, "tf32", 32.0, 128),
    torch.float16: Precision(tl.float16, tl.float32, "tf32", 32.0, 64),
}


class Tiles(NamedTuple):
    """Tokens per chunk, latents and value channels per program, its warps, how many programs a device runs at once, and
    stages of the loads of gradients.
    """

    chunk: int
    latents: int
    values: int
    warps: int
    programs: int
    stages: int = 2

    @classmethod
    def of(cls, L: int, V: int, dtype: torch.dtype, device: torch.device) -> Tiles:
        """Return the tiles for head sizes, dtype and card; they never depend on T, so a new length doesn't recompile.

        In float32, without tensor cores, operands of products are in registers, so tiles are small. On cards before
        Hopper those of tensor cores are too: chunks are shorter, and gradients load nothing ahead.
        """
        count, latents = common.multiprocessors(device), min(common.tile(L), 64)
        values = min(common.tile(V), PRECISIONS[dtype].values)
        if dtype == torch.float32:
            return cls(16, latents, values, 8, 2 * count)
        chunk, stages = (64, 2) if common.card(device).capability >= (9, 0) else (32, 1)
        return cls(chunk, latents, values, 8 if latents * values >= 64 * 64 else 4, 2 * count, stages)


def chunks_per_segment(programs: int, chunks: int, at_once: int) -> int:
    """Return the number of chunks per segment into which sequences are cut, so that full waves of programs run.

    `programs` is how many walk over uncut sequences of `chunks`, and `at_once` how many run at once. Cut
    sequences need another pass over keys and values, about a third of the outputs' work, so a cut has to save more.
    """
    best, per = 3 * triton.cdiv(programs, at_once) * chunks, max(1, chunks)
    for waves in range(1, 5):
        segments = waves * at_once // max(1, programs)
        length = max(2, triton.cdiv(chunks, max(1, segments)))
        if segments > 1 and 4 * waves * length < best:
            best, per = 4 * waves * length, length
    return per


class Plan(NamedTuple):
    """Cut of a call into programs; with T only counts change, which kernels take as numbers, so nothing recompiles."""

    rows: int
    L: int
    V: int
    tile: Tiles
    groups: int
    tiles: int
    chunks: int
    segments: int
    per: int

    @classmethod
    def of(cls, p_BHTL: Tensor, v_BHTV: Tensor) -> Plan:
        """Return the cut of a call."""
        B, H, T, L = p_BHTL.shape
        V = v_BHTV.shape[-1]
        tile = Tiles.of(L, V, v_BHTV.dtype, v_BHTV.device)
        groups, tiles, chunks = triton.cdiv(L, tile.latents), triton.cdiv(V, tile.values), triton.cdiv(T, tile.chunk)
        per = chunks_per_segment(B * H * groups * tiles, chunks, tile.programs)
        return cls(B * H, L, V, tile, groups, tiles, chunks, max(1, triton.cdiv(chunks, per)), per)

    def numbers(self, p_BHTL: Tensor) -> tuple[int, int, int, int]:
        return p_BHTL.shape[2], p_BHTL.shape[1], self.segments, self.per

    def grid(self, segments: int) -> tuple[int, int]:
        return self.rows * self.groups * segments, self.tiles

    def saved(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of m before each chunk and after the last, z before each chunk, U before each segment."""
        N, L = self.rows, self.L
        return (N, self.chunks + 1, L), (N, self.chunks, L), (N, self.segments, L, self.V)

    def state_grid(self) -> tuple[int, int]:
        return self.rows * triton.cdiv(self.L, STATE_LATENTS), self.tiles

    def state_sizes(self) -> dict[str, Any]:
        """Return the constants that are built into the passes over segments."""
        return {"L": self.L, "V": self.V, "LATENTS": STATE_LATENTS, "VALUES": self.tile.values}

    def sizes(self, *tensors: Tensor, stages: int = 2) -> dict[str, Any]:
        """Return the constants of head sizes and strides that are built into the kernels over segments."""
        # If head sizes are not multiples of 16, strides are so only for some T, and a constant that changes with T
        # would recompile.
        whole = self.V % 16 == 0 and self.L % 16 == 0
        return {
            "L": self.L,
            "V": self.V,
            "GROUPS": self.groups,
            "LATENTS": self.tile.latents,
            "VALUES": self.tile.values,
            "CHUNK": self.tile.chunk,
            "ALIGNED": whole and not any(stride % 16 for stride in common.strides(*tensors)),
            "num_warps": self.tile.warps,
            "num_stages": stages,
        }


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return the tensor without gaps; None stays None."""
    return None if x is None else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """Return an empty tensor in the layout of x with contiguous channels: a layer then joins heads without a copy."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def parts_of(x: Tensor, count: int) -> Tensor:
    """Return memory for the parts of x from `count` tiles: x itself if there is one."""
    return x[None] if count == 1 else x.new_empty(count, *x.shape, dtype=torch.float32)


def add_parts(parts: Tensor, x: Tensor) -> None:
    """Sum the parts from `parts_of` into x; a single part is x itself."""
    if len(parts) > 1:
        x.copy_(parts.sum(0))


class Given(NamedTuple):
    """Inputs of the kernels with channels side by side, and the mask as bytes."""

    p: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    lse: Tensor | None
    mean: Tensor | None

    @classmethod
    def of(cls, p: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lse: Tensor | None, mean: Tensor | None) -> Given:
        mask = None if mask is None else mask.contiguous().view(torch.uint8)
        return cls(common.rows(p), common.rows(k), common.rows(v), mask, contiguous(lse), contiguous(mean))


class Results(NamedTuple):
    """Results of the forward kernels: outputs, lse, final lse and mean, and, for the backward pass, m and z before each
    chunk and U before each segment. Results that are not needed are empty.
    """

    out: Tensor
    lse: Tensor
    end_lse: Tensor
    end_mean: Tensor
    m: Tensor
    z: Tensor
    u: Tensor

    @classmethod
    def of(cls, p: Tensor, v: Tensor, want_lse: bool, save: bool) -> Results:
        cut = Plan.of(p, v)
        state = (*p.shape[:2], cut.L, cut.V)
        shapes = (p.shape if want_lse else (0,), state, *(cut.saved() if save else ((0,),) * 3))
        lse, end_mean, *saved = (p.new_empty(shape, dtype=torch.float32) for shape in shapes)
        return cls(empty_like(v), lse, p.new_empty(state[:3], dtype=torch.float64), end_mean, *saved)


class Gradients(NamedTuple):
    """Gradients of p, k, v and the initial lse and mean; the last two are empty if there is no initial state."""

    p: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    mean: Tensor

    @classmethod
    def of(cls, p: Tensor, k: Tensor, v: Tensor, lse: Tensor | None, mean: Tensor | None) -> Gradients:
        starts = (p.new_empty(0) if x is None else x.new_empty(x.shape) for x in (lse, mean))
        return cls(empty_like(p), empty_like(k), empty_like(v), *starts)


def running_softmax(
    p_BHTL: Tensor,
    logits_BHTL: Tensor,
    v_BHTV: Tensor,
    state: tuple[Tensor, Tensor] | None,
    mask_BT: Tensor | None,
    want_lse: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return outputs in the dtype of v, the running logsumexp `[B, H, T, L]` in float32 (or None), its last value in
    float64, and the last means `[B, H, L, V]` in float32. Matrices are multiplied in the dtype of v.

    Raises `ValueError` for dtypes and devices that the kernels do not support.
    """
    common.check_device("running_softmax", p_BHTL, logits_BHTL, v_BHTV)
    lse, mean = (None, None) if state is None else (state[0].double(), state[1].float())
    inputs = (p_BHTL, logits_BHTL, v_BHTV, mask_BT, lse, mean)
    out, lse, end_lse, end_mean, *_ = running_softmax_op(*inputs, want_lse, saves(*inputs))
    return out, lse if want_lse else None, end_lse, end_mean


@torch.library.custom_op("subquad::running_softmax_triton", mutates_args=())
def running_softmax_op(
    p_BHTL: Tensor,
    k_BHTL: Tensor,
    v_BHTV: Tensor,
    mask_BT: Tensor | None,
    lse_BHL: Tensor | None,
    mean_BHLV: Tensor | None,
    want_lse: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Results`."""
    given = Given.of(p_BHTL, k_BHTL, v_BHTV, mask_BT, lse_BHL, mean_BHLV)
    results = Results.of(given.p, given.v, want_lse, save)
    T = given.p.shape[2]
    if T == 0:
        results.end_lse.fill_(forward_kernels.EMPTY.value) if given.lse is None else results.end_lse.copy_(given.lse)
        results.end_mean.zero_() if given.mean is None else results.end_mean.copy_(given.mean)
    elif T == 1 and not save:
        _decode(given, results, want_lse)
    else:
        _forward(given, results, want_lse, save)
    return results


@running_softmax_op.register_fake
def _(p, k, v, mask, lse, mean, want_lse, save):  # type: ignore[no-untyped-def]
    return Results.of(common.rows(p), common.rows(v), want_lse, save)


def _decode(given: Given, results: Results, want_lse: bool) -> None:
    """Compute one token in one launch."""
    B, H, _, L = given.p.shape
    V = given.v.shape[3]
    values = min(common.tile(V), 64)
    out, lse, end_lse, end_mean, *_ = results
    common.launch(
        forward_kernels.decode,
        (B * H, triton.cdiv(V, values)),
        *(*given, out, lse if want_lse else None, end_lse, end_mean, H),
        *(stride for x in (*given[:3], out) for stride in x.stride()[:2]),
        L=L,
        V=V,
        LATENTS=min(common.tile(L), 64),
        VALUES=values,
    )


def _forward(given: Given, results: Results, want_lse: bool, save: bool) -> None:
    """Run the three passes: sums of segments, states before segments, outputs."""
    p, k, v, mask, lse, mean = given
    out, out_lse, end_lse, end_mean, m, z, u = results
    cut = Plan.of(p, v)
    if not save:
        m, _, u = (p.new_empty(shape, dtype=torch.float32) for shape in cut.saved())
    dots = PRECISIONS[v.dtype].constants()
    sums = (cut.rows, cut.segments, cut.L)
    m_sums, z_sums = (p.new_empty(sums, dtype=torch.float32) for _ in range(2))
    z_start = p.new_empty(sums, dtype=torch.float64)
    common.launch(
        forward_kernels.segment_sums,
        cut.grid(cut.segments - 1),
        *(k, v, mask, m_sums, z_sums, u, *cut.numbers(p), *common.strides(k, v)),
        **cut.sizes(k, v),
        DOT=dots["DOT"],
        PRECISION=dots["PRECISION"],
    )
    common.launch(
        forward_kernels.segment_starts,
        cut.state_grid(),
        *(lse, mean, m_sums, z_sums, u, m, z_start, cut.segments, cut.per, cut.chunks),
        **cut.state_sizes(),
    )
    parts = parts_of(out, cut.groups)
    common.launch(
        forward_kernels.outputs,
        cut.grid(cut.segments),
        *(p, k, v, mask, m, z_start, u, parts, out_lse if want_lse else None, z if save else None),
        *(end_lse, end_mean, *cut.numbers(p), *common.strides(p, k, v), parts.stride(0), *common.strides(parts[0])),
        **cut.sizes(p, k, v, parts[0]),
        **dots,
    )
    add_parts(parts, out)


@torch.library.custom_op("subquad::running_softmax_triton_backward", mutates_args=())
def running_softmax_backward_op(
    grad_BHTV: Tensor,
    dlse_BHTL: Tensor | None,
    dend_lse_BHL: Tensor | None,
    dend_mean_BHLV: Tensor | None,
    p_BHTL: Tensor,
    k_BHTL: Tensor,
    v_BHTV: Tensor,
    mask_BT: Tensor | None,
    lse_BHL: Tensor | None,
    mean_BHLV: Tensor | None,
    end_lse_BHL: Tensor,
    end_mean_BHLV: Tensor,
    m_NML: Tensor,
    z_NML: Tensor,
    u_NSLV: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Gradients`."""
    given = Given.of(p_BHTL, k_BHTL, v_BHTV, mask_BT, lse_BHL, mean_BHLV)
    do, dlse = common.rows(grad_BHTV), contiguous(dlse_BHTL)
    dend_lse, dend_mean = contiguous(dend_lse_BHL), contiguous(dend_mean_BHLV)
    gradients = Gradients.of(*given[:3], given.lse, given.mean)
    if given.p.shape[2] == 0:
        for x, gradient in ((gradients.lse, dend_lse), (gradients.mean, dend_mean)):
            x.zero_() if gradient is None or given.lse is None else x.copy_(gradient)
        return gradients
    dlog, r, x = _query_gradients(given, do, dlse, (m_NML, z_NML, u_NSLV), gradients)
    cut = Plan.of(given.p, given.v)
    common.launch(
        backward_kernels.segment_ends,
        cut.state_grid(),
        *(dend_lse, dend_mean, end_lse_BHL, end_mean_BHLV, m_NML, r, x, cut.segments, cut.per, cut.chunks),
        **cut.state_sizes(),
    )
    _key_gradients(given, do, (dlog, m_NML, z_NML, r, x), gradients)
    return gradients


@running_softmax_backward_op.register_fake
def _(grad, dlse, dend_lse, dend_mean, p, k, v, mask, lse, mean, end_lse, end_mean, m, z, u):  # type: ignore[no-untyped-def]
    return Gradients.of(common.rows(p), common.rows(k), common.rows(v), lse, mean)


def _query_gradients(
    given: Given, do: Tensor, dlse: Tensor | None, saved: tuple[Tensor, Tensor, Tensor], gradients: Gradients
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill dp; return `dlog` = p dp - dlse, minus the gradient of log Z, and R and X of the segments.

    `dlog` is float32 in every dtype, since dk is a difference of sums of it.
    """
    p, k, v, mask, *_ = given
    u = saved[2]
    cut = Plan.of(p, v)
    dlog, r, x = u.new_empty(cut.tiles, *p.shape), torch.empty_like(u), u.new_empty(cut.tiles, *u.shape[:3])
    parts = parts_of(gradients.p, cut.tiles)
    common.launch(
        backward_kernels.query_gradients,
        cut.grid(cut.segments),
        *(p, k, v, do, dlse, mask, *saved, parts, dlog, r, x, *cut.numbers(p)),
        *(*common.strides(p, k, v, do), parts.stride(0), *common.strides(parts[0])),
        **cut.sizes(p, k, v, do, parts[0], stages=cut.tile.stages),
        **PRECISIONS[v.dtype].constants(),
    )
    add_parts(parts, gradients.p)
    return dlog, r, x


def _key_gradients(given: Given, do: Tensor, later: tuple[Tensor, ...], gradients: Gradients) -> None:
    """Fill the gradients of k, v and the initial state."""
    p, k, v, mask, lse, mean = given
    dlog, m, z, r, x = later
    cut = Plan.of(p, v)
    k_parts, v_parts = parts_of(gradients.k, cut.tiles), parts_of(gradients.v, cut.groups)
    lse_parts = r.new_empty(cut.tiles, *gradients.lse.shape)
    common.launch(
        backward_kernels.key_gradients,
        cut.grid(cut.segments),
        *(p, k, v, do, dlog, mask, lse, mean, m, z, r, x, k_parts, v_parts, lse_parts, gradients.mean),
        *(*cut.numbers(p), *common.strides(p, k, v, do)),
        *(k_parts.stride(0), *common.strides(k_parts[0]), v_parts.stride(0), *common.strides(v_parts[0])),
        **cut.sizes(p, k, v, do, k_parts[0], v_parts[0], stages=cut.tile.stages),
        **PRECISIONS[v.dtype].constants(),
    )
    add_parts(k_parts, gradients.k)
    add_parts(v_parts, gradients.v)
    gradients.lse.copy_(lse_parts.sum(0))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    results = Results(*output)
    ctx.save_for_backward(*inputs[:6], *results[2:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(results.m, results.z, results.u)


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    p, k, v, mask, lse, mean, *saved = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    dp, dk, dv, dlse, dmean = running_softmax_backward_op(grad, *rest[:3], p, k, v, mask, lse, mean, *saved)
    return dp, dk, dv, None, None if lse is None else dlse, None if mean is None else dmean, None, None


running_softmax_op.register_autograd(_backward, setup_context=_setup_context)
