"""The gated scan by Triton kernels, with a hand-written backward pass: memory linear in T, one state a chunk.

Shape letters: B batch, H heads, G groups of heads, T tokens, K key channels, V value channels, F = 1 or K decays;
W = V, or V + 1 if normalised: states then hold the sums of the inputs as a last channel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.ops._triton import common
from subquad.ops._triton.scan_backward_kernels import gradients_kernel, totals_kernel, value_gradients_kernel
from subquad.ops._triton.scan_kernels import outputs_kernel, states_kernel, step_kernel
from subquad.ops.groups import share_of
from subquad.tracing import saves, without_tangents


class Tiles(NamedTuple):
    """Tokens per chunk, most channels per tile of each kernel, and warps."""

    rows: int
    states: int
    outputs_k: int
    outputs_v: int
    outputs_warps: int
    gradients_k: int
    gradients_v: int
    gradients_warps: int


TILES = {
    ("bf16", False): Tiles(64, 64, 64, 128, 4, 128, 64, 8),
    ("bf16", True): Tiles(64, 64, 64, 64, 8, 64, 32, 8),
    ("tf32", False): Tiles(64, 64, 64, 128, 4, 64, 32, 8),
    ("tf32", True): Tiles(64, 64, 64, 64, 8, 64, 32, 8),
    ("ieee", False): Tiles(32, 32, 32, 32, 4, 32, 32, 4),
    ("ieee", True): Tiles(32, 32, 32, 32, 8, 32, 32, 8),
}
"""By the operands of products (see scan_kernels.py) and whether each key channel has its own decay, which takes
registers. Without tensor cores (`ieee`) the operands of a product are in registers too."""
BELOW_HOPPER = TILES | {
    ("bf16", False): Tiles(64, 64, 64, 128, 4, 64, 32, 8),
    ("bf16", True): Tiles(64, 64, 64, 64, 8, 32, 32, 8),
    ("tf32", False): Tiles(64, 64, 64, 128, 4, 32, 32, 8),
    ("tf32", True): Tiles(64, 32, 32, 64, 8, 32, 32, 8),
}
"""Before capability 9.0 tensor cores take all operands from registers, and what a walk reads ahead is there too where
rows are not aligned to 4 bytes (43 channels of float16). Chunks are the same, as is what is stored."""

SEGMENTS = tuple(8 << n for n in range(10))
"""Chunks that a segment of a cut sequence may have."""
LAUNCH = 8
"""Chunks that a walk passes in the time that a launch takes, an estimate."""


def precision_of(*tensors: Tensor) -> str:
    """Return the precision of matrix products, by the narrowest input (see scan_kernels.py)."""
    dtypes = {x.dtype for x in tensors}
    return "bf16" if torch.bfloat16 in dtypes else "tf32" if torch.float16 in dtypes else "ieee"


def state_dtype(precision: str) -> torch.dtype:
    """Return the dtype of stored states between chunks, which only matrix products read."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def by_token(like: Tensor, B: int, H: int, T: int, L: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty `[B, H, T, L]` stored as `[B, T, H, L]`, so that a layer joins heads without a copy."""
    return like.new_empty(B, T, H, L, dtype=dtype or like.dtype).transpose(1, 2)


def by_groups(x_BHTK: Tensor, like: Tensor) -> Tensor:
    """Return the sums of the heads of each group, as `[B, G, T, K]` of `like`; the same tensor if a group is a head."""
    if x_BHTK.shape[1] == like.shape[1]:
        return x_BHTK
    return by_token(like, *like.shape).copy_(x_BHTK.unflatten(1, (like.shape[1], -1)).sum(2))


