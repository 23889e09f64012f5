"""Kernels of the delta scan: each chunk's triangle, and the walks over the chunks, forward and backward.

    e_t = v_t - k_t (f_t * S_{t-1}),    u_t = b_t e_t,    S_t = f_t * S_{t-1} + k_t (x) u_t,    o_t = q_t S_t

This is the gated scan of the values u, whose kernels compute outputs and gradients once u is known. In a chunk that
begins with the state S, with G the sums of log f and A the scores of the keys with themselves, below the diagonal:

    x = v - (k exp(G)) S,    (I + A diag(b)) e = x,    so    e = x - X (b x)    with    X = (I + A diag(b))^-1 A

X does not depend on the state: a first kernel computes it for all chunks in parallel, and the walk, the only sequential
part, multiplies by it. X is bounded where the scan is, and it is computed by substitution, since powers of A are not
bounded. Backward, with R the gradient of the state
after a chunk and du that of u, the same X serves transposed:

    g = (I + diag(b) A)^-T du = du - X^T (b du),    dv = b g,    db = g . e

If `b |k|^2` exceeds 2 numbers may overflow. A lower triangle's product leaves out the right side's rows from the first
on that is not finite, and its own are NaN from there: zero times infinity would reach earlier rows.

Shape letters as in `scan_kernels`; N blocks of R = 16 rows. beta and its gradient are contiguous `[B, H, T]`, X
`[B, H, chunks, C, C]` (with REFINE `[B, H, chunks, 2 C, C]`: X, then A), e, u and their gradients `[B, T, H, V]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton.scan_kernels import (
    LENGTHS,
    carried,
    cast,
    decayed,
    levels,
    lower_product,
    of_head,
    operand,
    product,
    read,
    read_decay,
    real_rows,
    scores_and_sums,
    write,
)


@triton.jit
def joined(X_NRR, A_CC, b_C):
    """Return X of blocks of 2R rows from those of R rows, `[N / 2, 2R, 2R]`.

    With P the block of A below the diagonal, the one of X is `(I - X_second diag(b)) P (I - diag(b) X_first)`.
    """
    R: tl.constexpr = X_NRR.shape[1]
    M: tl.constexpr = X_NRR.shape[0] // 2
    m_M, half_2, row_R = tl.arange(0, M), tl.arange(0, 2), tl.arange(0, R)
    first_2 = half_2 == 0
    X_M2RR, b_M2R = tl.reshape(X_NRR, [M, 2, R, R]), tl.reshape(b_C, [M, 2, R])
    first_MRR = tl.sum(tl.where(first_2[None, :, None, None], X_M2RR, 0.0), 1)
    second_MRR = tl.sum(tl.where(first_2[None, :, None, None], 0.0, X_M2RR), 1)
    b_first_MR = tl.sum(tl.where(first_2[None, :, None], b_M2R, 0.0), 1)
    below_M2RM2R = (m_M[:, None] == m_M[None, :])[:, None, None, :, None, None]
    below_M2RM2R = below_M2RM2R & (half_2[:, None] > half_2[None, :])[None, :, None, None, :, None]
    P_MRR = tl.where(below_M2RM2R, tl.reshape(A_CC, [M, 2, R, M, 2, R]), 0.0)
    P_MRR = tl.sum(tl.sum(tl.sum(P_MRR, 4), 3), 1)
    P_MRR -= product(P_MRR, b_first_MR[:, :, None] * first_MRR, "ieee")
    b_second_MR = tl.sum(tl.where(first_2[None, :, None], 0.0, b_M2R), 1)
    P_MRR -= lower_product(second_MRR, b_second_MR[:, :, None] * P_MRR, row_R, "ieee")
    X_MRR22 = tl.join(tl.join(first_MRR, tl.zeros_like(P_MRR)), tl.join(P_MRR, second_MRR))
    return tl.reshape(tl.permute(X_MRR22, [0, 4, 1, 3, 2]), [M, 2 * R, 2 * R])


@triton.jit
def triangle(A_CC, b_C):
    """Return `X = (I + A diag(b))^-1 A` in float32, A strictly lower: blocks of 16 rows first, then joined pairs."""
    C: tl.constexpr = A_CC.shape[0]
    N: tl.constexpr = C // 16
    n_N, row_R = tl.arange(0, N), tl.arange(0, 16)
    own_N1N1 = (n_N[:, None] == n_N[None, :])[:, None, :, None]
    A_NRR = tl.sum(tl.where(own_N1N1, tl.reshape(A_CC, [N, 16, N, 16]), 0.0), 2)
    b_NR = tl.reshape(b_C, [N, 16])
    X_NRR = tl.zeros_like(A_NRR)
    for r in range(1, 16):
        this_1R1 = (row_R == r)[None, :, None]
        a_NR = tl.sum(tl.where(this_1R1, A_NRR, 0.0), 1) * b_NR
        X_NRR = tl.where(this_1R1, A_NRR - tl.sum(a_NR[:, :, None] * X_NRR, 1)[:, None, :], X_NRR)
    for _ in tl.static_range(4, levels(C)):
        X_NRR = joined(X_NRR, A_CC, b_C)
    return tl.reshape(X_NRR, [C, C])


@triton.jit(do_not_specialize=LENGTHS)
def triangle_kernel(
    k, log_f, beta, mask, X, H, T,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_t: tl.int64,
    log_f_stride_b: tl.int64, log_f_stride_h: tl.int64, log_f_stride_t: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SHARE: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr,
    REFINE: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute X of one chunk, followed by A with REFINE."""
    chunks = tl.cdiv(T, C)
    at, n, start = tl.program_id(0).to(tl.int64), tl.program_id(0) // chunks, tl.program_id(0) % chunks * C
    row_C = tl.arange(0, C)
    real_C = real_rows(mask, n, H, T, start, row_C)
    k = of_head(k, n // SHARE, H // SHARE, k_stride_b, k_stride_h, ALIGNED) + start * k_stride_t
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")
        log_f += start * log_f_stride_t
    scores_CC, _, _ = scores_and_sums(
        *(k, k_stride_t, k, k_stride_t, log_f, log_f_stride_t, None, None),
        *(row_C, real_C, tl.arange(0, 16), K, V, DECAY, False, False, BLOCK_K, PRECISION),
    )
    A_CC = tl.where(row_C[None, :] < row_C[:, None], scores_CC, 0.0)
    b_C = tl.load(beta + n.to(tl.int64) * T + start + row_C, mask=real_C, other=0.0)
    X += at * (1 + REFINE) * C * C + row_C[:, None] * C + row_C[None, :]
    tl.store(X, operand(triangle(A_CC, b_C), PRECISION))
    if REFINE:
        tl.store(X + C * C, A_CC)


@triton.jit
def solved(x_CV, b_C1, X, at, row_C, TRANSPOSED: tl.constexpr, REFINE: tl.constexpr, PRECISION: tl.constexpr):
    """Return `x - X (b x)`, TRANSPOSED `x - X^T (b x)`, by X of chunk `at`; REFINE: one step of iterative refinement.

    For equal keys and b = 2 the rounding errors of X and of the state add up from chunk to chunk; the correction, X
    times the residual, reduces them to those of a substitution.
    """
    C: tl.constexpr = row_C.shape[0]
    X += at * (1 + REFINE) * C * C + row_C[:, None] * C + row_C[None, :]
    X_CC = tl.load(X).to(tl.float32)
    if TRANSPOSED:
        y_CV = x_CV - product(tl.trans(X_CC), b_C1 * x_CV, PRECISION)
    else:
        y_CV = x_CV - lower_product(X_CC, b_C1 * x_CV, row_C, PRECISION)
    if REFINE:
        A_CC = tl.load(X + C * C)
        if TRANSPOSED:
            x_CV -= y_CV + product(tl.trans(A_CC), b_C1 * y_CV, PRECISION)
            y_CV += x_CV - product(tl.trans(X_CC), b_C1 * x_CV, PRECISION)
        else:
            x_CV -= y_CV + lower_product(A_CC, b_C1 * y_CV, row_C, PRECISION)
            y_CV += x_CV - lower_product(X_CC, b_C1 * x_CV, row_C, PRECISION)
    return y_CV


@triton.jit
def decay_to_end(log_f, stride_t, mask, n, H, T, start, row_C, k_K, K: tl.constexpr, DECAY: tl.constexpr):
    """Return the decays from each row to the chunk's end, `[C]` or `[C, K]`: sums of the later rows' logarithms.

    For a tile of all key channels the registers hold running sums, but not also the products in `decays`.
    """
    real_C = real_rows(mask, n, H, T, start, row_C + 1) & (row_C < row_C.shape[0] - 1)
    g = read_decay(log_f + start * stride_t, row_C + 1, stride_t, k_K, real_C, K, DECAY)
    return tl.exp(tl.cumsum(g, 0, reverse=True))


@triton.jit(do_not_specialize=LENGTHS)
def walk_kernel(
    k, v, log_f, beta, mask, X, first, states, e, u, last, H, T,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_t: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_t: tl.int64,
    log_f_stride_b: tl.int64, log_f_stride_h: tl.int64, log_f_stride_t: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SHARE: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, REFINE: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks from `first` to `last`: store S before each chunk, u and, if asked for, e.

    A program owns all key channels, which x sums over, and BLOCK_V value channels of the state for the whole walk.
    """
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    v_tile, n = tl.program_id(0) % V_TILES, tl.program_id(0) // V_TILES
    k_K, v_V, row_C = tl.arange(0, BLOCK_K), v_tile * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, C)
    inside_KV = (k_K < K)[:, None] & (v_V < V)[None, :]
    entry_KV = k_K[:, None] * V + v_V[None, :]
    k = of_head(k, n // SHARE, H // SHARE, k_stride_b, k_stride_h, ALIGNED)
    v = of_head(v, n, H, v_stride_b, v_stride_h, ALIGNED)
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")
    state_KV = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if first is not None:
        state_KV += tl.load(first + n.to(tl.int64) * K * V + entry_KV, mask=inside_KV, other=0.0)

    chunks = tl.cdiv(T, C)
    for chunk in range(chunks):
        start = chunk * C
        at = n.to(tl.int64) * chunks + chunk
        tl.store(states + at * K * V + entry_KV, operand(state_KV, PRECISION), mask=inside_KV)
        exists_C, real_C = row_C < T - start, real_rows(mask, n, H, T, start, row_C)
        k_CK = read(k + start * k_stride_t, row_C, k_stride_t, k_K, real_C, K)
        b_C = tl.load(beta + n.to(tl.int64) * T + start + row_C, mask=real_C, other=0.0)
        rows_CK = k_CK
        if DECAY != "none":
            g = read_decay(log_f + start * log_f_stride_t, row_C, log_f_stride_t, k_K, real_C, K, DECAY)
            rows_CK = decayed(k_CK, tl.exp(tl.cumsum(g, 0)), DECAY)
        x_CV = read(v + start * v_stride_t, row_C, v_stride_t, v_V, real_C, V).to(tl.float32)
        x_CV -= product(rows_CK, state_KV, PRECISION)
        e_CV = solved(x_CV, b_C[:, None], X, at, row_C, False, REFINE, PRECISION)
        u_CV = b_C[:, None] * e_CV
        first_row = ((n // H).to(tl.int64) * T + start) * H + n % H
        write(u + first_row * V, u_CV, row_C, H * V, v_V, exists_C, V)
        if e is not None:
            write(e + first_row * V, e_CV, row_C, H * V, v_V, exists_C, V)
        if DECAY != "none":
            to_end = decay_to_end(log_f, log_f_stride_t, mask, n, H, T, start, row_C, k_K, K, DECAY)
            k_CK, state_KV = decayed(k_CK, to_end, DECAY), carried(state_KV, tl.exp(tl.sum(g, 0)), DECAY)
        state_KV += product(tl.trans(k_CK), u_CV, PRECISION)
    tl.store(last + n.to(tl.int64) * K * V + entry_KV, state_KV, mask=inside_KV)


@triton.jit(do_not_specialize=LENGTHS)
def walk_back_kernel(
    q, k, grad, log_f, beta, mask, X, e, du, dlast, ends, u, dv, dbeta, dfirst, H, T,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    k_stride_b: tl.int64, k_stride_h: tl.int64, k_stride_t: tl.int64,
    grad_stride_b: tl.int64, grad_stride_h: tl.int64, grad_stride_t: tl.int64,
    log_f_stride_b: tl.int64, log_f_stride_h: tl.int64, log_f_stride_t: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SHARE: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, REFINE: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Walk back over the chunks: store R after each chunk, dv, and u again; each tile stores its part of dbeta.

    `du` holds the part of u's gradient from inside the chunk.
    """
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    v_tile, n = tl.program_id(0) % V_TILES, tl.program_id(0) // V_TILES
    k_K, v_V, row_C = tl.arange(0, BLOCK_K), v_tile * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, C)
    inside_KV = (k_K < K)[:, None] & (v_V < V)[None, :]
    entry_KV = k_K[:, None] * V + v_V[None, :]
    q = of_head(q, n // SHARE, H // SHARE, q_stride_b, q_stride_h, ALIGNED)
    k = of_head(k, n // SHARE, H // SHARE, k_stride_b, k_stride_h, ALIGNED)
    grad = of_head(grad, n, H, grad_stride_b, grad_stride_h, ALIGNED)
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")
    dbeta += v_tile.to(tl.int64) * (tl.num_programs(0) // V_TILES) * T
    R_KV = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if dlast is not None:
        R_KV += tl.load(dlast + n.to(tl.int64) * K * V + entry_KV, mask=inside_KV, other=0.0)

    chunks = tl.cdiv(T, C)
    for step in range(chunks):
        chunk = chunks - 1 - step
        start = chunk * C
        at = n.to(tl.int64) * chunks + chunk
        tl.store(ends + at * K * V + entry_KV, operand(R_KV, PRECISION), mask=inside_KV)
        exists_C, real_C = row_C < T - start, real_rows(mask, n, H, T, start, row_C)
        k_CK = read(k + start * k_stride_t, row_C, k_stride_t, k_K, real_C, K)
        do_CV = read(grad + start * grad_stride_t, row_C, grad_stride_t, v_V, real_C, V)
        at_C = n.to(tl.int64) * T + start + row_C
        b_C1 = tl.load(beta + at_C, mask=real_C, other=0.0)[:, None]
        columns_CK = k_CK
        if DECAY != "none":
            to_end = decay_to_end(log_f, log_f_stride_t, mask, n, H, T, start, row_C, k_K, K, DECAY)
            columns_CK = decayed(k_CK, to_end, DECAY)
        first_row = ((n // H).to(tl.int64) * T + start) * H + n % H
        e_CV = read(e + first_row * V, row_C, H * V, v_V, real_C, V).to(tl.float32)
        du_CV = read(du + first_row * V, row_C, H * V, v_V, real_C, V).to(tl.float32)
        du_CV += product(columns_CK, R_KV, PRECISION)
        g_CV = solved(du_CV, b_C1, X, at, row_C, True, REFINE, PRECISION)
        tl.store(dbeta + at_C, tl.sum(g_CV * e_CV, 1), mask=exists_C)
        write(dv + first_row * V, b_C1 * g_CV, row_C, H * V, v_V, exists_C, V)
        write(u + first_row * V, b_C1 * e_CV, row_C, H * V, v_V, exists_C, V)
        q_CK = read(q + start * q_stride_t, row_C, q_stride_t, k_K, real_C, K)
        if DECAY != "none":
            g = read_decay(log_f + start * log_f_stride_t, row_C, log_f_stride_t, k_K, real_C, K, DECAY)
            to_row = tl.exp(tl.cumsum(g, 0))
            q_CK, k_CK = decayed(q_CK, to_row, DECAY), decayed(k_CK, to_row, DECAY)
            R_KV = carried(R_KV, tl.exp(tl.sum(g, 0)), DECAY)
        R_KV += product(tl.trans(q_CK), do_CV, PRECISION) - product(tl.trans(k_CK), b_C1 * g_CV, PRECISION)
    tl.store(dfirst + n.to(tl.int64) * K * V + entry_KV, R_KV, mask=inside_KV)


@triton.jit(do_not_specialize=LENGTHS)
def delta_step_kernel(
    q, k, v, log_f, beta, mask, before, out, after, H,
    q_stride_b: tl.int64, q_stride_h: tl.int64, k_stride_b: tl.int64, k_stride_h: tl.int64, v_stride_b: tl.int64,
    v_stride_h: tl.int64, log_f_stride_b: tl.int64, log_f_stride_h: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SHARE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute one token's output and the state after it, in one launch."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    n = tl.program_id(0) // V_TILES
    k_K, v_V = tl.arange(0, BLOCK_K), tl.program_id(0) % V_TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_KV = (k_K < K)[:, None] & (v_V < V)[None, :]
    entry_KV = n.to(tl.int64) * K * V + k_K[:, None] * V + v_V[None, :]
    real = True
    if mask is not None:
        real = tl.load(mask + n // H) != 0
    exists_K = (k_K < K) & real
    q_K = tl.load(of_head(q, n // SHARE, H // SHARE, q_stride_b, q_stride_h, False) + k_K, mask=exists_K, other=0.0)
    i_K = tl.load(of_head(k, n // SHARE, H // SHARE, k_stride_b, k_stride_h, False) + k_K, mask=exists_K, other=0.0)
    e_V = tl.load(of_head(v, n, H, v_stride_b, v_stride_h, False) + v_V, mask=(v_V < V) & real, other=0.0)
    q_K, i_K, e_V = q_K.to(tl.float32), i_K.to(tl.float32), e_V.to(tl.float32)
    b = tl.load(beta + n, mask=real, other=0.0)
    state_KV = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if before is not None:
        state_KV += tl.load(before + entry_KV, mask=inside_KV, other=0.0)
    if DECAY == "head":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, False)
        state_KV *= tl.exp(tl.load(log_f, mask=real, other=0.0).to(tl.float32))
    elif DECAY == "channel":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, False)
        state_KV *= tl.exp(tl.load(log_f + k_K, mask=exists_K, other=0.0).to(tl.float32))[:, None]
    e_V -= tl.sum(i_K[:, None] * state_KV, 0)
    state_KV += i_K[:, None] * (b * e_V)[None, :]
    tl.store(after + entry_KV, state_KV, mask=inside_KV)
    tl.store(out + n.to(tl.int64) * V + v_V, cast(tl.sum(q_K[:, None] * state_KV, 0), out), mask=v_V < V)
