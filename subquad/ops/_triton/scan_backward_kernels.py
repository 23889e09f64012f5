"""The kernels of the gated scan's backward pass: gradients inside chunks, all chunks at once.

With S and z at a chunk's start, R and r the gradients of S and z at its end (`states_kernel`, BACKWARD), a_ij the decay
from row j to row i, n_i the total if normalised (else 1), do the gradients of the outputs o:

    dn_i = -do_i . o_i / n_i          G_ij = do_i . v_j / n_i + dn_i          for j <= i
    dq_i = sum_j G_ij a_ij i_j + decay_to_row * (S do_i / n_i + z dn_i)
    di_j = sum_i G_ij a_ij q_i + decay_to_end * (R v_j + r)
    dv_j = sum_i q_i a_ij i_j do_i / n_i + (i_j decay_to_end) R
    dlog_f_t = sum of all products above whose decay includes f_t, inside the chunk

If heads are so wide that several tiles hold the key channels, `value_gradients_kernel` computes dv.

The triangle of a delta scan's keys has the same gradients, with i = q = k, v = u and do = -dv, for j < i only.

Shape letters as in `scan_kernels`; gradients are contiguous, `[B, T, H, .]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton.scan_kernels import (
    FORGET_ALL,
    LENGTHS,
    channel_gradients,
    decay_between,
    decayed,
    decays,
    of_head,
    product,
    read,
    read_decay,
    read_state,
    real_rows,
    scores_and_sums,
    sums_of_rows,
    write,
)


@triton.jit
def decay_gradients(dg_rows_CK, dg_columns_CK, dg_whole_K, row_C, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """Return the gradients of a chunk's log decays, `[C]` or `[C, K]`.

    Terms that reach a row contain all decays up to it, terms from a row to the chunk's end all later ones, and terms
    that pass through the chunk all of them.
    """
    from_CC, before_CC = row_C[None, :] >= row_C[:, None], row_C[None, :] < row_C[:, None]
    if DECAY == "head":
        if PRECISION == "ieee":  # the sums of a delta scan's two triangles cancel; rounded operands lose more than that
            dg_rows_CK, dg_columns_CK = dg_rows_CK.to(tl.float64), dg_columns_CK.to(tl.float64)
        dg_rows_C, dg_columns_C = tl.sum(dg_rows_CK, 1), tl.sum(dg_columns_CK, 1)
        dg = tl.sum(tl.where(from_CC, dg_rows_C[None, :], 0.0) + tl.where(before_CC, dg_columns_C[None, :], 0.0), 1)
        dg += tl.sum(dg_whole_K)
    else:
        dg = sums_of_rows(from_CC, dg_rows_CK, PRECISION) + sums_of_rows(before_CC, dg_columns_CK, PRECISION)
        dg += dg_whole_K[None, :]
    return dg


@triton.jit
def inside_gradients(
    q_CK, i_CK, g, grad_CC, between_CC, dq_CK, di_CK, dwhole_K, row_C, DECAY: tl.constexpr, PRECISION: tl.constexpr
):
    """Return gradients of q and i, with the part inside the chunk added to the one through states, and of log f.

    A row's product with itself has no decay. In log f's gradient, a difference of sums, it would cancel up to rounding,
    so it is left out of both sums.
    """
    q_CK, i_CK = q_CK.to(tl.float32), i_CK.to(tl.float32)
    own_CC = row_C[:, None] == row_C[None, :]
    own_C1 = tl.sum(tl.where(own_CC, grad_CC, 0.0), 1)[:, None]
    grad_CC = tl.where(own_CC, 0.0, grad_CC)
    if DECAY == "head":
        grad_CC *= between_CC
        dq_inside_CK = product(grad_CC, i_CK, PRECISION)
        di_inside_CK = product(tl.trans(grad_CC), q_CK, PRECISION)
    else:
        dq_inside_CK, di_inside_CK = channel_gradients(q_CK, i_CK, g, grad_CC, row_C, PRECISION)
    dg_rows_CK = q_CK * dq_CK + (q_CK * dq_inside_CK - i_CK * di_inside_CK)
    dg = decay_gradients(dg_rows_CK, i_CK * di_CK, dwhole_K, row_C, DECAY, PRECISION)
    return dq_CK + dq_inside_CK + own_C1 * i_CK, di_CK + di_inside_CK + own_C1 * q_CK, dg


@triton.jit(do_not_specialize=LENGTHS)
def totals_kernel(
    grad, out, mask, total, dtotal, H, T,
    grad_stride_b: tl.int64, grad_stride_h: tl.int64, grad_stride_t: tl.int64,
    V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the totals: `-grad . out / total`."""
    chunks = tl.cdiv(T, C)
    n, start = tl.program_id(0) // chunks, tl.program_id(0) % chunks * C
    row_C = tl.arange(0, C)
    real_C = real_rows(mask, n, H, T, start, row_C)
    grad = of_head(grad, n, H, grad_stride_b, grad_stride_h, ALIGNED) + start * grad_stride_t
    out += ((n // H).to(tl.int64) * T + start) * H * V + (n % H) * V
    sum_C = tl.zeros([C], tl.float32)
    for v_start in range(0, V, BLOCK_V):
        v_V = v_start + tl.arange(0, BLOCK_V)
        grad_CV = read(grad, row_C, grad_stride_t, v_V, real_C, V).to(tl.float32)
        sum_C += tl.sum(grad_CV * read(out, row_C, H * V, v_V, real_C, V).to(tl.float32), 1)
    at_C = n.to(tl.int64) * T + start + row_C
    total_C = tl.load(total + at_C, mask=real_C, other=1.0)
    tl.store(dtotal + at_C, -sum_C / total_C, mask=row_C < T - start)


@triton.jit(do_not_specialize=LENGTHS)
def gradients_kernel(
    q, i, v, log_f, grad, mask, total, dtotal, states, z_states, end_states, end_z_states, dk_before, dlog_f_before,
    dq, di, dv, dlog_f, H, T,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    i_stride_b: tl.int64, i_stride_h: tl.int64, i_stride_t: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_t: tl.int64,
    log_f_stride_b: tl.int64, log_f_stride_h: tl.int64, log_f_stride_t: tl.int64,
    grad_stride_b: tl.int64, grad_stride_h: tl.int64, grad_stride_t: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SHARE: tl.constexpr, NORMALISE: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WITH_V: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute gradients of q, i and log f for a tile of a chunk's key channels; WITH_V (one tile holds all): v's too.

    If log f is one per head, each tile of key channels stores its part. With `dk_before` (float32, contiguous) compute
    the gradients of a delta scan's triangle, `grad` being dv: di is their sum with it, dlog_f with dlog_f_before.
    """
    DELTA: tl.constexpr = dk_before is not None
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    chunks = tl.cdiv(T, C)
    k_tile, at = tl.program_id(0) % K_TILES, (tl.program_id(0) // K_TILES).to(tl.int64)
    n = tl.program_id(0) // K_TILES // chunks
    start = tl.program_id(0) // K_TILES % chunks * C
    k_K = k_tile * BLOCK_K + tl.arange(0, BLOCK_K)
    row_C = tl.arange(0, C)
    exists_C = row_C < T - start
    real_C = real_rows(mask, n, H, T, start, row_C)
    first_row = (n // H).to(tl.int64) * T + start
    q = of_head(q, n // SHARE, H // SHARE, q_stride_b, q_stride_h, ALIGNED) + start * q_stride_t
    i = of_head(i, n // SHARE, H // SHARE, i_stride_b, i_stride_h, ALIGNED) + start * i_stride_t
    v = of_head(v, n, H, v_stride_b, v_stride_h, ALIGNED) + start * v_stride_t
    grad = of_head(grad, n, H, grad_stride_b, grad_stride_h, ALIGNED) + start * grad_stride_t
    q_CK = read(q, row_C, q_stride_t, k_K, real_C, K)
    i_CK = read(i, row_C, i_stride_t, k_K, real_C, K)
    up_to_CC = row_C[None, :] < row_C[:, None] if DELTA else row_C[None, :] <= row_C[:, None]
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")
        log_f += start * log_f_stride_t
        g = read_decay(log_f, row_C, log_f_stride_t, k_K, real_C, K, DECAY)
        to_row, to_end, whole = decays(g, row_C, DECAY, PRECISION)
    between_CC = None
    if DECAY == "head":
        between_CC = decay_between(g, row_C)
    over_C = real_C.to(tl.float32)
    if NORMALISE:
        total_C = tl.load(total + n.to(tl.int64) * T + start + row_C, mask=real_C, other=1.0)
        dtotal_C = tl.load(dtotal + n.to(tl.int64) * T + start + row_C, mask=real_C, other=0.0)
        over_C = 1.0 / total_C
    if DELTA:
        over_C = -over_C
    if WITH_V:
        tl.static_assert(K_TILES == 1 and DECAY != "channel")
        scores_CC = product(q_CK, tl.trans(i_CK), PRECISION)
        if DECAY == "head":
            scores_CC *= between_CC
        scores_CC = tl.where(up_to_CC, scores_CC * over_C[:, None], 0.0)

    grad_CC = tl.zeros([C, C], tl.float32)
    dq_CK = tl.zeros([C, BLOCK_K], tl.float32)
    di_CK = tl.zeros([C, BLOCK_K], tl.float32)
    dwhole_K = tl.zeros([BLOCK_K], tl.float32)
    for v_start in range(0, V, BLOCK_V):
        v_V = v_start + tl.arange(0, BLOCK_V)
        v_CV = read(v, row_C, v_stride_t, v_V, real_C, V)
        do_CV = read(grad, row_C, grad_stride_t, v_V, real_C, V)
        state_KV = read_state(states + at * K * V, k_K, v_V, K, V)
        grad_CC += product(do_CV, tl.trans(v_CV), PRECISION)
        dq_CK += product(do_CV, tl.trans(state_KV), PRECISION)
        if not DELTA:
            end_KV = read_state(end_states + at * K * V, k_K, v_V, K, V)
            di_CK += product(v_CV, tl.trans(end_KV), PRECISION)
            if DECAY != "none":
                dwhole_K += tl.sum(state_KV.to(tl.float32) * end_KV.to(tl.float32), 1)
        if WITH_V:
            dv_CV = product(i_CK, end_KV, PRECISION)
            if DECAY == "head":
                dv_CV *= to_end[:, None]
            dv_CV += product(tl.trans(scores_CC), do_CV, PRECISION)
            write(dv + (first_row * H + n % H) * V, dv_CV, row_C, H * V, v_V, exists_C, V)

    grad_CC *= over_C[:, None]
    dq_CK *= over_C[:, None]
    if NORMALISE:
        z_K = tl.load(z_states + at * K + k_K, mask=k_K < K, other=0.0)
        end_z_K = tl.load(end_z_states + at * K + k_K, mask=k_K < K, other=0.0)
        grad_CC += dtotal_C[:, None]
        dq_CK += dtotal_C[:, None] * z_K[None, :]
        di_CK += end_z_K[None, :]
        dwhole_K += z_K * end_z_K
    grad_CC = tl.where(up_to_CC, grad_CC, 0.0)
    if DECAY == "none":
        dq_CK += product(grad_CC, i_CK, PRECISION)
        di_CK += product(tl.trans(grad_CC), q_CK, PRECISION)
    else:
        dq_CK, di_CK = decayed(dq_CK, to_row, DECAY), decayed(di_CK, to_end, DECAY)
        dq_CK, di_CK, dg = inside_gradients(
            q_CK, i_CK, g, grad_CC, between_CC, dq_CK, di_CK, dwhole_K * whole, row_C, DECAY, PRECISION
        )
    # A floored decay is a constant.
    if DECAY == "head":
        dg = tl.where(real_C & (g > FORGET_ALL), dg, 0.0)
        part = k_tile.to(tl.int64) * (tl.num_programs(0) // K_TILES // chunks) * T
        tl.store(dlog_f + part + (first_row + row_C) * H + n % H, dg, mask=exists_C)
    elif DECAY == "channel":
        dg = tl.where(real_C[:, None] & (g > FORGET_ALL), dg, 0.0)
        if DELTA:
            dg += read(dlog_f_before + (first_row * H + n % H) * K, row_C, H * K, k_K, real_C, K)
        write(dlog_f + (first_row * H + n % H) * K, dg, row_C, H * K, k_K, exists_C, K)
    if DELTA:
        di_CK += dq_CK + read(dk_before + (first_row * H + n % H) * K, row_C, H * K, k_K, real_C, K)
    else:
        write(dq + (first_row * H + n % H) * K, dq_CK, row_C, H * K, k_K, exists_C, K)
    di_CK = tl.where(real_C[:, None], di_CK, 0.0)
    write(di + (first_row * H + n % H) * K, di_CK, row_C, H * K, k_K, exists_C, K)


@triton.jit(do_not_specialize=LENGTHS)
def value_gradients_kernel(
    q, i, log_f, grad, mask, total, end_states, dv, H, T,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    i_stride_b: tl.int64, i_stride_h: tl.int64, i_stride_t: tl.int64,
    log_f_stride_b: tl.int64, log_f_stride_h: tl.int64, log_f_stride_t: tl.int64,
    grad_stride_b: tl.int64, grad_stride_h: tl.int64, grad_stride_t: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SHARE: tl.constexpr, NORMALISE: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute gradients of v for a tile of value channels of one chunk, if several tiles hold the key channels."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    chunks = tl.cdiv(T, C)
    v_tile, at = tl.program_id(0) % V_TILES, (tl.program_id(0) // V_TILES).to(tl.int64)
    n = tl.program_id(0) // V_TILES // chunks
    start = tl.program_id(0) // V_TILES % chunks * C
    v_V = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    row_C = tl.arange(0, C)
    real_C = real_rows(mask, n, H, T, start, row_C)
    q = of_head(q, n // SHARE, H // SHARE, q_stride_b, q_stride_h, ALIGNED) + start * q_stride_t
    i = of_head(i, n // SHARE, H // SHARE, i_stride_b, i_stride_h, ALIGNED) + start * i_stride_t
    grad = of_head(grad, n, H, grad_stride_b, grad_stride_h, ALIGNED) + start * grad_stride_t
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")
        log_f += start * log_f_stride_t
    if end_states is not None:
        end_states += at * K * V
    scores_CC, dv_CV, _ = scores_and_sums(
        *(q, q_stride_t, i, i_stride_t, log_f, log_f_stride_t, end_states, None),
        *(row_C, real_C, v_V, K, V, DECAY, NORMALISE, True, BLOCK_K, PRECISION),
    )
    if NORMALISE:
        total_C = tl.load(total + n.to(tl.int64) * T + start + row_C, mask=real_C, other=1.0)
        scores_CC *= (1.0 / total_C)[:, None]
    dv_CV += product(tl.trans(scores_CC), read(grad, row_C, grad_stride_t, v_V, real_C, V), PRECISION)
    first_row = (n // H).to(tl.int64) * T + start
    write(dv + (first_row * H + n % H) * V, dv_CV, row_C, H * V, v_V, row_C < T - start, V)
