"""What the kernels of the gated scan share: loads, stores, matrix products, and decays inside a chunk.

Products take operands as tensor cores do (PRECISION): `bf16` for bfloat16 inputs; `tf32` for float16, whose range the
sums over a long past would leave; `ieee`, plain float32. They are summed in float32.

Shape letters: C rows of a chunk, K key channels, V value channels, L either.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the parameters of a kernel are pointers, numbers and Triton's own tensors)

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton import common

FORGET_ALL = tl.constexpr(-1e4)
INTERPRETED = tl.constexpr(common.INTERPRETED)


@triton.jit
def rounded(x, BITS: tl.constexpr):
    """float32 `x` without its last `BITS` bits, rounded to the nearest, ties to even."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits += ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)
    return (bits & -(1 << BITS)).to(tl.float32, bitcast=True)


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """`x` as a matrix product reads it. The interpreter, which has no bfloat16 arithmetic, rounds alike in float32."""
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
    """`a @ b`, summed in float32."""
    if PRECISION == "tf32":
        ab = tl.dot(operand(a, PRECISION), operand(b, PRECISION), input_precision="tf32")
    else:
        ab = tl.dot(operand(a, PRECISION), operand(b, PRECISION), input_precision="ieee")
    return ab


@triton.jit
def sums_of_rows(chosen_CC, x_CL, PRECISION: tl.constexpr):
    """`chosen @ x` for a matrix of zeros and ones: x goes in two pieces, for twice the bits of an operand."""
    ones_CC = chosen_CC.to(tl.float32)
    sums_CL = product(ones_CC, x_CL, PRECISION)
    if PRECISION != "ieee":
        sums_CL += product(ones_CC, x_CL - operand(x_CL, PRECISION).to(tl.float32), PRECISION)
    return sums_CL