class Inputs:
    """Tensors of a scan with the channels of a token side by side, and the sizes that follow from them."""

    def __init__(
        self, q: Tensor, i: Tensor, v: Tensor, log_f: Tensor | None, mask: Tensor | None, normalise: bool
    ) -> None:
        self.q, self.i, self.v = common.rows(q), common.rows(i), common.rows(v)
        self.log_f = None if log_f is None else common.rows(log_f)
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self.normalise = normalise
        self.precision = precision_of(q, i, v)
        self.decay = "none" if log_f is None else "channel" if log_f.shape[-1] > 1 else "head"
        tiles = TILES if common.card(q.device).capability >= (9, 0) else BELOW_HOPPER
        self.tiles = tiles[self.precision, self.decay == "channel"]
        (self.B, self.H, self.T, self.V), self.K = v.shape, q.shape[-1]
        self.share = share_of(q.shape[1], self.H)
        self.heads, self.chunks = self.B * self.H, -(-self.T // self.tiles.rows)

    def constants(self, *others: Tensor) -> dict[str, Any]:
        """Return a kernel's constants, which follow from head sizes, dtypes and layout, never from the length."""
        tensors = [x for x in (self.q, self.i, self.v, self.log_f, *others) if x is not None and x.shape[-1] > 1]
        aligned = self.K % 16 == 0 and self.V % 16 == 0 and all(s % 16 == 0 for x in tensors for s in x.stride()[:3])
        return {
            "K": self.K,
            "V": self.V,
            "DECAY": self.decay,
            "SHARE": self.share,
            "NORMALISE": self.normalise,
            "C": self.tiles.rows,
            "PRECISION": common.float32_products() if self.precision == "ieee" else self.precision,
            "ALIGNED": aligned,
        }


def fit(channels: int, most: int) -> tuple[int, int]:
    """Return the channels per tile, and the number of tiles."""
    size = min(common.tile(channels), most)
    return size, -(-channels // size)


def chunks_per_segment(programs: int, chunks: int, at_once: int) -> int:
    """Return the number of chunks per segment into which walks are cut, so that few programs fill the device.

    `programs` is how many walk over uncut sequences of `chunks`, and `at_once` how many run at once. A cut walks over
    all chunks twice, adds up the segments one after another, and launches once more, about as long as `LAUNCH` chunks.
    """

    def steps(per: int) -> int:
        """Return how many chunks the device walks over one after another."""
        segments = -(-chunks // per)
        waves = -(-programs * segments // at_once)
        return waves * per if segments == 1 else 2 * waves * per + segments + LAUNCH

    return min((max(1, chunks), *(per for per in SEGMENTS if per < chunks)), key=steps)


def launch_states(
    x: Inputs, a: Tensor, b: Tensor, first: Tensor | None, last: Tensor, totals: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return states `[B, H, chunks, K, V]` before each chunk and sums of inputs `[B, H, chunks, K]`; fill `last`.

    With totals and their gradients, return gradients of the states after each chunk, from the last to the first.
    """
    (block_k, tiles_k), (block_v, tiles_v) = fit(x.K, x.tiles.states), fit(x.V, x.tiles.states)
    kept = b.new_empty(x.B, x.H, x.chunks, x.K, x.V, dtype=state_dtype(x.precision))
    z_kept = last.new_empty(x.B, x.H, x.chunks, x.K if x.normalise else 0)
    programs = x.heads * tiles_k * tiles_v
    per = chunks_per_segment(programs, x.chunks, 2 * common.multiprocessors(a.device))
    segments = max(1, -(-x.chunks // per))
    sums = last.new_empty(x.heads, segments - 1, *last.shape[2:])
    products = last.new_empty(x.heads, segments - 1, x.K)
    for only_sums, count in ((True, segments - 1), (False, segments)):
        common.launch(
            states_kernel,
            (programs, count),
            *(a, b, x.log_f, x.mask, *(totals or (None, None)), first, sums, products, kept, z_kept, last),
            *(x.H, x.T, segments, per, *common.strides(a, b, x.log_f)),
            **x.constants(b),
            BACKWARD=totals is not None,
            SUMS=only_sums,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=4,
            num_stages=3,
        )
    return kept, z_kept


def launch_outputs(
    x: Inputs, states: Tensor, z_states: Tensor, out: Tensor, total: Tensor, eps: float, delta: bool = False
) -> None:
    """Fill `out`, and `total` if normalised; `delta`: the values may have overflowed, see `lower_product`."""
    (block_k, _), (block_v, tiles_v) = fit(x.K, x.tiles.outputs_k), fit(x.V, x.tiles.outputs_v)
    common.launch(
        outputs_kernel,
        (x.heads * x.chunks * tiles_v,),
        *(x.q, x.i, x.v, x.log_f, x.mask, states, z_states, out, total, eps, x.H, x.T),
        *common.strides(x.q, x.i, x.v, x.log_f),
        **x.constants(),
        DELTA=delta,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=x.tiles.outputs_warps,
        num_stages=2,
    )


def take_step(x: Inputs, first: Tensor | None, out: Tensor, last: Tensor, eps: float) -> None:
    """Fill `out` and `last` for one token."""
    (block_k, _), (block_v, tiles_v) = fit(x.K, 64), fit(x.V, 64)
    common.launch(
        step_kernel,
        (x.heads * tiles_v,),
        *(x.q, x.i, x.v, x.log_f, x.mask, first, out, last, eps, x.H),
        *common.strides(x.q, x.i, x.v, x.log_f, dims=2),
        K=x.K,
        V=x.V,
        DECAY=x.decay,
        SHARE=x.share,
        NORMALISE=x.normalise,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
    )


def total_gradients(x: Inputs, grad: Tensor, out: Tensor | None, total: Tensor) -> Tensor:
    """Return the gradients `[B, H, T]` of the sums of weights; empty if not normalised (`out` is None then)."""
    dtotal = torch.empty_like(total)
    if x.normalise and out is not None:
        out = out.transpose(1, 2).contiguous()
        common.launch(
            totals_kernel,
            (x.heads * x.chunks,),
            *(grad, out, x.mask, total, dtotal, x.H, x.T, *common.strides(grad)),
            V=x.V,
            C=x.tiles.rows,
            BLOCK_V=fit(x.V, 128)[0],
            ALIGNED=x.constants(grad)["ALIGNED"],
            num_warps=4,
        )
    return dtotal


def launch_gradients(
    x: Inputs, grad: Tensor, totals: tuple[Tensor, Tensor], starts: tuple[Tensor, Tensor], ends: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, i, v, log f (empty if None), from states at chunk starts and gradients at chunk ends."""
    tiles_k = fit(x.K, x.tiles.gradients_k)[1]
    dq, di = (
        # Sums over the heads of a group are made in float32.
        by_token(like, x.B, x.H, x.T, x.K, like.dtype if x.share == 1 else torch.float32)
        for like in (x.q, x.i)
    )
    dv = by_token(x.v, *x.v.shape)
    if x.log_f is None:
        dlog_f = grad.new_empty(0)
    elif x.decay == "channel":
        dlog_f = by_token(x.log_f, *x.log_f.shape)
    else:
        dlog_f = grad.new_empty(tiles_k, x.B, x.T, x.H, dtype=torch.float32)  # one part per tile
    # dv sums over all key channels, so one tile must hold them.
    with_v = tiles_k == 1 and x.decay != "channel"
    chunk_gradients(x, x.q, grad, *totals, *starts, *ends, None, None, dq, di, dv, dlog_f, with_v=with_v)
    if not with_v:
        value_gradients(x, grad, totals[0], ends[0], dv)
    if x.decay == "head":
        assert x.log_f is not None
        dlog_f = dlog_f.sum(0)[..., None].to(x.log_f.dtype).transpose(1, 2)
    return by_groups(dq, x.q), by_groups(di, x.i), dv, dlog_f


def chunk_gradients(x: Inputs, q: Tensor, grad: Tensor, *tensors: Tensor | None, with_v: bool = False) -> None:
    """Launch the kernel of the gradients inside chunks, with `tensors` from the totals to dlog_f in its order."""
    (block_k, tiles_k), (block_v, _) = fit(x.K, x.tiles.gradients_k), fit(x.V, x.tiles.gradients_v)
    common.launch(
        gradients_kernel,
        (x.heads * x.chunks * tiles_k,),
        *(q, x.i, x.v, x.log_f, grad, x.mask, *tensors, x.H, x.T),
        *common.strides(q, x.i, x.v, x.log_f, grad),
        **x.constants(grad),
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        WITH_V=with_v,
        num_warps=x.tiles.gradients_warps if block_k == x.tiles.gradients_k else 4,
        num_stages=1,
    )


def value_gradients(x: Inputs, grad: Tensor, total: Tensor | None, end_states: Tensor | None, dv: Tensor) -> None:
    """Fill `dv`; without `end_states` with the part from inside the chunks."""
    (block_k, _), (block_v, tiles_v) = fit(x.K, x.tiles.outputs_k), fit(x.V, x.tiles.outputs_v)
    common.launch(
        value_gradients_kernel,
        (x.heads * x.chunks * tiles_v,),
        *(x.q, x.i, x.log_f, grad, x.mask, total, end_states, dv, x.H, x.T),
        *common.strides(x.q, x.i, x.log_f, grad),
        **x.constants(grad),
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=x.tiles.outputs_warps,
        num_stages=2,
    )


def gated_scan(
    q_BGTK: Tensor,
    i_BGTK: Tensor,
    v_BHTV: Tensor,
    log_f_BHTF: Tensor | None,
    state_BHKW: Tensor | None,
    mask_BT: Tensor | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`S_t = f_t * S_{t-1} + i_t (x) v_t`, `o_t = q_t S_t`, if `normalise` divided by `q_t . z_t + eps`.

    Arguments as in `subquad.ops.gated_scan`, in float32, bfloat16 or float16, with any strides. Returns outputs
    `[B, H, T, V]` in the dtype of v and the state `[B, H, K, W]` in float32. Operands of matrix products have the
    precision of the narrowest of q, i and v. A decay of at most exp(-1e4) forgets everything and has no gradient.

    Raises `ValueError` for other dtypes and for devices without Triton.
    """
    common.check_device("gated_scan", q_BGTK, i_BGTK, v_BHTV, log_f_BHTF)
    state = None if state_BHKW is None else state_BHKW.float()
    save = saves(q_BGTK, i_BGTK, v_BHTV, log_f_BHTF, state)
    out, after, *_ = gated_scan_triton(q_BGTK, i_BGTK, v_BHTV, log_f_BHTF, state, mask_BT, normalise, eps, save)
    return out, after


@torch.library.custom_op("subquad::gated_scan_triton", mutates_args=())
def gated_scan_triton(
    q_BGTK: Tensor,
    i_BGTK: Tensor,
    v_BHTV: Tensor,
    log_f_BHTF: Tensor | None,
    state_BHKW: Tensor | None,
    mask_BT: Tensor | None,
    normalise: bool,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, final state and, if `save`, totals, states and sums of inputs before each chunk (else empty)."""
    x = Inputs(q_BGTK, i_BGTK, v_BHTV, log_f_BHTF, mask_BT, normalise)
    first = None if state_BHKW is None else state_BHKW.contiguous()
    out, last = by_token(x.v, *x.v.shape), x.v.new_empty(x.B, x.H, x.K, x.V + int(normalise), dtype=torch.float32)
    if x.T == 1 and not save:  # decoding: one launch, and no state between chunks
        take_step(x, first, out, last, eps)
    else:
        total = last.new_empty(x.B, x.H, x.T if normalise else 0)
        states, z_states = launch_states(x, x.i, x.v, first, last)
        launch_outputs(x, states, z_states, out, total, eps)
        if save:
            return out, last, total, states, z_states
    return out, last, last.new_empty(0), last.new_empty(0, dtype=state_dtype(x.precision)), last.new_empty(0)


@gated_scan_triton.register_fake
def _(q, i, v, log_f, state, mask, normalise, eps, save):  # type: ignore[no-untyped-def]
    (B, H, T, V), K, precision = v.shape, q.shape[-1], precision_of(q, i, v)
    chunks = -(-T // TILES[precision, False].rows)
    shapes = (B, H, T if normalise else 0), (B, H, chunks, K, V), (B, H, chunks, K if normalise else 0)
    total, states, z_states = shapes if save else ((0,),) * 3
    last = v.new_empty(B, H, K, V + int(normalise), dtype=torch.float32)
    kept = last.new_empty(total), last.new_empty(states, dtype=state_dtype(precision)), last.new_empty(z_states)
    return by_token(v, *v.shape), last, *kept


@torch.library.custom_op("subquad::gated_scan_triton_backward", mutates_args=())
def gated_scan_triton_backward(
    grad_BHTV: Tensor,
    grad_state_BHKW: Tensor | None,
    q_BGTK: Tensor,
    i_BGTK: Tensor,
    v_BHTV: Tensor,
    log_f_BHTF: Tensor | None,
    mask_BT: Tensor | None,
    out_BHTV: Tensor | None,
    total_BHT: Tensor,
    states: Tensor,
    z_states: Tensor,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, i, v, log f (empty if None) and the initial state."""
    x, grad = Inputs(q_BGTK, i_BGTK, v_BHTV, log_f_BHTF, mask_BT, normalise), common.rows(grad_BHTV)
    dstate = grad.new_empty(x.B, x.H, x.K, x.V + int(normalise), dtype=torch.float32)
    dlast = None if grad_state_BHKW is None else grad_state_BHKW.contiguous()
    totals = total_BHT, total_gradients(x, grad, out_BHTV, total_BHT)
    ends = launch_states(x, x.q, grad, dlast, dstate, totals)
    return *launch_gradients(x, grad, totals, (states, z_states), ends), dstate


@gated_scan_triton_backward.register_fake
def _(grad, grad_state, q, i, v, log_f, mask, out, total, states, z_states, normalise):  # type: ignore[no-untyped-def]
    B, H, _, V = v.shape
    dlog_f = grad.new_empty(0) if log_f is None else by_token(log_f, *log_f.shape)
    dstate = grad.new_empty(B, H, q.shape[-1], V + int(normalise), dtype=torch.float32)
    return *(by_token(x, *x.shape) for x in (q, i, v)), dlog_f, dstate


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, i, v, log_f, state, mask, normalise, _, _ = inputs
    out, _, total, states, z_states = output
    ctx.save_for_backward(q, i, v, log_f, mask, out if normalise else None, total, states, z_states)
    ctx.normalise, ctx.with_state = normalise, state is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(total, states, z_states)


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    q, i, v, log_f, mask, out, *kept = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    *gradients, dlog_f, dstate = gated_scan_triton_backward(
        grad, grad_state, q, i, v, log_f, mask, out, *kept, ctx.normalise
    )
    dlog_f, dstate = None if log_f is None else dlog_f, dstate if ctx.with_state else None
    return *gradients, dlog_f, dstate, None, None, None, None


gated_scan_triton.register_autograd(_backward, setup_context=_setup_context)
