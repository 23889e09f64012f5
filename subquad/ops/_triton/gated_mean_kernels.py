"""The gated mean (ELiTA): logsumexp, gate, mean and own value in one pass over blocks of tokens, and its gradients.

With m, z and U before a block as in softmax_kernels.py, for one latent, and s_i the gate's logit plus the logsumexp,

    M_i = max(m, max_{j <= i} k_j),   W_ij = exp(k_j - M_i) for j <= i,   Z_i = exp(m - M_i) z + sum_j W_ij
    mu_i = (exp(m - M_i) U + sum_j W_ij v_j) / Z_i,   y_i = g_i mu_i + h_i v_i,   g_i = sigmoid(s_i),   h_i = 1 - g_i

The weights of a block are formed against each row's own maximum, so no exponent is positive, whatever the logits, and a
row's bits depend on no later token. Each pass is one launch: the sums of every block; the state before every block,
with the same weights between blocks in place of tokens; the outputs. The backward pass mirrors this: with A_i = do_i .
mu_i, the gate's gradient ds_i = g_i h_i (A_i - do_i . v_i), and x_i = g_i A_i - ds_i, minus the gradient of log Z_i,

    dv_j = sum_{i >= j} g_i / Z_i W_ij do_i + h_j do_j,   dk_j = sum_{i >= j} W_ij (g_i do_i . v_j - x_i) / Z_i

Later blocks enter by R = sum_i exp(m' - M_i) g_i / Z_i do_i and X, the same sum of x_i, m' being m before the first of
them. do_i . v_j is one matrix product, which serves A, dk and do_i . v_i without rounding the weights.

Shape letters: C rows of a block, V value channels of a tile, R blocks of a tile, N = B H. `segments`: number of blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton.softmax_kernels import EMPTY, LENGTHS, dot, head, past_rows, read, real_rows, rounded, write

VARYING = [*LENGTHS, *(f"{x}_{dim}" for x in ("gate", "k") for dim in "bht")]
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def read_column(base, t_C, stride_t, real_C):
    """Load one number per row in float32, zero for a missing token."""
    return tl.load(base + t_C.to(tl.int64) * stride_t, mask=real_C, other=0.0).to(tl.float32)


@triton.jit
def write_column(base, x_C, t_C, here_C):
    """Store one number per row in the dtype of `base`."""
    tl.store(base + t_C, rounded(x_C, base.dtype.element_ty), mask=here_C)


@triton.jit
def read_logits(k, t_C, k_t, real_C):
    """Load the key logits in float32, -inf for a missing token, which then weighs nothing."""
    return tl.where(real_C, read_column(k, t_C, k_t, real_C), MINUS_INFINITY)


@triton.jit
def merged(m_1, z_1, m_2, z_2):
    """Return m and z of two sets of tokens together."""
    m = tl.maximum(m_1, m_2)
    return m, z_1 * tl.exp(m_1 - m) + z_2 * tl.exp(m_2 - m)


@triton.jit
def weights(k_C, sums_C, m, z):
    """Return `W_ij = exp(k_j - M_i)`, zero for j > i, then M and Z of the rows, and `exp(m - M_i)`.

    Rows are tokens, or blocks with their own maxima k and sums.
    """
    # A scan over rows: maxima and sums of the matrix would take one reduction a row.
    own_C, sum_C = tl.associative_scan((tl.maximum(k_C, EMPTY), sums_C), 0, merged)
    top_C = tl.maximum(own_C, m)
    carry_C = tl.exp(m - top_C)
    k_CC = tl.where(past_rows(k_C.shape[0]), k_C[None, :], MINUS_INFINITY)
    return tl.exp(k_CC - top_C[:, None]), top_C, sum_C * tl.exp(own_C - top_C) + carry_C * z, carry_C


@triton.jit
def token_weights(k_C, m, z):
    """Return the weights of tokens with these logits."""
    return weights(k_C, tl.where(k_C > EMPTY, 1.0, 0.0), m, z)


@triton.jit
def parts(x):
    """Return 1 / (1 + e^-x), e^-x / (1 + e^-x) and e = exp(-|x|), the only exponential."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x > 0.0, 1.0, e) / (1.0 + e), tl.where(x > 0.0, e, 1.0) / (1.0 + e), e


