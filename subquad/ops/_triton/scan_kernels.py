"""Kernels of the gated scan: states between chunks, outputs, one decoding step, and their shared functions.

    S_t = f_t * S_{t-1} + i_t (x) v_t,    o_t = q_t S_t,    or over  q_t . z_t + eps  with  z_t = f_t * z_{t-1} + i_t

A first kernel walks over the chunks in order and stores the state at the start of each; with few heads it walks over
several segments at a time. Only this is sequential. A second kernel computes all chunks in parallel: the state's part
of each output plus the scores inside the chunk times its values. The backward pass walks from the last chunk back.

Matrix products round their operands as tensor cores do (PRECISION): `bf16` for bfloat16 inputs; `tf32` for float16,
because sums over a long past leave float16's range; `ieee` for plain float32. Accumulators are always float32.

Shape letters: C rows of a chunk, K key channels, V value channels, L either. q, i, v and log f are read with their
strides, so no layout is copied first, and SHARE neighbouring heads read the same q and i; the others are contiguous:
outputs `[B, T, H, .]`, totals `[B, H, T]`, states `[B, H, chunks, K, V]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton import common

FORGET_ALL = tl.constexpr(-1e4)  # its exp is 0 and its sums are finite: -inf - (-inf) would be NaN
INTERPRETED = tl.constexpr(common.INTERPRETED)
LENGTHS = [
    "T",
    "segments",
    "per",
    *(f"{x}_stride_{dim}" for x in ("q", "i", "k", "v", "log_f", "grad", "a", "b") for dim in "bh"),
]
"""Not specialised, so a new length doesn't recompile: the length, and counts and strides that depend on it."""


@triton.jit
def rounded(x, BITS: tl.constexpr):
    """Round float32 `x` to the nearest number without its last `BITS` mantissa bits, ties to even."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits += ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)
    return (bits & -(1 << BITS)).to(tl.float32, bitcast=True)


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """Round `x` to a product's operand. The interpreter has no bfloat16 and rounds in float32 instead."""
    if PRECISION == "bf16":
        if INTERPRETED:
            x = rounded(x, 16)
        else:
            x = x.to(tl.bfloat16)
    elif PRECISION == "tf32":
        x = rounded(x, 13)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return `a @ b`, accumulated in float32."""
    if PRECISION == "tf32":
        ab = tl.dot(operand(a, PRECISION), operand(b, PRECISION), input_precision="tf32")
    else:
        ab = tl.dot(operand(a, PRECISION), operand(b, PRECISION), input_precision="ieee")
    return ab


@triton.jit
def sums_of_rows(chosen_CC, x_CL, PRECISION: tl.constexpr):
    """Return `chosen @ x` for a 0/1 matrix `chosen`.

    x is split into its rounded part and the remainder, which doubles the bits that reach the sum: the sums are
    exponents, where a relative error of bfloat16 would become a factor.
    """
    ones_CC = chosen_CC.to(tl.float32)
    sums_CL = product(ones_CC, x_CL, PRECISION)
    if PRECISION != "ieee":
        sums_CL += product(ones_CC, x_CL - operand(x_CL, PRECISION).to(tl.float32), PRECISION)
    return sums_CL


@triton.jit
def lower_product(lower_CC, x_CL, row_C, PRECISION: tl.constexpr):
    """Return `lower @ x` for lower triangles; NaN from the first row of x on that is not finite.

    Those rows of x are left out: the zeros above the diagonal, times infinity, would turn earlier rows into NaN.
    """
    x_CL = operand(x_CL, PRECISION)
    wrong_C = tl.max(tl.where(tl.abs(x_CL.to(tl.float32)) < float("inf"), 0, 1), -1)
    first_1 = tl.min(tl.where(wrong_C == 0, row_C.shape[0], row_C), -1, keep_dims=True)
    kept_C1 = tl.expand_dims(row_C < first_1, -1)
    y_CL = product(lower_CC, tl.where(kept_C1, x_CL, 0.0), PRECISION)
    return tl.where(kept_C1, y_CL, float("nan"))


@triton.jit
def of_head(x, n, H, stride_b, stride_h, ALIGNED: tl.constexpr):
    """Return the pointer to the first token of head n of B * H.

    ALIGNED promises that heads begin at multiples of 16 elements, so that Triton loads vectors. The offset is int64
    because B * H * T * K may exceed 2^31.
    """
    offset = (n // H).to(tl.int64) * stride_b + (n % H).to(tl.int64) * stride_h
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return x + offset


@triton.jit
def real_rows(mask, n, H, T, start, row_C):
    """Return the bool `[C]` of rows in the chunk that hold a real token: before T and not padding."""
    real_C = row_C < T - start
    if mask is not None:
        real_C = real_C & (tl.load(mask + (n // H).to(tl.int64) * T + start + row_C, mask=real_C, other=0) != 0)
    return real_C


@triton.jit
def read(x, row_C, stride_t, channel_L, real_C, LENGTH: tl.constexpr):
    """Load rows `[C, L]`, zeros at missing tokens and channels, so that padding, even NaN, enters no product."""
    pointers = x + row_C[:, None] * stride_t + channel_L[None, :]
    x_CL = tl.load(pointers, mask=real_C[:, None] & (channel_L < LENGTH)[None, :], other=0.0)
    if INTERPRETED:
        x_CL = x_CL.to(tl.float32)
    return x_CL


@triton.jit
def cast(x, pointer):
    """Cast `x` to the pointer's dtype."""
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:  # the interpreter's cast truncates
        x = rounded(x, 16)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def write(x, x_CL, row_C, stride_t, channel_L, exists_C, LENGTH: tl.constexpr):
    """Store rows `[C, L]`."""
    pointers = x + row_C[:, None] * stride_t + channel_L[None, :]
    tl.store(pointers, cast(x_CL, x), mask=exists_C[:, None] & (channel_L < LENGTH)[None, :])