@triton.jit
def of_head(x, n, H, stride_b, stride_h, ALIGNED: tl.constexpr):
    """The pointer to the first token of head n of B * H; ALIGNED promises that heads begin at multiples of 16."""
    offset = (n // H).to(tl.int64) * stride_b + (n % H).to(tl.int64) * stride_h
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return x + offset


@triton.jit
def real_rows(mask, n, H, T, start, row_C):
    """Which rows of the chunk hold a token."""
    real_C = row_C < T - start
    if mask is not None:
        real_C = real_C & (tl.load(mask + (n // H).to(tl.int64) * T + start + row_C, mask=real_C, other=0) != 0)
    return real_C


@triton.jit
def read(x, row_C, stride_t, channel_L, real_C, LENGTH: tl.constexpr):
    """Rows `[C, L]`; zeros where there is no token or no channel."""
    pointers = x + row_C[:, None] * stride_t + channel_L[None, :]
    x_CL = tl.load(pointers, mask=real_C[:, None] & (channel_L < LENGTH)[None, :], other=0.0)
    if INTERPRETED:
        x_CL = x_CL.to(tl.float32)
    return x_CL


@triton.jit
def cast(x, pointer):
    """`x` in the dtype of what the pointer points to."""
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:  # its cast cuts bits off
        x = rounded(x, 16)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def write(x, x_CL, row_C, stride_t, channel_L, exists_C, LENGTH: tl.constexpr):
    """Stores rows `[C, L]`."""
    pointers = x + row_C[:, None] * stride_t + channel_L[None, :]
    tl.store(pointers, cast(x_CL, x), mask=exists_C[:, None] & (channel_L < LENGTH)[None, :])


@triton.jit
def read_state(states, k_K, v_V, K: tl.constexpr, V: tl.constexpr):
    """A tile `[K, V]` of a state."""
    inside = (k_K < K)[:, None] & (v_V < V)[None, :]
    state_KV = tl.load(states + k_K[:, None] * V + v_V[None, :], mask=inside, other=0.0)
    if INTERPRETED:
        state_KV = state_KV.to(tl.float32)
    return state_KV


@triton.jit
def read_decay(log_f, row_C, stride_t, k_K, real_C, K: tl.constexpr, DECAY: tl.constexpr):
    """The logarithms of the decays, `[C]` or `[C, K]`."""
    if DECAY == "head":
        g = tl.load(log_f + row_C * stride_t, mask=real_C, other=0.0).to(tl.float32)
    else:
        g = read(log_f, row_C, stride_t, k_K, real_C, K).to(tl.float32)
    return tl.maximum(g, FORGET_ALL)


@triton.jit
def decays(g, row_C, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """What is left of the chunk's start at each row, of each row at the chunk's end, and of its start at its end."""
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
    """The rows times their decays, `[C]` or `[C, L]`."""
    if DECAY == "head":
        x_CL = x_CL.to(tl.float32) * decay[:, None]
    elif DECAY == "channel":
        x_CL = x_CL.to(tl.float32) * decay
    return x_CL


@triton.jit
def carried(state_KV, whole, DECAY: tl.constexpr):
    """What a state is worth at the other end of a chunk."""
    if DECAY == "head":
        state_KV *= whole
    elif DECAY == "channel":
        state_KV *= whole[:, None]
    return state_KV


@triton.jit
def decay_between(g_C, row_C):
    """`exp(g_{j+1} + ... + g_i)`, `[C, C]`, for j <= i; rubbish in [0, 1] above."""
    # float64: neighbours differ little, their sums are large.
    G_C = tl.cumsum(g_C.to(tl.float64), 0)
    return tl.exp(tl.minimum((G_C[:, None] - G_C[None, :]).to(tl.float32), 0.0))


@triton.constexpr_function
def levels(C):
    """How often a chunk of C rows is halved."""
    return C.bit_length() - 1


@triton.jit
def halving(q_CK, i_CK, g_CK, row_C, level, PRECISION: tl.constexpr):
    """Decays that differ by channel, between the halves of blocks of 2h rows, h = 2^level, without a positive exponent.

    A row of a second half comes with what is left of the half's start, a row of a first half with what is left of it
    at the half's end. Each exponent is a sum of logarithms of decays, never a difference of two large sums. Over all
    levels each pair of two rows meets once.

    Returns the factors `[C, K]`; q (second halves) or i (first halves) times those; whether a row is in a second half
    `[C, 1]`; and which entries `[C, C]` pair the two halves of a block.
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
    """`sum_k q_ik i_jk exp(g_{j+1,k} + ... + g_ik)` for j <= i, else zero."""
    q_CK, i_CK = q_CK.to(tl.float32), i_CK.to(tl.float32)
    scores_CC = tl.where(row_C[:, None] == row_C[None, :], tl.sum(q_CK * i_CK, 1)[:, None], 0.0)
    for level in range(levels(row_C.shape[0])):
        _, mixed_CK, _, pairs_CC = halving(q_CK, i_CK, g_CK, row_C, level, PRECISION)
        pairs_CC = pairs_CC & (row_C[None, :] < row_C[:, None])
        scores_CC += tl.where(pairs_CC, product(mixed_CK, tl.trans(mixed_CK), PRECISION), 0.0)
    return scores_CC


@triton.jit
def channel_gradients(q_CK, i_CK, g_CK, grad_CC, row_C, PRECISION: tl.constexpr):
    """The gradients of q and i through `channel_scores` below the diagonal, where alone `grad` must not be zero."""
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
    q,
    q_stride_t,
    i,
    i_stride_t,
    log_f,
    log_f_stride_t,
    states,
    z_states,
    row_C,
    real_C,
    v_V,
    K: tl.constexpr,
    V: tl.constexpr,
    DECAY: tl.constexpr,
    NORMALISE: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk: scores `[C, C]`, zero above the diagonal; what rows take from a state `[C, V]` and from z `[C]`.

    The rows are queries that meet the state at the chunk's start; BACKWARD: inputs that meet the one at its end.
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
