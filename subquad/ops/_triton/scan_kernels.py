"""The gated scan's kernels: states between chunks, outputs, one step of decoding, and helpers of all scan kernels.

    S_t = f_t * S_{t-1} + i_t (x) v_t,    o_t = q_t S_t,    or over  q_t . z_t + eps  with  z_t = f_t * z_{t-1} + i_t

One kernel walks over the chunks and stores the state at the start of each. Only this walk is sequential: the next one
computes the outputs of all chunks in parallel, queries times state plus scores inside the chunk times values. The same
walk backward stores the gradients of states.

A decay is the exponential of a sum of log f <= 0. The sum is made from its own terms (with one decay per head also as a
float64 difference): a difference of two large float32 sums would lose digits, and a factor exp(-sum) could overflow.

Products take operands as tensor cores do (PRECISION): `bf16` for bfloat16 inputs; `tf32` for float16, whose range sums
over a long past would exceed; `ieee` for float32. They accumulate in float32.

Shape letters: C rows of a chunk, K key channels, V value channels, L either of the two. q, i, v and log f come with
strides; other tensors are contiguous: outputs `[B, T, H, .]`, totals `[B, H, T]`, states `[B, H, chunks, K, V]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton import common

FORGET_ALL = tl.constexpr(-1e4)
INTERPRETED = tl.constexpr(common.INTERPRETED)
LENGTHS = ["T", *(f"{x}_stride_{dim}" for x in ("q", "i", "v", "log_f", "grad", "a", "b") for dim in "bh")]
"""Not specialised, so a new length, which changes these strides too, doesn't recompile."""


@triton.jit
def rounded(x, BITS: tl.constexpr):
    """Round float32 `x` to a number without its last `BITS` bits, ties to even."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits += ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)
    return (bits & -(1 << BITS)).to(tl.float32, bitcast=True)


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """Return `x` as a matrix product reads it. The interpreter lacks bfloat16 arithmetic and rounds in float32."""
    if PRECISION == "bf16":
        if INTERPRETED:
            x = rounded(x, 16)
        else:
            x = x.to(tl.bfloat16)
    elif PRECISION == "tf32":
        x = rounded(x, 13)  # tensor cores would cut these bits off
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """`a @ b`, accumulated in float32."""
    if PRECISION == "tf32":
        ab = tl.dot(operand(a, PRECISION), operand(b, PRECISION), input_precision="tf32")
    else:
        ab = tl.dot(operand(a, PRECISION), operand(b, PRECISION), input_precision="ieee")
    return ab


@triton.jit
def sums_of_rows(chosen_CC, x_CL, PRECISION: tl.constexpr):
    """`chosen @ x` for a matrix of zeros and ones, with x in two pieces for twice the bits of an operand.

    These sums are exponents, whose absolute error is a relative error of the decay.
    """
    ones_CC = chosen_CC.to(tl.float32)
    sums_CL = product(ones_CC, x_CL, PRECISION)
    if PRECISION != "ieee":
        sums_CL += product(ones_CC, x_CL - operand(x_CL, PRECISION).to(tl.float32), PRECISION)
    return sums_CL


@triton.jit
def of_head(x, n, H, stride_b, stride_h, ALIGNED: tl.constexpr):
    """Return the pointer to the first token of head n of B * H; ALIGNED: heads begin at multiples of 16."""
    # int64: the tensors of a long batch have more than 2^31 entries.
    offset = (n // H).to(tl.int64) * stride_b + (n % H).to(tl.int64) * stride_h
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return x + offset


@triton.jit
def real_rows(mask, n, H, T, start, row_C):
    """Return bool `[C]`: True for rows of the chunk that hold a token."""
    real_C = row_C < T - start
    if mask is not None:
        real_C = real_C & (tl.load(mask + (n // H).to(tl.int64) * T + start + row_C, mask=real_C, other=0) != 0)
    return real_C


@triton.jit
def read(x, row_C, stride_t, channel_L, real_C, LENGTH: tl.constexpr):
    """Load rows `[C, L]`, with zeros for missing tokens and channels: an input of zero adds nothing to the state."""
    pointers = x + row_C[:, None] * stride_t + channel_L[None, :]
    x_CL = tl.load(pointers, mask=real_C[:, None] & (channel_L < LENGTH)[None, :], other=0.0)
    if INTERPRETED:
        x_CL = x_CL.to(tl.float32)
    return x_CL


@triton.jit
def cast(x, pointer):
    """Return `x` in the dtype of the pointer's entries."""
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:  # its cast truncates
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
    """Load log decays, `[C]` or `[C, K]`: 0 at padding, which so decays nothing, and finite, so that sums are."""
    if DECAY == "head":
        g = tl.load(log_f + row_C * stride_t, mask=real_C, other=0.0).to(tl.float32)
    else:
        g = read(log_f, row_C, stride_t, k_K, real_C, K).to(tl.float32)
    return tl.maximum(g, FORGET_ALL)


