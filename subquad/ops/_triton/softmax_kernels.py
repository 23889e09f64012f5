"""The running softmax forward, and helpers of all its kernels: reading rows, dots, and the weights inside a chunk.

A state is, for each latent, m = the largest logit so far, z = sum_j exp(k_j - m) and U = sum_j exp(k_j - m) v_j. m and
z are kept apart because k - logsumexp would be a difference of rounded large numbers. There are three passes: the sums
of each segment, the states before segments, the outputs.

There are two levels: the segments of a sequence run in parallel, and the chunks of a segment one after another with U
in registers. So one state per segment is written, not one per chunk, and none if the heads alone fill the device.

The weight of token j for row i of a latent is exp(k_j) / sum_{s <= i} exp(k_s). Inside a chunk it is computed against a
reference r that no later row can change, the running maximum at the chunk's first row:

    e_j = exp(k_j - r),   Z_i = exp(m - r) z + sum_{j <= i} e_j,   w_ij = e_j / Z_i

with m and z of the tokens before the chunk: one exponential per entry, and matmuls. This works while no logit exceeds r
by more than BOUND. A logit that does ends the latent's *window* of rows: the next window begins with it, and it is the
reference there. The window of a row depends only on tokens up to that row, and all other windows add exactly zero to
the row, so a later token changes no bit of an earlier one. Most chunks have one window.

Shape letters: C rows of a chunk, L latents, V value channels, as tiles; N batch times heads, G tiles of latents,
M chunks, S segments of chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton import common

EMPTY = tl.constexpr(-(2.0**100))
INTERPRETED = tl.constexpr(common.INTERPRETED)
LENGTHS = [
    *("tokens", "heads", "segments", "per", "chunks", "out_g", "dp_v", "dk_v", "dv_g"),
    *(f"{x}_{dim}" for x in ("p", "k", "v", "out", "do", "dp", "dk", "dv") for dim in "bh"),
]
"""Not specialised, so a new length, which changes these strides and counts too, doesn't recompile."""