@triton.jit
def shares(gate, factors, n, tokens, t_C, gate_t, real_C, top_C, z_C):
    """Return g and h of the rows of head n, zero for a missing token, and their factors."""
    g_C, h_C, _ = parts(read_column(gate, t_C, gate_t, real_C) + (top_C + tl.log(z_C)))
    ones_C = tl.where(real_C, 1.0, 0.0)
    g_factor_C, h_factor_C = ones_C, ones_C
    if factors is not None:
        factors += n.to(tl.int64) * tokens * 2
        g_factor_C, h_factor_C = read_column(factors, t_C, 2, real_C), read_column(factors + 1, t_C, 2, real_C)
    return g_C * ones_C, h_C * ones_C, g_factor_C, h_factor_C


@triton.jit(do_not_specialize=VARYING)
def block_sums(
    k, v, mask, m_out, z_out, u_out,
    tokens, heads, segments, k_b, k_h, k_t, v_b, v_h, v_t,
    V: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute m, z and U of one block's own tokens, `[N, S(, V)]`."""
    at = tl.program_id(0).to(tl.int64)
    n, block = tl.program_id(0) // segments, tl.program_id(0) % segments
    k, v = head(k, n, heads, k_b, k_h, False), head(v, n, heads, v_b, v_h, ALIGNED)
    t_C = block * CHUNK + tl.arange(0, CHUNK)
    real_C = real_rows(mask, n, heads, t_C, tokens)
    k_C = read_logits(k, t_C, k_t, real_C)
    m = tl.maximum(tl.max(k_C, 0), EMPTY)
    e_C = tl.exp(k_C - m)
    tl.store(m_out + at, m)
    tl.store(z_out + at, tl.sum(e_C, 0))
    for first in range(0, V, VALUES):
        v_V = first + tl.arange(0, VALUES)
        v_CV = read(v, t_C, v_t, v_V, real_C, V).to(tl.float32)
        # Sums in float32, not a product of rounded weights: states are exact in every dtype.
        tl.store(u_out + at * V + v_V, tl.sum(e_C[:, None] * v_CV, 0), mask=v_V < V)


@triton.jit(do_not_specialize=VARYING)
def block_starts(
    lse, mean, m_sums, z_sums, u_sums, m_out, z_out, u_out, end_lse, end_mean,
    segments,
    V: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute m (of one more), z and U before every block from the initial state and the blocks' sums, and the end's.

    A tile of blocks at a time is a matrix of weights like that of a block's tokens: few dependent loads at any length.
    """
    n, r_R, v_V = tl.program_id(0), tl.arange(0, ROWS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    here_V, once = v_V < V, tl.program_id(1) == 0
    m, z, u_V = tl.full([], EMPTY, tl.float32), tl.full([], 1.0, tl.float64), tl.zeros([VALUES], tl.float32)
    if lse is not None:
        a = tl.load(lse + n)
        m = a.to(tl.float32)  # z takes up the rounding error
        z = tl.exp((a - m.to(tl.float64)).to(tl.float32)).to(tl.float64)
        u_V = tl.load(mean + n.to(tl.int64) * V + v_V, mask=here_V, other=0.0).to(tl.float32) * z.to(tl.float32)
    base = n.to(tl.int64) * segments
    tl.store(m_out + base + n, m, mask=once)
    tl.store(z_out + base, z.to(tl.float32), mask=once)
    tl.store(u_out + base * V + v_V, u_V, mask=here_V)
    for first in range(0, segments, ROWS):
        b_R = first + r_R
        here_R, next_R = b_R < segments, b_R + 1 < segments
        at_RV = (base + b_R)[:, None] * V + v_V[None, :]
        m_R = tl.load(m_sums + base + b_R, mask=here_R, other=MINUS_INFINITY)
        z_R = tl.load(z_sums + base + b_R, mask=here_R, other=0.0)
        u_RV = tl.load(u_sums + at_RV, mask=here_R[:, None] & here_V[None, :], other=0.0)
        w_RR, top_R, after_R, carry_R = weights(m_R, z_R, m, z.to(tl.float32))
        tl.store(m_out + base + n + b_R + 1, top_R, mask=here_R & once)
        tl.store(z_out + base + b_R + 1, after_R, mask=next_R & once)
        after_RV = dot(w_RR, u_RV, tl.float32, "ieee") + carry_R[:, None] * u_V[None, :]
        tl.store(u_out + at_RV + V, after_RV, mask=next_R[:, None] & here_V[None, :])
        top = tl.max(top_R, 0)
        take_R, keep = tl.exp(m_R - top), tl.exp(m - top)
        # float64: in float32 z would stop growing if a short call continues a long past.
        z = z * keep.to(tl.float64) + tl.sum(take_R * z_R, 0).to(tl.float64)
        u_V = u_V * keep + tl.sum(take_R[:, None] * u_RV, 0)
        m = top
    tl.store(end_lse + n, m.to(tl.float64) + tl.log(z), mask=once)
    tl.store(end_mean + n.to(tl.int64) * V + v_V, u_V / z.to(tl.float32), mask=here_V)


@triton.jit(do_not_specialize=VARYING)
def outputs(
    gate, k, v, factors, mask, m, z, u, out,
    tokens, heads, segments, gate_b, gate_h, gate_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    V: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one block."""
    at = tl.program_id(0).to(tl.int64)
    n, block = tl.program_id(0) // segments, tl.program_id(0) % segments
    gate, k = head(gate, n, heads, gate_b, gate_h, False), head(k, n, heads, k_b, k_h, False)
    v, out = head(v, n, heads, v_b, v_h, ALIGNED), head(out, n, heads, out_b, out_h, ALIGNED)
    t_C = block * CHUNK + tl.arange(0, CHUNK)
    real_C = real_rows(mask, n, heads, t_C, tokens)
    w_CC, top_C, z_C, carry_C = token_weights(read_logits(k, t_C, k_t, real_C), tl.load(m + at + n), tl.load(z + at))
    g_C, h_C, g_factor_C, h_factor_C = shares(gate, factors, n, tokens, t_C, gate_t, real_C, top_C, z_C)
    g_C, h_C = g_C * g_factor_C / z_C, h_C * h_factor_C
    for first in range(0, V, VALUES):
        v_V = first + tl.arange(0, VALUES)
        v_CV = read(v, t_C, v_t, v_V, real_C, V)
        u_V = tl.load(u + at * V + v_V, mask=v_V < V, other=0.0)
        sum_CV = dot(w_CC, v_CV, DOT, PRECISION) + carry_C[:, None] * u_V[None, :]
        write(out, sum_CV * g_C[:, None] + v_CV.to(tl.float32) * h_C[:, None], t_C, out_t, v_V, tokens, V)


@triton.jit(do_not_specialize=VARYING)
def row_gradients(
    gate, k, v, do, factors, mask, m, z, u, dgate, x_out, r_sums, x_sums,
    tokens, heads, segments, gate_b, gate_h, gate_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
    V: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gate's gradient and x / Z of one block's rows, and the block's own R and X."""
    at = tl.program_id(0).to(tl.int64)
    n, block = tl.program_id(0) // segments, tl.program_id(0) % segments
    gate, k = head(gate, n, heads, gate_b, gate_h, False), head(k, n, heads, k_b, k_h, False)
    v, do = head(v, n, heads, v_b, v_h, ALIGNED), head(do, n, heads, do_b, do_h, ALIGNED)
    rows_C = tl.arange(0, CHUNK)
    t_C = block * CHUNK + rows_C
    real_C = real_rows(mask, n, heads, t_C, tokens)
    w_CC, top_C, z_C, carry_C = token_weights(read_logits(k, t_C, k_t, real_C), tl.load(m + at + n), tl.load(z + at))
    g_C, h_C, g_factor_C, h_factor_C = shares(gate, factors, n, tokens, t_C, gate_t, real_C, top_C, z_C)
    r_C = g_C * g_factor_C * carry_C / z_C
    G_CC, past_C = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for first in range(0, V, VALUES):
        v_V = first + tl.arange(0, VALUES)
        v_CV, do_CV = read(v, t_C, v_t, v_V, real_C, V), read(do, t_C, do_t, v_V, real_C, V)
        u_V = tl.load(u + at * V + v_V, mask=v_V < V, other=0.0)
        G_CC += dot(do_CV, tl.trans(v_CV), DOT, PRECISION)
        past_C += tl.sum(do_CV.to(tl.float32) * u_V[None, :], 1)
        tl.store(r_sums + at * V + v_V, tl.sum(do_CV.to(tl.float32) * r_C[:, None], 0), mask=v_V < V)
    A_C = g_factor_C * (tl.sum(w_CC * G_CC, 1) + carry_C * past_C) / z_C
    own_C = h_factor_C * tl.sum(tl.where(rows_C[:, None] == rows_C[None, :], G_CC, 0.0), 1)
    ds_C = g_C * h_C * (A_C - own_C)
    x_C = (g_C * A_C - ds_C) / z_C
    at_n = n.to(tl.int64) * tokens
    write_column(dgate + at_n, ds_C, t_C, t_C < tokens)
    write_column(x_out + at_n, x_C, t_C, t_C < tokens)
    tl.store(x_sums + at, tl.sum(x_C * carry_C, 0))


@triton.jit(do_not_specialize=VARYING)
def block_ends(
    dend_lse, dend_mean, end_lse, end_mean, lse, m, r_sums, x_sums, r_out, x_out, dlse, dmean,
    segments,
    V: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute R and X after every block from the final state's gradients and the blocks' R and X.

    The initial mean's gradient is R before all blocks; the initial lse's still lacks its product with the mean.
    """
    n, r_R, v_V = tl.program_id(0), tl.arange(0, ROWS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    here_V, once = v_V < V, tl.program_id(1) == 0
    later_RR = r_R[None, :] > r_R[:, None]
    base, at_n = n.to(tl.int64) * segments, n.to(tl.int64) * V
    m += base + n
    top = tl.load(m + segments)
    z = tl.exp((tl.load(end_lse + n) - top.to(tl.float64)).to(tl.float32))
    r_V, x = tl.zeros([VALUES], tl.float32), tl.full([], 0.0, tl.float32)
    if dend_mean is not None:
        r_V = tl.load(dend_mean + at_n + v_V, mask=here_V, other=0.0) / z
        for first in range(0, V, VALUES):
            all_V = first + tl.arange(0, VALUES)
            dmean_V = tl.load(dend_mean + at_n + all_V, mask=all_V < V, other=0.0) / z
            x += tl.sum(dmean_V * tl.load(end_mean + at_n + all_V, mask=all_V < V, other=0.0), 0)
    if dend_lse is not None:
        x -= tl.load(dend_lse + n).to(tl.float32) / z
    tiles = tl.cdiv(segments, ROWS)
    for back in range(tiles):
        b_R = (tiles - 1 - back) * ROWS + r_R
        here_R = b_R < segments
        at_RV, here_RV = (base + b_R)[:, None] * V + v_V[None, :], here_R[:, None] & here_V[None, :]
        m_R = tl.load(m + b_R, mask=here_R, other=EMPTY)
        next_R = tl.load(m + b_R + 1, mask=here_R, other=EMPTY)
        x_R = tl.load(x_sums + base + b_R, mask=here_R, other=0.0)
        own_RV = tl.load(r_sums + at_RV, mask=here_RV, other=0.0)
        w_RR = tl.exp(tl.where(later_RR & here_R[None, :], next_R[:, None] - m_R[None, :], MINUS_INFINITY))
        carry_R = tl.exp(next_R - top)
        tl.store(r_out + at_RV, dot(w_RR, own_RV, tl.float32, "ieee") + carry_R[:, None] * r_V[None, :], mask=here_RV)
        tl.store(x_out + base + b_R, tl.sum(w_RR * x_R[None, :], 1) + carry_R * x, mask=here_R & once)
        start = tl.load(m + (tiles - 1 - back) * ROWS)
        take_R, keep = tl.exp(tl.where(here_R, start - m_R, MINUS_INFINITY)), tl.exp(start - top)
        r_V = r_V * keep + tl.sum(take_R[:, None] * own_RV, 0)
        x = x * keep + tl.sum(take_R * x_R, 0)
        top = start
    if lse is not None:
        z = tl.exp((tl.load(lse + n) - top.to(tl.float64)).to(tl.float32))
        tl.store(dmean + at_n + v_V, r_V * z, mask=here_V)
        tl.store(dlse + n, (-x * z).to(tl.float64), mask=once)


@triton.jit(do_not_specialize=VARYING)
def token_gradients(
    gate, k, v, do, factors, mask, m, z, x_in, r, x, mean, dmean, dlse, dk, dv,
    tokens, heads, segments, gate_b, gate_h, gate_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dv_b, dv_h, dv_t,
    V: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr,
    DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block's tokens; the first block completes the initial lse's gradient."""
    at = tl.program_id(0).to(tl.int64)
    n, block = tl.program_id(0) // segments, tl.program_id(0) % segments
    gate, k = head(gate, n, heads, gate_b, gate_h, False), head(k, n, heads, k_b, k_h, False)
    v, do = head(v, n, heads, v_b, v_h, ALIGNED), head(do, n, heads, do_b, do_h, ALIGNED)
    dv = head(dv, n, heads, dv_b, dv_h, ALIGNED)
    t_C = block * CHUNK + tl.arange(0, CHUNK)
    real_C = real_rows(mask, n, heads, t_C, tokens)
    k_C = read_logits(k, t_C, k_t, real_C)
    w_CC, top_C, z_C, _ = token_weights(k_C, tl.load(m + at + n), tl.load(z + at))
    g_C, h_C, g_factor_C, h_factor_C = shares(gate, factors, n, tokens, t_C, gate_t, real_C, top_C, z_C)
    q_C, h_C = g_C * g_factor_C / z_C, h_C * h_factor_C
    x_C = read_column(x_in + n.to(tl.int64) * tokens, t_C, 1, real_C)
    end_C = tl.exp(k_C - tl.load(m + at + n + 1))
    G_CC, ahead_C = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    scores_CC = tl.trans(w_CC * q_C[:, None])
    for first in range(0, V, VALUES):
        v_V = first + tl.arange(0, VALUES)
        v_CV, do_CV = read(v, t_C, v_t, v_V, real_C, V), read(do, t_C, do_t, v_V, real_C, V)
        r_V = tl.load(r + at * V + v_V, mask=v_V < V, other=0.0)
        G_CC += dot(do_CV, tl.trans(v_CV), DOT, PRECISION)
        ahead_C += tl.sum(v_CV.to(tl.float32) * r_V[None, :], 1)
        dv_CV = dot(scores_CC, do_CV, WIDE, PRECISION) + end_C[:, None] * r_V[None, :]
        write(dv, dv_CV + h_C[:, None] * do_CV.to(tl.float32), t_C, dv_t, v_V, tokens, V)
    dk_C = tl.sum(w_CC * (G_CC * q_C[:, None] - x_C[:, None]), 0) + end_C * (ahead_C - tl.load(x + at))
    write_column(dk + n.to(tl.int64) * tokens, dk_C, t_C, t_C < tokens)
    if block == 0 and mean is not None:
        share = tl.load(dlse + n)
        for first in range(0, V, VALUES):
            v_V = first + tl.arange(0, VALUES)
            mean_V = tl.load(mean + n.to(tl.int64) * V + v_V, mask=v_V < V, other=0.0).to(tl.float32)
            dmean_V = tl.load(dmean + n.to(tl.int64) * V + v_V, mask=v_V < V, other=0.0)
            share += tl.sum(mean_V * dmean_V, 0).to(tl.float64)
        tl.store(dlse + n, share)


@triton.jit(do_not_specialize=VARYING)
def decode(
    gate, k, v, mask, lse, mean, out, end_lse, end_mean,
    heads, gate_b, gate_h, k_b, k_h, v_b, v_h, out_b, out_h,
    V: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute the state after one token, and its output."""
    n = tl.program_id(0)
    v_V = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    v, out = head(v, n, heads, v_b, v_h, False), head(out, n, heads, out_b, out_h, False)
    real = n >= 0
    if mask is not None:
        real = tl.load(mask + n // heads) != 0
    k_1 = tl.load(head(k, n, heads, k_b, k_h, False), mask=real, other=0.0).to(tl.float64)
    k_1 = tl.where(real, k_1, EMPTY)
    s = tl.load(head(gate, n, heads, gate_b, gate_h, False), mask=real, other=0.0).to(tl.float32)
    v_V1 = tl.load(v + v_V, mask=(v_V < V) & real, other=0.0).to(tl.float32)
    a, mean_V = tl.full([], EMPTY, tl.float64), tl.zeros([VALUES], tl.float32)
    at_V = n.to(tl.int64) * V + v_V
    if lse is not None:
        a = tl.load(lse + n)
        mean_V = tl.load(mean + at_V, mask=v_V < V, other=0.0).to(tl.float32)
    # The log-normaliser of a long past must grow by single tokens: float64, but for sums alone, and a logarithm of
    # 1 + e that keeps the digits of a small e.
    take, keep, e = parts((k_1 - a).to(tl.float32))
    one = 1.0 + e
    more = tl.where(one == 1.0, e, tl.log(one) * (e / tl.where(one == 1.0, 1.0, one - 1.0)))
    after = tl.maximum(a, k_1) + more.to(tl.float64)
    mean_V = mean_V * keep + v_V1 * take
    past, own, _ = parts(s + after.to(tl.float32))
    out_V = tl.where(real, past, 0.0) * mean_V + own * v_V1
    tl.store(out + v_V, rounded(out_V, out.dtype.element_ty), mask=v_V < V)
    tl.store(end_mean + at_V, mean_V, mask=v_V < V)
    tl.store(end_lse + n, after, mask=tl.program_id(1) == 0)