@triton.jit
def decays(g, row_C, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """Return the decays from the chunk's start to each row, from each row to the end, and from start to end."""
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
    """Multiply rows by their decays, `[C]` or `[C, L]`."""
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
    """`exp(g_{j+1} + ... + g_i)`, `[C, C]`, for j <= i; entries above are unused and lie in [0, 1]."""
    # float64: neighbours differ little, their sums are large. The minimum keeps unused entries finite.
    G_C = tl.cumsum(g_C.to(tl.float64), 0)
    return tl.exp(tl.minimum((G_C[:, None] - G_C[None, :]).to(tl.float32), 0.0))


@triton.constexpr_function
def levels(C):
    """Return the number of halvings of a chunk of C rows."""
    return C.bit_length() - 1


@triton.jit
def halving(q_CK, i_CK, g_CK, row_C, level, PRECISION: tl.constexpr):
    """Split the decays by channel between the halves of blocks of 2h rows, h = 2^level, into two factors.

    The decay from row j to row i is a product of a factor of i and a factor of j, both at most 1, only if a reference
    row lies between them. Here that is the border of the halves: a row of a second half has the decay from the border
    to it, a row of a first half the decay from it to the border. Over all levels each pair of rows meets once.

    Returns the factors `[C, K]`, q (second halves) or i (first halves) times the factors, bool `[C, 1]` for rows in a
    second half, and bool `[C, C]` for entries that pair the two halves of a block. q and i share one matrix, since a
    row needs only one of them at a level.
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
    """`sum_k q_ik i_jk exp(g_{j+1,k} + ... + g_ik)` for j <= i, else zero, by halves."""
    q_CK, i_CK = q_CK.to(tl.float32), i_CK.to(tl.float32)
    scores_CC = tl.where(row_C[:, None] == row_C[None, :], tl.sum(q_CK * i_CK, 1)[:, None], 0.0)
    for level in range(levels(row_C.shape[0])):
        _, mixed_CK, _, pairs_CC = halving(q_CK, i_CK, g_CK, row_C, level, PRECISION)
        pairs_CC = pairs_CC & (row_C[None, :] < row_C[:, None])
        scores_CC += tl.where(pairs_CC, product(mixed_CK, tl.trans(mixed_CK), PRECISION), 0.0)
    return scores_CC


@triton.jit
def channel_gradients(q_CK, i_CK, g_CK, grad_CC, row_C, PRECISION: tl.constexpr):
    """Return the gradients of q and i through `channel_scores` below the diagonal; `grad` must be zero elsewhere."""
    dq_CK, di_CK = tl.zeros_like(q_CK), tl.zeros_like(i_CK)
    # Symmetric, so that one product per level serves the rows of both halves.
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
    """Return a chunk's scores `[C, C]`, zero above the diagonal, and its rows times a state `[C, V]` and times z `[C]`.

    The rows are queries, which meet the state at the chunk's start, or, if BACKWARD, inputs, which meet it at the end.
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
    a, b, log_f, mask, total, dtotal, first, states, z_states, last, H, T,
    a_stride_b: tl.int64, a_stride_h: tl.int64, a_stride_t: tl.int64,
    b_stride_b: tl.int64, b_stride_h: tl.int64, b_stride_t: tl.int64,
    log_f_stride_b: tl.int64, log_f_stride_h: tl.int64, log_f_stride_t: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, NORMALISE: tl.constexpr, BACKWARD: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks: `S <- decay * S + (a * decay)^T b` from `first` to `last`; store S before each chunk.

    Forward, a is i and b is v. BACKWARD goes from the last chunk to the first with q and the outputs' gradients,
    divided by the totals if NORMALISE: the states are then gradients of the state at each chunk's end.
    """
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    W: tl.constexpr = V + NORMALISE
    v_tile = tl.program_id(0) % V_TILES
    n = tl.program_id(0) // V_TILES // K_TILES
    k_K = tl.program_id(0) // V_TILES % K_TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    v_V = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    row_C = tl.arange(0, C)
    inside_KV = (k_K < K)[:, None] & (v_V < V)[None, :]
    a = of_head(a, n, H, a_stride_b, a_stride_h, ALIGNED)
    b = of_head(b, n, H, b_stride_b, b_stride_h, ALIGNED)
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")

    entry_KV = n.to(tl.int64) * K * W + k_K[:, None] * W + v_V[None, :]
    entry_K = n.to(tl.int64) * K * W + k_K * W + V
    state_KV = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    z_K = tl.zeros([BLOCK_K], tl.float32)
    if first is not None:
        state_KV += tl.load(first + entry_KV, mask=inside_KV, other=0.0)
        if NORMALISE:
            z_K += tl.load(first + entry_K, mask=k_K < K, other=0.0)

    chunks = tl.cdiv(T, C)
    for step in range(chunks):
        chunk = chunks - 1 - step if BACKWARD else step
        start = chunk * C
        at = n.to(tl.int64) * chunks + chunk
        # Only the stored copy is rounded, as products read it so; the walk goes on in float32.
        tl.store(states + at * K * V + k_K[:, None] * V + v_V[None, :], operand(state_KV, PRECISION), mask=inside_KV)
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
        if NORMALISE:
            if v_tile == 0:  # z has no value channels: one tile computes it
                tl.store(z_states + at * K + k_K, z_K, mask=k_K < K)
                if DECAY != "none":
                    z_K *= whole
                z_K += tl.sum(a_CK.to(tl.float32) * z_C[:, None], 0)
            if BACKWARD:
                total_C = tl.load(total + n.to(tl.int64) * T + start + row_C, mask=real_C, other=1.0)
                a_CK = a_CK.to(tl.float32) * (1.0 / total_C)[:, None]
        state_KV += product(tl.trans(a_CK), b_CV, PRECISION)

    tl.store(last + entry_KV, state_KV, mask=inside_KV)
    if NORMALISE and v_tile == 0:
        tl.store(last + entry_K, z_K, mask=k_K < K)


@triton.jit(do_not_specialize=LENGTHS)
def outputs_kernel(
    q, i, v, log_f, mask, states, z_states, out, total, eps, H, T,
    q_stride_b: tl.int64, q_stride_h: tl.int64, q_stride_t: tl.int64,
    i_stride_b: tl.int64, i_stride_h: tl.int64, i_stride_t: tl.int64,
    v_stride_b: tl.int64, v_stride_h: tl.int64, v_stride_t: tl.int64,
    log_f_stride_b: tl.int64, log_f_stride_h: tl.int64, log_f_stride_t: tl.int64,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, NORMALISE: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one chunk, and the sums of their weights plus eps (infinity instead of zero)."""
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
    v = of_head(v, n, H, v_stride_b, v_stride_h, ALIGNED) + start * v_stride_t
    if DECAY != "none":
        log_f = of_head(log_f, n, H, log_f_stride_b, log_f_stride_h, ALIGNED and DECAY == "channel")
        log_f += start * log_f_stride_t

    scores_CC, out_CV, total_C = scores_and_sums(
        *(q, q_stride_t, i, i_stride_t, log_f, log_f_stride_t, states + at * K * V, z_states + at * K),
        *(row_C, real_C, v_V, K, V, DECAY, NORMALISE, False, BLOCK_K, PRECISION),
    )
    out_CV += product(scores_CC, read(v, row_C, v_stride_t, v_V, real_C, V), PRECISION)
    if NORMALISE:
        total_C += tl.sum(scores_CC, 1) + eps
        total_C = tl.where(total_C == 0, float("inf"), total_C)  # 0 / inf: no weights give zero, not NaN
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
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the state after one token, and its output."""
    V_TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    W: tl.constexpr = V + NORMALISE
    v_tile, n = tl.program_id(0) % V_TILES, tl.program_id(0) // V_TILES
    v_V = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real = True
    if mask is not None:
        real = tl.load(mask + n // H) != 0
    q = of_head(q, n, H, q_stride_b, q_stride_h, False)
    i = of_head(i, n, H, i_stride_b, i_stride_h, False)
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
