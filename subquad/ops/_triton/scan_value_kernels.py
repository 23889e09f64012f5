"""The gated scan's gradients of values, where heads are so wide that several tiles hold the key channels.

    dv_j = sum_i q_i a_ij i_j do_i / n_i + (i_j decay_to_end) R

The letters are those of `scan_backward_kernels`, which makes the other gradients (and this one for narrow heads).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the parameters of a kernel are pointers, numbers and Triton's own tensors)

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton.scan_kernels import LENGTHS
from subquad.ops._triton.scan_tiles import of_head, product, read, real_rows, scores_and_sums, write


@triton.jit(do_not_specialize=LENGTHS)
def value_gradients_kernel(
    q,
    i,
    log_f,
    grad,
    mask,
    total,
    end_states,
    dv,
    H,
    T,
    q_stride_b: tl.int64,
    q_stride_h: tl.int64,
    q_stride_t: tl.int64,
    i_stride_b: tl.int64,
    i_stride_h: tl.int64,
    i_stride_t: tl.int64,
    log_f_stride_b: tl.int64,
    log_f_stride_h: tl.int64,
    log_f_stride_t: tl.int64,
    grad_stride_b: tl.int64,
    grad_stride_h: tl.int64,
    grad_stride_t: tl.int64,
    K: tl.constexpr,
    V: tl.constexpr,
    DECAY: tl.constexpr,
    NORMALISE: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Gradients of v for a tile of value channels of one chunk, where several tiles hold the key channels."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    chunks = tl.cdiv(T, C)
    v_tile, at = tl.program_id(0) % V_TILES, (tl.program_id(0) // V_TILES).to(tl.int64)
    n = tl.program_id(0) // V_TILES // chunks
    start = tl.program_id(0) // V_TILES % chunks * C
    v_V = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    row_C = tl.arange(0, C)
    real_C = real_rows(mask, n, H, T, start, row_C)
    q = of_head(q, n, H, q_stride_b, q_stride_h, ALIGNED) + start * q_stride_t
    i = of_head(i, n, H, i_stride_b, i_stride_h, ALIGNED) + start * i_stride_t
    grad = of_head(grad, n, H, grad_stride_b, grad_stride_h, ALIGNED) + start * grad_stride_t
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")
        log_f += start * log_f_stride_t
    scores_CC, dv_CV, _ = scores_and_sums(
        *(q, q_stride_t, i, i_stride_t, log_f, log_f_stride_t, end_states + at * K * V, None),
        *(row_C, real_C, v_V, K, V, DECAY, NORMALISE, True, BLOCK_K, PRECISION),
    )
    if NORMALISE:
        total_C = tl.load(total + n.to(tl.int64) * T + start + row_C, mask=real_C, other=1.0)
        scores_CC *= (1.0 / total_C)[:, None]
    dv_CV += product(tl.trans(scores_CC), read(grad, row_C, grad_stride_t, v_V, real_C, V), PRECISION)
    first_row = (n // H).to(tl.int64) * T + start
    write(dv + (first_row * H + n % H) * V, dv_CV, row_C, H * V, v_V, row_C < T - start, V)