@triton.jit
def head(pointer, n, heads, stride_b, stride_h, ALIGNED: tl.constexpr):
    """Return the pointer to head n of a `[B, H, T, .]` tensor, of B * H; ALIGNED: heads begin at multiples of 16."""
    offset = (n // heads).to(tl.int64) * stride_b + (n % heads).to(tl.int64) * stride_h
    if ALIGNED and not INTERPRETED:
        offset = tl.multiple_of(offset, 16)
    return pointer + offset


@triton.jit
def real_rows(mask, n, heads, t_C, tokens):
    """Return bool `[C]`: True for a token, False for padding and past the end."""
    real_C = t_C < tokens
    if mask is not None:
        real_C = tl.load(mask + (n // heads).to(tl.int64) * tokens + t_C, mask=real_C, other=0) != 0
    return real_C


@triton.jit
def read(base, t_C, stride_t, x_X, real_C, SIZE: tl.constexpr):
    """Load channels x of the rows t, `[C, X]`, with zeros for missing tokens and channels."""
    at_CX = base + t_C.to(tl.int64)[:, None] * stride_t + x_X[None, :]
    return tl.load(at_CX, mask=real_C[:, None] & (x_X < SIZE)[None, :], other=0.0)


@triton.jit
def read_logits(base, t_C, stride_t, l_L, real_C, SIZE: tl.constexpr):
    """Load logits in float32, EMPTY if missing, which has weight zero but is finite: inf - inf would be NaN."""
    k_CL = read(base, t_C, stride_t, l_L, real_C, SIZE).to(tl.float32)
    return tl.where(real_C[:, None] & (l_L < SIZE)[None, :], k_CL, EMPTY)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round x to the nearest number in DTYPE."""
    if INTERPRETED and tl.bfloat16 == DTYPE:  # the interpreter's cast truncates
        x = x.to(tl.float32)
        carried = x * 65537.0
        x = carried - (carried - x)
    return x.to(DTYPE)


@triton.jit
def write(base, x_CX, t_C, stride_t, x_X, tokens, SIZE: tl.constexpr):
    """Store channels x of the rows t in the dtype of `base`."""
    at_CX = base + t_C.to(tl.int64)[:, None] * stride_t + x_X[None, :]
    tl.store(at_CX, rounded(x_CX, base.dtype.element_ty), mask=(t_C < tokens)[:, None] & (x_X < SIZE)[None, :])


@triton.jit
def dot(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """`a @ b` with operands rounded to DTYPE, accumulated in float32."""
    a, b = rounded(a, DTYPE), rounded(b, DTYPE)
    if INTERPRETED and tl.bfloat16 == DTYPE:  # the interpreter lacks bfloat16 arithmetic
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def past_rows(CHUNK: tl.constexpr):
    """Return bool `[i, j]`: True if j <= i."""
    rows_C = tl.arange(0, CHUNK)
    return rows_C[None, :] <= rows_C[:, None]


@triton.jit
def first_reference(k, mask, n, heads, t, stride_t, l_L, m_L, tokens, SIZE: tl.constexpr):
    """Return the running maximum at a chunk's first row, token t: a load, since a sum over rows crosses warps."""
    here_L = real_rows(mask, n, heads, t, tokens) & (l_L < SIZE)
    k_L = tl.load(k + tl.cast(t, tl.int64) * stride_t + l_L, mask=here_L, other=0.0).to(tl.float32)
    return tl.maximum(m_L, tl.where(here_L, k_L, EMPTY))


@triton.jit
def reference(k_CL, m_L, begin_L):
    """Return the running maximum at row `begin`, where a window begins; at the chunk's end, a number of at least m."""
    here_CL = tl.arange(0, k_CL.shape[0])[:, None] == begin_L[None, :]
    return tl.maximum(m_L, tl.sum(tl.where(here_CL, k_CL, 0.0), 0))


@triton.jit
def window_end(k_CL, r_L, begin_L, BOUND: tl.constexpr):
    """Return the first row from `begin` on whose logit exceeds r by more than BOUND, or the chunk's end."""
    C: tl.constexpr = k_CL.shape[0]
    rows_C1 = tl.arange(0, C)[:, None]
    over_CL = (k_CL - r_L[None, :] > BOUND) & (rows_C1 >= begin_L[None, :])
    return tl.min(tl.where(over_CL, rows_C1, C), 0)


@triton.jit
def window(k_CL, m_L, z_L, r_L, begin_L, BOUND: tl.constexpr):
    """Return `e`, 1 / Z in the rows of the window that begins at row `begin` (else zero), and the row where it ends."""
    rows_C1 = tl.arange(0, k_CL.shape[0])[:, None]
    end_L = window_end(k_CL, r_L, begin_L, BOUND)
    inside_CL = (rows_C1 >= begin_L[None, :]) & (rows_C1 < end_L[None, :])
    e_CL = tl.exp(tl.minimum(k_CL - r_L[None, :], BOUND))  # clamped: rows after the window would overflow
    # Outside the window Z may be rounded away, or zero.
    total_CL = tl.where(inside_CL, (z_L * tl.exp(m_L - r_L))[None, :] + tl.cumsum(e_CL, 0), 1.0)
    return e_CL, tl.where(inside_CL, 1.0 / total_CL, 0.0), end_L


@triton.jit
def window_lse(r_L, inverse_CL):
    """Return the running logsumexp in the rows of the window, else zero."""
    inside_CL = inverse_CL > 0.0
    return tl.where(inside_CL, r_L[None, :] - tl.log(tl.where(inside_CL, inverse_CL, 1.0)), 0.0)


@triton.jit(do_not_specialize=LENGTHS)
def segment_sums(
    k, v, mask, m_out, z_out, u_out,
    tokens, heads, segments, per,
    k_b, k_h, k_t, v_b, v_h, v_t,
    L: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, LATENTS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute m, z and U of one segment's own tokens; store them as of the next segment, `[N, S, L(, V)]`."""
    segment = tl.program_id(0) % (segments - 1)
    n, group = tl.program_id(0) // (segments - 1) // GROUPS, tl.program_id(0) // (segments - 1) % GROUPS
    l_L = group * LATENTS + tl.arange(0, LATENTS)
    v_V = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    k, v = head(k, n, heads, k_b, k_h, ALIGNED), head(v, n, heads, v_b, v_h, ALIGNED)
    m_L, z_L = tl.full([LATENTS], EMPTY, tl.float32), tl.zeros([LATENTS], tl.float32)
    u_LV = tl.zeros([LATENTS, VALUES], tl.float32)
    # The last segment's sums are not needed, so every chunk here is whole.
    for chunk in range(segment * per, segment * per + per):
        t_C = chunk * CHUNK + tl.arange(0, CHUNK)
        real_C = real_rows(mask, n, heads, t_C, tokens)
        k_CL = read_logits(k, t_C, k_t, l_L, real_C, L)
        v_CV = read(v, t_C, v_t, v_V, real_C, V)
        now_L = tl.maximum(m_L, tl.max(k_CL, 0))
        e_CL, keep_L = tl.exp(k_CL - now_L[None, :]), tl.exp(m_L - now_L)
        z_L = z_L * keep_L + tl.sum(e_CL, 0)
        u_LV = u_LV * keep_L[:, None] + dot(tl.trans(e_CL), v_CV, DOT, PRECISION)
        m_L = now_L
    at_L = (n * segments + segment + 1).to(tl.int64) * L + l_L
    if tl.program_id(1) == 0:
        tl.store(m_out + at_L, m_L, mask=l_L < L)
        tl.store(z_out + at_L, z_L, mask=l_L < L)
    tl.store(u_out + at_L[:, None] * V + v_V[None, :], u_LV, mask=(l_L < L)[:, None] & (v_V < V)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def segment_starts(
    lse, mean, m_sums, z_sums, u, m_out, z_out,
    segments, per, chunks,
    L: tl.constexpr, V: tl.constexpr, LATENTS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute the state before each segment from the initial state and the segments' sums; U replaces its sums.

    m is stored for the first chunk of the segment in `[N, M + 1, L]`; z is float64, as in float32 it would stop
    growing in a long sequence.
    """
    n, tile = tl.program_id(0) // tl.cdiv(L, LATENTS), tl.program_id(0) % tl.cdiv(L, LATENTS)
    l_L, v_V = tile * LATENTS + tl.arange(0, LATENTS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    here_L = l_L < L
    here_LV = here_L[:, None] & (v_V < V)[None, :]
    first = tl.program_id(1) == 0
    at_L = n.to(tl.int64) * L + l_L
    m_L, z_L = tl.full([LATENTS], EMPTY, tl.float32), tl.full([LATENTS], 1.0, tl.float64)
    u_LV = tl.zeros([LATENTS, VALUES], tl.float32)
    if lse is not None:
        lse_L = tl.load(lse + at_L, mask=here_L, other=EMPTY)
        m_L = lse_L.to(tl.float32)  # z takes up the rounding error
        z_L = tl.exp((lse_L - m_L.to(tl.float64)).to(tl.float32)).to(tl.float64)
        u_LV = tl.load(mean + at_L[:, None] * V + v_V[None, :], mask=here_LV, other=0.0).to(tl.float32)
        u_LV = u_LV * z_L.to(tl.float32)[:, None]
    # Segment 0 has none before it. This is a mask and not a branch, in which loads are not fetched ahead; in a loop
    # without products they are fetched ahead only on request.
    for segment in tl.range(segments, num_stages=3):
        at_L = (n * segments + segment).to(tl.int64) * L + l_L
        at_LV = at_L[:, None] * V + v_V[None, :]
        later = segment > 0
        m_new_L = tl.load(m_sums + at_L, mask=here_L & later, other=EMPTY)
        now_L = tl.maximum(m_L, m_new_L)
        keep_L, take_L = tl.exp(m_L - now_L), tl.exp(m_new_L - now_L)
        z_new_L = tl.load(z_sums + at_L, mask=here_L & later, other=0.0) * take_L
        z_L = z_L * keep_L.to(tl.float64) + z_new_L.to(tl.float64)
        u_LV = u_LV * keep_L[:, None] + tl.load(u + at_LV, mask=here_LV & later, other=0.0) * take_L[:, None]
        m_L = now_L
        tl.store(u + at_LV, u_LV, mask=here_LV)
        tl.store(z_out + at_L, z_L, mask=here_L & first)
        m_at_L = (n.to(tl.int64) * (chunks + 1) + segment * per) * L + l_L
        tl.store(m_out + m_at_L, m_L, mask=here_L & first)


@triton.jit(do_not_specialize=LENGTHS)
def outputs(
    p, k, v, mask, m, z_start, u, out, lse, z, end_lse, end_mean,
    tokens, heads, segments, per,
    p_b, p_h, p_t, k_b, k_h, k_t, v_b, v_h, v_t, out_g, out_b, out_h, out_t,
    L: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, LATENTS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BOUND: tl.constexpr,
):  # fmt: skip
    """Compute a segment's outputs (a part per tile of latents), lse, m and z before each chunk, and the last state."""
    segment = tl.program_id(0) % segments
    n, group = tl.program_id(0) // segments // GROUPS, tl.program_id(0) // segments % GROUPS
    l_L = group * LATENTS + tl.arange(0, LATENTS)
    v_V = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    first, here_L, past_CC = tl.program_id(1) == 0, l_L < L, past_rows(CHUNK)
    here_LV = here_L[:, None] & (v_V < V)[None, :]
    p, k = head(p, n, heads, p_b, p_h, ALIGNED), head(k, n, heads, k_b, k_h, ALIGNED)
    v = head(v, n, heads, v_b, v_h, ALIGNED)
    out = head(out + group.to(tl.int64) * out_g, n, heads, out_b, out_h, ALIGNED)
    chunks = tl.cdiv(tokens, CHUNK)
    begin = segment * per
    at_L = (n * segments + segment).to(tl.int64) * L + l_L
    z64_L = tl.load(z_start + at_L, mask=here_L, other=1.0)
    m_L = tl.load(m + (n.to(tl.int64) * (chunks + 1) + begin) * L + l_L, mask=here_L, other=EMPTY)
    u_LV = tl.load(u + at_L[:, None] * V + v_V[None, :], mask=here_LV, other=0.0)
    for chunk in range(begin, tl.minimum(begin + per, chunks)):
        t_C = chunk * CHUNK + tl.arange(0, CHUNK)
        real_C = real_rows(mask, n, heads, t_C, tokens)
        k_CL = read_logits(k, t_C, k_t, l_L, real_C, L)
        if z is not None:
            tl.store(m + (n.to(tl.int64) * (chunks + 1) + chunk) * L + l_L, m_L, mask=here_L & first)
            tl.store(z + (n.to(tl.int64) * chunks + chunk) * L + l_L, z64_L.to(tl.float32), mask=here_L & first)
        z_L, top_L = z64_L.to(tl.float32), tl.max(k_CL, 0)
        p_CL = read(p, t_C, p_t, l_L, real_C, L).to(tl.float32)
        scores_CC, carry_CL = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, LATENTS], tl.float32)
        lse_CL, end_L = carry_CL, tl.zeros([LATENTS], tl.int32)
        r_L = first_reference(k, mask, n, heads, chunk * CHUNK, k_t, l_L, m_L, tokens, L)
        # Runs once in most chunks. Rows of the first window see the same instructions, and so the same bits, whether
        # others follow or not. The condition is always true: Triton doesn't prefetch if a loop directly holds a loop.
        more = chunk * CHUNK < tokens
        if more:
            while more:
                e_CL, inverse_CL, end_L = window(k_CL, m_L, z_L, r_L, end_L, BOUND)
                q_CL = p_CL * inverse_CL
                scores_CC += dot(q_CL, tl.trans(e_CL), WIDE, PRECISION)
                carry_CL += q_CL * tl.exp(m_L - r_L)[None, :]
                if lse is not None:
                    lse_CL += window_lse(r_L, inverse_CL)
                more = tl.min(end_L, 0) < CHUNK
                if more:
                    r_L = reference(k_CL, m_L, end_L)
        v_CV = read(v, t_C, v_t, v_V, real_C, V)
        scores_CC = tl.where(past_CC, scores_CC, 0.0)
        out_CV = dot(carry_CL, u_LV, WIDE, PRECISION) + dot(scores_CC, v_CV, DOT, PRECISION)
        write(out, out_CV, t_C, out_t, v_V, tokens, V)
        if lse is not None:
            write(lse + n.to(tl.int64) * tokens * L, lse_CL, t_C, L, l_L, tl.where(first, tokens, 0), L)
        now_L = tl.maximum(m_L, top_L)
        e_CL, keep_L = tl.exp(k_CL - now_L[None, :]), tl.exp(m_L - now_L)
        # float64: in float32 z would stop growing if a short call continues a long past.
        z64_L = z64_L * keep_L.to(tl.float64) + tl.sum(e_CL, 0).to(tl.float64)
        u_LV = u_LV * keep_L[:, None] + dot(tl.trans(e_CL), v_CV, DOT, PRECISION)
        m_L = now_L
    if segment == segments - 1:
        at_L = n.to(tl.int64) * L + l_L
        tl.store(m + (n.to(tl.int64) * (chunks + 1) + chunks) * L + l_L, m_L, mask=here_L & first)
        tl.store(end_lse + at_L, m_L.to(tl.float64) + tl.log(z64_L), mask=here_L & first)
        u_LV = u_LV / z64_L.to(tl.float32)[:, None]
        tl.store(end_mean + at_L[:, None] * V + v_V[None, :], u_LV, mask=here_LV)


@triton.jit
def log_of_1_plus(e):
    """Return log(1 + e) for e in [0, 1] with a float32's relative error, which a log of the sum has not near e = 0.

    `2 artanh(s)`, s = e / (2 + e) <= 1/3, by its series, whose first term left out is below 2e-9.
    """
    s = e / (2.0 + e)
    square = s * s
    sum_of_powers = 1.0 / 15.0
    for n in tl.static_range(7):
        sum_of_powers = sum_of_powers * square + 1.0 / (13 - 2 * n)
    return 2.0 * s * sum_of_powers


@triton.jit(do_not_specialize=LENGTHS)
def decode(
    p, k, v, mask, lse, mean, out, out_lse, end_lse, end_mean,
    heads,
    p_b, p_h, k_b, k_h, v_b, v_h, out_b, out_h,
    L: tl.constexpr, V: tl.constexpr, LATENTS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute the state after one token, and its output."""
    n = tl.program_id(0)
    v_V = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    p, k = head(p, n, heads, p_b, p_h, False), head(k, n, heads, k_b, k_h, False)
    v, out = head(v, n, heads, v_b, v_h, False), head(out, n, heads, out_b, out_h, False)
    first = tl.program_id(1) == 0
    real = n >= 0
    if mask is not None:
        real = tl.load(mask + n // heads) != 0
    new_V = tl.load(v + v_V, mask=(v_V < V) & real, other=0.0).to(tl.float32)
    out_V = tl.zeros([VALUES], tl.float32)
    for tile in range(tl.cdiv(L, LATENTS)):
        l_L = tile * LATENTS + tl.arange(0, LATENTS)
        here_L = l_L < L
        at_L = n.to(tl.int64) * L + l_L
        at_LV, here_LV = at_L[:, None] * V + v_V[None, :], here_L[:, None] & (v_V < V)[None, :]
        p_L = tl.load(p + l_L, mask=here_L & real, other=0.0).to(tl.float32)
        k_L = tl.load(k + l_L, mask=here_L & real, other=0.0).to(tl.float32)
        k_L = tl.where(real, k_L, EMPTY)
        if lse is None:
            before_L, mean_LV = tl.full([LATENTS], EMPTY, tl.float64), tl.zeros([LATENTS, VALUES], tl.float32)
        else:
            before_L = tl.load(lse + at_L, mask=here_L, other=EMPTY)
            mean_LV = tl.load(mean + at_LV, mask=here_LV, other=0.0).to(tl.float32)
        # float64, so that the log-normaliser of a long past still grows by single tokens. The growth itself, log(1 + e)
        # with e = exp(-|k - lse|), does not need it, since the rounding of the exponent is corrected.
        over_L = k_L.to(tl.float64) - before_L
        gap_L = tl.abs(over_L)
        near_L = gap_L.to(tl.float32)
        lost_L = tl.minimum(gap_L, 200.0) - tl.minimum(near_L, 200.0).to(
            tl.float64
        )  # exp(-200) is zero, so no inf - inf
        e_L = tl.exp(-near_L) * (1.0 - lost_L.to(tl.float32))
        after_L = tl.maximum(before_L, k_L.to(tl.float64)) + log_of_1_plus(e_L).to(tl.float64)
        less_L = e_L / (1.0 + e_L)
        more_L = 1.0 - less_L  # exactly 1 if the other is 0: compiled division is approximate
        keep_L, take_L = tl.where(over_L > 0.0, less_L, more_L), tl.where(over_L > 0.0, more_L, less_L)
        mean_LV = mean_LV * keep_L[:, None] + take_L[:, None] * new_V[None, :]
        out_V += tl.sum(p_L[:, None] * mean_LV, 0)
        tl.store(end_lse + at_L, after_L, mask=here_L & first)
        tl.store(end_mean + at_LV, mean_LV, mask=here_LV)
        if out_lse is not None:
            tl.store(out_lse + at_L, after_L.to(tl.float32), mask=here_L & first)
    tl.store(out + v_V, rounded(out_V, out.dtype.element_ty), mask=v_V < V)