@triton.jit
def read_state(states, k_K, v_V, K: tl.constexpr, V: tl.constexpr):
    """Load a tile `[K, V]` of a state."""
    inside = (k_K < K)[:, None] & (v_V < V)[None, :]
    state_KV = tl.load(states + k_K[:, None] * V + v_V[None, :], mask=inside, other=0.0)
    if INTERPRETED:
        state_KV = state_KV.to(tl.float32)
    return state_KV


@triton.jit
def read_decay(log_f, row_C, stride_t, k_K, real_C, K: tl.constexpr, DECAY: tl.constexpr):
    """Load the logarithms of the decays, `[C]` or `[C, K]`, no lower than FORGET_ALL."""
    if DECAY == "head":
        g = tl.load(log_f + row_C * stride_t, mask=real_C, other=0.0).to(tl.float32)
    else:
        g = read(log_f, row_C, stride_t, k_K, real_C, K).to(tl.float32)
    return tl.maximum(g, FORGET_ALL)


@triton.jit
def decays(g, row_C, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """Return the decays from the chunk's start to each row, from each row to its end, and from its start to its end.

    Each exponent is a sum of logarithms at or below zero, never a difference of two running sums: no overflow, and no
    digits lost by cancellation.
    """
    up_to_CC = row_C[None, :] <= row_C[:, None]
    if DECAY == "head":
        to_row = tl.sum(tl.where(up_to_CC, g[None, :], 0.0), 1)
        to_end = tl.sum(tl.where(up_to_CC, 0.0, g[None, :]), 1)
    else:
        to_row = sums_of_rows(up_to_CC, g, PRECISION)
        to_end = sums_of_rows(row_C[None, :] > row_C[:, None], g, PRECISION)
    return tl.exp(to_row), tl.exp(to_end), tl.exp(tl.sum(g, 0))


@triton.jit
def decayed(x_CL, decay, DECAY: tl.constexpr):
    """Multiply the rows by their decays, `[C]` or `[C, L]`."""
    if DECAY == "head":
        x_CL = x_CL.to(tl.float32) * decay[:, None]
    elif DECAY == "channel":
        x_CL = x_CL.to(tl.float32) * decay
    return x_CL


@triton.jit
def carried(state_KV, whole, DECAY: tl.constexpr):
    """Decay the state from one end of a chunk to the other."""
    if DECAY == "head":
        state_KV *= whole
    elif DECAY == "channel":
        state_KV *= whole[:, None]
    return state_KV


@triton.jit
def decay_between(g_C, row_C):
    """Return `exp(g_{j+1} + ... + g_i)`, `[C, C]`, for j <= i; entries above, in [0, 1], are masked later."""
    # float64: the difference of two large running sums would lose its digits in float32.
    G_C = tl.cumsum(g_C.to(tl.float64), 0)
    return tl.exp(tl.minimum((G_C[:, None] - G_C[None, :]).to(tl.float32), 0.0))


@triton.constexpr_function
def levels(C):
    """Return how many times a chunk of C rows can be halved."""
    return C.bit_length() - 1


@triton.jit
def halving(q_CK, i_CK, g_CK, row_C, level, PRECISION: tl.constexpr):
    """Prepare the products between the two halves of each block of 2h rows, h = 2^level, for decays by channel.

    With one decay per channel the scores are not a single product: exp(G_i - G_j) = exp(G_i) exp(-G_j) overflows in its
    second factor. Seen from the border between the halves both factors are at most 1: a row of the second half is
    decayed from the border to the row, a row of the first half from the row to the border. Over all levels each pair of
    different rows meets exactly once.

    Returns the factors `[C, K]`; q (in second halves) or i (in first halves) times its factor; whether a row is in a
    second half `[C, 1]`; and which entries `[C, C]` pair the two halves of one block.
    """
    half_C, block_C = row_C >> level, row_C >> (level + 1)
    second_C1 = ((half_C & 1) == 1)[:, None]
    up_to_CC = row_C[None, :] <= row_C[:, None]
    same_half_CC = half_C[:, None] == half_C[None, :]
    factor_CK = tl.exp(sums_of_rows(same_half_CC & (up_to_CC == second_C1), g_CK, PRECISION))
    mixed_CK = tl.where(second_C1, q_CK, i_CK) * factor_CK
    pairs_CC = (block_C[:, None] == block_C[None, :]) & (half_C[:, None] != half_C[None, :])
    return factor_CK, mixed_CK, second_C1, pairs_CC


@triton.jit
def channel_scores(q_CK, i_CK, g_CK, row_C, PRECISION: tl.constexpr):
    """Return `sum_k q_ik i_jk exp(g_{j+1,k} + ... + g_ik)` for j <= i, else zero."""
    q_CK, i_CK = q_CK.to(tl.float32), i_CK.to(tl.float32)
    scores_CC = tl.where(row_C[:, None] == row_C[None, :], tl.sum(q_CK * i_CK, 1)[:, None], 0.0)
    for level in range(levels(row_C.shape[0])):
        _, mixed_CK, _, pairs_CC = halving(q_CK, i_CK, g_CK, row_C, level, PRECISION)
        # One product of the mixed rows with themselves gives q i^T of the pairs below the diagonal; the rest is masked.
        pairs_CC = pairs_CC & (row_C[None, :] < row_C[:, None])
        scores_CC += tl.where(pairs_CC, product(mixed_CK, tl.trans(mixed_CK), PRECISION), 0.0)
    return scores_CC


@triton.jit
def channel_gradients(q_CK, i_CK, g_CK, grad_CC, row_C, PRECISION: tl.constexpr):
    """Return the gradients of q and i through `channel_scores`; `grad` must be zero on and above the diagonal."""
    dq_CK, di_CK = tl.zeros_like(q_CK), tl.zeros_like(i_CK)
    both_CC = grad_CC + tl.trans(grad_CC)
    for level in range(levels(row_C.shape[0])):
        factor_CK, mixed_CK, second_C1, pairs_CC = halving(q_CK, i_CK, g_CK, row_C, level, PRECISION)
        grad_CK = product(tl.where(pairs_CC, both_CC, 0.0), mixed_CK, PRECISION) * factor_CK
        dq_CK += tl.where(second_C1, grad_CK, 0.0)
        di_CK += tl.where(second_C1, 0.0, grad_CK)
    return dq_CK, di_CK


@triton.jit
def scores_and_sums(
    q, q_stride_t, i, i_stride_t, log_f, log_f_stride_t, states, z_states, row_C, real_C, v_V,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, NORMALISE: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return one chunk's scores `[C, C]`, zero above the diagonal, and its rows' products with S `[C, V]` and z `[C]`.

    The rows are queries, and S and z those at the chunk's start; with BACKWARD the rows are inputs, and S is the
    gradient of the state at the chunk's end. Without `states` S is zero. K is read in blocks of BLOCK_K, so that tiles
    fit into registers.
    """
    C: tl.constexpr = row_C.shape[0]
    scores_CC = tl.zeros([C, C], tl.float32)
    sums_CV = tl.zeros([C, v_V.shape[0]], tl.float32)
    z_C = tl.zeros([C], tl.float32)
    for k_start in range(0, K, BLOCK_K):
        k_K = k_start + tl.arange(0, BLOCK_K)
        q_CK = read(q, row_C, q_stride_t, k_K, real_C, K)
        i_CK = read(i, row_C, i_stride_t, k_K, real_C, K)
        rows_CK = i_CK if BACKWARD else q_CK
        if DECAY == "channel":
            g_CK = read_decay(log_f, row_C, log_f_stride_t, k_K, real_C, K, DECAY)
            to_row, to_end, _ = decays(g_CK, row_C, DECAY, PRECISION)
            scores_CC += channel_scores(q_CK, i_CK, g_CK, row_C, PRECISION)
            rows_CK = rows_CK.to(tl.float32) * (to_end if BACKWARD else to_row)
        else:
            scores_CC += product(q_CK, tl.trans(i_CK), PRECISION)
        if states is not None:
            sums_CV += product(rows_CK, read_state(states, k_K, v_V, K, V), PRECISION)
        if NORMALISE and not BACKWARD:
            z_K = tl.load(z_states + k_K, mask=k_K < K, other=0.0)
            z_C += tl.sum(rows_CK.to(tl.float32) * z_K[None, :], 1)
    if DECAY == "head":
        g_C = read_decay(log_f, row_C, log_f_stride_t, row_C, real_C, K, DECAY)
        to_row, to_end, _ = decays(g_C, row_C, DECAY, PRECISION)
        scores_CC *= decay_between(g_C, row_C)
        sums_CV *= (to_end if BACKWARD else to_row)[:, None]
        z_C *= to_row
    scores_CC = tl.where(row_C[None, :] <= row_C[:, None], scores_CC, 0.0)
    return scores_CC, sums_CV, z_C


@triton.jit(do_not_specialize=LENGTHS)
def states_kernel(
    a, b, log_f, mask, total, dtotal, first, sums, products, states, z_states, last, H, T, segments, per,
    a_stride_b: tl.int64, a_stride_h: tl.int64, a_stride_t: tl.int64,
    b_stride_b: tl.int64, b_stride_h: tl.int64, b_stride_t: tl.int64,
    log_f_stride_b: tl.int64, log_f_stride_h: tl.int64, log_f_stride_t: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SHARE: tl.constexpr, NORMALISE: tl.constexpr,
    BACKWARD: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Walk over a segment's chunks, `S <- decay * S + (a * decay)^T b`; store S before each chunk and the last S.

    Forward, a is i and b is v. BACKWARD walks from the last chunk to the first with q and the outputs' gradients
    (divided by the totals with NORMALISE), and stores the gradient of the state at each chunk's end. A program owns a
    tile [BLOCK_K, BLOCK_V] of the state for the whole walk, so the state stays in registers; tiles are independent.

    Segments of `per` chunks, numbered in the order of the walk, run at the same time: each starts from `first` and, for
    the segments before it, the `sums` and the `products` of decays. A launch with SUMS stores only these, by walks that
    start from zero.
    """
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    W: tl.constexpr = V + NORMALISE
    v_tile, segment = tl.program_id(0) % V_TILES, tl.program_id(1)
    n = tl.program_id(0) // V_TILES // K_TILES
    k_K = tl.program_id(0) // V_TILES % K_TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    v_V = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    row_C = tl.arange(0, C)
    inside_KV = (k_K < K)[:, None] & (v_V < V)[None, :]
    a = of_head(a, n // SHARE, H // SHARE, a_stride_b, a_stride_h, ALIGNED)
    b = of_head(b, n, H, b_stride_b, b_stride_h, ALIGNED)
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")

    sums += n.to(tl.int64) * (segments - 1) * K * W
    products += n.to(tl.int64) * (segments - 1) * K
    entry_KV, entry_K = k_K[:, None] * W + v_V[None, :], k_K * W + V
    state_KV, z_K = tl.zeros([BLOCK_K, BLOCK_V], tl.float32), tl.zeros([BLOCK_K], tl.float32)
    product_K = tl.full([BLOCK_K], 1.0, tl.float32)
    if not SUMS:
        if first is not None:
            first += n.to(tl.int64) * K * W
            state_KV += tl.load(first + entry_KV, mask=inside_KV, other=0.0)
            if NORMALISE:
                z_K += tl.load(first + entry_K, mask=k_K < K, other=0.0)
        for earlier in range(segment):
            if DECAY != "none":
                kept_K = tl.load(products + earlier * K + k_K, mask=k_K < K, other=0.0)
                state_KV, z_K = state_KV * kept_K[:, None], z_K * kept_K
            state_KV += tl.load(sums + earlier * K * W + entry_KV, mask=inside_KV, other=0.0)
            if NORMALISE:
                z_K += tl.load(sums + earlier * K * W + entry_K, mask=k_K < K, other=0.0)

    chunks = tl.cdiv(T, C)
    for step in range(segment * per, tl.minimum(segment * per + per, chunks)):
        chunk = chunks - 1 - step if BACKWARD else step
        start = chunk * C
        at = n.to(tl.int64) * chunks + chunk
        if not SUMS:  # rounded as the outputs' kernel reads it; the walk continues with the float32 accumulator
            kept = states + at * K * V + k_K[:, None] * V + v_V[None, :]
            tl.store(kept, operand(state_KV, PRECISION), mask=inside_KV)
        real_C = real_rows(mask, n, H, T, start, row_C)
        a_CK = read(a + start * a_stride_t, row_C, a_stride_t, k_K, real_C, K)
        b_CV = read(b + start * b_stride_t, row_C, b_stride_t, v_V, real_C, V)
        z_C = real_C.to(tl.float32)
        if BACKWARD and NORMALISE:
            z_C = tl.load(dtotal + n.to(tl.int64) * T + start + row_C, mask=real_C, other=0.0)
        if DECAY != "none":
            g = read_decay(log_f + start * log_f_stride_t, row_C, log_f_stride_t, k_K, real_C, K, DECAY)
            to_row, to_end, whole = decays(g, row_C, DECAY, PRECISION)
            a_CK = decayed(a_CK, to_row if BACKWARD else to_end, DECAY)
            state_KV = carried(state_KV, whole, DECAY)
            product_K *= whole
        if NORMALISE:
            if v_tile == 0:  # z has no value channels: one of the programs that share k writes it
                if not SUMS:
                    tl.store(z_states + at * K + k_K, z_K, mask=k_K < K)
                if DECAY != "none":
                    z_K *= whole
                z_K += tl.sum(a_CK.to(tl.float32) * z_C[:, None], 0)
            if BACKWARD:
                total_C = tl.load(total + n.to(tl.int64) * T + start + row_C, mask=real_C, other=1.0)
                a_CK = a_CK.to(tl.float32) * (1.0 / total_C)[:, None]
        state_KV += product(tl.trans(a_CK), b_CV, PRECISION)

    if SUMS or segment == segments - 1:
        end = sums + segment * K * W if SUMS else last + n.to(tl.int64) * K * W
        tl.store(end + entry_KV, state_KV, mask=inside_KV)
        if NORMALISE and v_tile == 0:
            tl.store(end + entry_K, z_K, mask=k_K < K)
        if SUMS and DECAY != "none" and v_tile == 0:
            tl.store(products + segment * K + k_K, product_K, mask=k_K < K)


@triton.jit(do_not_specialize=LENGTHS)
def outputs_kernel(
    q, i, v, log_f, mask, states, z_states, out, total, eps, H, T,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    i_stride_b: tl.int64, i_stride_h: tl.int64, i_stride_t: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_t: tl.int64,
    log_f_stride_b: tl.int64, log_f_stride_h: tl.int64, log_f_stride_t: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SHARE: tl.constexpr, NORMALISE: tl.constexpr,
    DELTA: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute one chunk's outputs and totals: the sums of weights plus eps, or infinity if that is zero.

    With an infinite total, a token whose weights are all zero has output zero and finite gradients. With DELTA, v may
    have overflowed from some row on; the bits of earlier rows do not change.
    """
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
    v = of_head(v, n, H, v_stride_b, v_stride_h, ALIGNED) + start * v_stride_t
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")
        log_f += start * log_f_stride_t

    scores_CC, out_CV, total_C = scores_and_sums(
        *(q, q_stride_t, i, i_stride_t, log_f, log_f_stride_t, states + at * K * V, z_states + at * K),
        *(row_C, real_C, v_V, K, V, DECAY, NORMALISE, False, BLOCK_K, PRECISION),
    )
    v_CV = read(v, row_C, v_stride_t, v_V, real_C, V)
    if DELTA:
        out_CV += lower_product(scores_CC, v_CV, row_C, PRECISION)
    else:
        out_CV += product(scores_CC, v_CV, PRECISION)
    if NORMALISE:
        total_C += tl.sum(scores_CC, 1) + eps
        total_C = tl.where(total_C == 0, float("inf"), total_C)
        out_CV /= total_C[:, None]
        if v_tile == 0:
            tl.store(total + n.to(tl.int64) * T + start + row_C, total_C, mask=row_C < T - start)
    out += ((n // H).to(tl.int64) * T + start) * H * V + (n % H) * V
    write(out, out_CV, row_C, H * V, v_V, row_C < T - start, V)


@triton.jit(do_not_specialize=LENGTHS)
def step_kernel(
    q, i, v, log_f, mask, before, out, after, eps, H,
    q_stride_b: tl.int64, q_stride_h: tl.int64, i_stride_b: tl.int64, i_stride_h: tl.int64, v_stride_b: tl.int64,
    v_stride_h: tl.int64, log_f_stride_b: tl.int64, log_f_stride_h: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, SHARE: tl.constexpr, NORMALISE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute one token's output and the state after it. A single launch, since these take most of a decoding step."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    W: tl.constexpr = V + NORMALISE
    v_tile, n = tl.program_id(0) % V_TILES, tl.program_id(0) // V_TILES
    v_V = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real = True
    if mask is not None:
        real = tl.load(mask + n // H) != 0
    q = of_head(q, n // SHARE, H // SHARE, q_stride_b, q_stride_h, False)
    i = of_head(i, n // SHARE, H // SHARE, i_stride_b, i_stride_h, False)
    v = of_head(v, n, H, v_stride_b, v_stride_h, False)
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, False)
    v_1V = tl.load(v + v_V, mask=(v_V < V) & real, other=0.0).to(tl.float32)[None, :]
    out_V = tl.zeros([BLOCK_V], tl.float32)
    total = 0.0
    for k_start in range(0, K, BLOCK_K):
        k_K = k_start + tl.arange(0, BLOCK_K)
        exists_K, inside_KV = k_K < K, (k_K < K)[:, None] & (v_V < V)[None, :]
        entry_KV = n.to(tl.int64) * K * W + k_K[:, None] * W + v_V[None, :]
        entry_K = n.to(tl.int64) * K * W + k_K * W + V
        q_K = tl.load(q + k_K, mask=exists_K & real, other=0.0).to(tl.float32)
        i_K = tl.load(i + k_K, mask=exists_K & real, other=0.0).to(tl.float32)
        f_K = tl.full([BLOCK_K], 1.0, tl.float32)
        if DECAY == "head":
            f_K *= tl.exp(tl.load(log_f, mask=real, other=0.0).to(tl.float32))
        elif DECAY == "channel":
            f_K = tl.exp(tl.load(log_f + k_K, mask=exists_K & real, other=0.0).to(tl.float32))
        state_KV = i_K[:, None] * v_1V
        z_K = i_K
        if before is not None:
            state_KV += f_K[:, None] * tl.load(before + entry_KV, mask=inside_KV, other=0.0)
            if NORMALISE:
                z_K += f_K * tl.load(before + entry_K, mask=exists_K, other=0.0)
        tl.store(after + entry_KV, state_KV, mask=inside_KV)
        out_V += tl.sum(q_K[:, None] * state_KV, 0)
        if NORMALISE:
            total += tl.sum(q_K * z_K)
            if v_tile == 0:
                tl.store(after + entry_K, z_K, mask=exists_K)
    if NORMALISE:
        total += eps
        out_V /= tl.where(total == 0, float("inf"), total)
    tl.store(out + n.to(tl.int64) * V + v_V, cast(out_V, out), mask=v_V < V)
