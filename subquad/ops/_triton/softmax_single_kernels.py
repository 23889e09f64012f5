"""The running softmax of one latent (ELiTA's): a weight per row, so sums over rows replace matmuls; memory limits it.

    N_i = exp(m - r) U + sum_{j <= i} e_j v_j,   o_i = p_i / Z_i N_i
    D_j = sum_{i >= j} p_i / Z_i do_i,           dv_j = e_j D_j + exp(k_j - m_end) R

Passes, arguments and windows are as in the kernels for many latents; ALIGNED is about value channels. Sums over
later rows are cumulative sums in reverse, never a total minus a prefix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton.softmax_kernels import EMPTY, LENGTHS, head, read, real_rows, rounded, write


@triton.jit
def read_column(base, t_C, stride_t, real_C):
    """Load one number per row in float32, zero for a missing token."""
    return tl.load(base + t_C.to(tl.int64) * stride_t, mask=real_C, other=0.0).to(tl.float32)


@triton.jit
def write_column(base, x_C, t_C, stride_t, tokens):
    """Store one number per row in the dtype of `base`."""
    tl.store(base + t_C.to(tl.int64) * stride_t, rounded(x_C, base.dtype.element_ty), mask=t_C < tokens)


@triton.jit
def reference(k_C, m, begin):
    """Return the running maximum at row `begin`, where a window begins."""
    return tl.maximum(m, tl.sum(tl.where(tl.arange(0, k_C.shape[0]) == begin, k_C, 0.0), 0))


@triton.jit
def window(k_C, m, z, r, begin, BOUND: tl.constexpr):
    """Return `e`, 1 / Z in the rows of the window that begins at row `begin` (else zero), and the row where it ends."""
    C: tl.constexpr = k_C.shape[0]
    rows_C = tl.arange(0, C)
    end = tl.min(tl.where((k_C - r > BOUND) & (rows_C >= begin), rows_C, C), 0)
    e_C = tl.exp(tl.minimum(k_C - r, BOUND))
    inside_C = (rows_C >= begin) & (rows_C < end)
    total_C = tl.where(inside_C, z * tl.exp(m - r) + tl.cumsum(e_C, 0), 1.0)
    return e_C, tl.where(inside_C, 1.0 / total_C, 0.0), end


@triton.jit
def window_lse(r, inverse_C):
    """Return the running logsumexp in the rows of the window, else zero."""
    return tl.where(inverse_C > 0.0, r - tl.log(tl.where(inverse_C > 0.0, inverse_C, 1.0)), 0.0)


@triton.jit(do_not_specialize=LENGTHS)
def segment_sums(
    k, v, mask, m_out, z_out, u_out,
    tokens, heads, segments, per,
    k_b, k_h, k_t, v_b, v_h, v_t,
    L: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, LATENTS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute m, z and U of one segment's own tokens; store them as of the next segment."""
    segment, n = tl.program_id(0) % (segments - 1), tl.program_id(0) // (segments - 1)
    v_V = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    k, v = head(k, n, heads, k_b, k_h, False), head(v, n, heads, v_b, v_h, ALIGNED)
    m, z, u_V = tl.full([], EMPTY, tl.float32), tl.full([], 0.0, tl.float32), tl.zeros([VALUES], tl.float32)
    for chunk in tl.range(segment * per, segment * per + per, num_stages=2):
        t_C = chunk * CHUNK + tl.arange(0, CHUNK)
        real_C = real_rows(mask, n, heads, t_C, tokens)
        k_C = tl.where(real_C, read_column(k, t_C, k_t, real_C), EMPTY)
        v_CV = read(v, t_C, v_t, v_V, real_C, V).to(tl.float32)
        now = tl.maximum(m, tl.max(k_C, 0))
        e_C, keep = tl.exp(k_C - now), tl.exp(m - now)
        z = z * keep + tl.sum(e_C, 0)
        u_V = u_V * keep + tl.sum(e_C[:, None] * v_CV, 0)
        m = now
    at = (n * segments + segment + 1).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(m_out + at, m)
        tl.store(z_out + at, z)
    tl.store(u_out + at * V + v_V, u_V, mask=v_V < V)


@triton.jit(do_not_specialize=LENGTHS)
def outputs(
    p, k, v, mask, m, z_start, u, out, lse, z, end_lse, end_mean,
    tokens, heads, segments, per,
    p_b, p_h, p_t, k_b, k_h, k_t, v_b, v_h, v_t, out_g, out_b, out_h, out_t,
    L: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, LATENTS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BOUND: tl.constexpr,
):  # fmt: skip
    """Compute a segment's outputs, lse, m and z before each chunk, and the last state."""
    segment, n = tl.program_id(0) % segments, tl.program_id(0) // segments
    v_V = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    first = tl.program_id(1) == 0
    p, k = head(p, n, heads, p_b, p_h, False), head(k, n, heads, k_b, k_h, False)
    v, out = head(v, n, heads, v_b, v_h, ALIGNED), head(out, n, heads, out_b, out_h, ALIGNED)
    chunks = tl.cdiv(tokens, CHUNK)
    begin = segment * per
    at = (n * segments + segment).to(tl.int64)
    m += n.to(tl.int64) * (chunks + 1)
    now, z64 = tl.load(m + begin), tl.load(z_start + at)
    u_V = tl.load(u + at * V + v_V, mask=v_V < V, other=0.0)
    for chunk in tl.range(begin, tl.minimum(begin + per, chunks), num_stages=2):
        t_C = chunk * CHUNK + tl.arange(0, CHUNK)
        real_C = real_rows(mask, n, heads, t_C, tokens)
        p_C = read_column(p, t_C, p_t, real_C)
        k_C = tl.where(real_C, read_column(k, t_C, k_t, real_C), EMPTY)
        v_CV = read(v, t_C, v_t, v_V, real_C, V).to(tl.float32)
        before = now
        if z is not None:
            tl.store(m + chunk, before, mask=first)
            tl.store(z + n.to(tl.int64) * chunks + chunk, z64.to(tl.float32), mask=first)
        z_in, edge = z64.to(tl.float32), tl.full([], 0, tl.int32)
        out_CV, lse_C = tl.zeros([CHUNK, VALUES], tl.float32), tl.zeros([CHUNK], tl.float32)
        if chunk * CHUNK < tokens:  # always true: see the kernel for many latents
            while edge < CHUNK:
                r = reference(k_C, before, edge)
                e_C, inverse_C, edge = window(k_C, before, z_in, r, edge, BOUND)
                own_CV = tl.cumsum(e_C[:, None] * v_CV, 0) + (tl.exp(before - r) * u_V)[None, :]
                out_CV += (p_C * inverse_C)[:, None] * own_CV
                lse_C += window_lse(r, inverse_C)
        write(out, out_CV, t_C, out_t, v_V, tokens, V)
        if lse is not None:
            write_column(lse + n.to(tl.int64) * tokens, lse_C, t_C, 1, tl.where(first, tokens, 0))
        now = tl.maximum(before, tl.max(k_C, 0))
        e_C, keep = tl.exp(k_C - now), tl.exp(before - now)
        # float64: in float32 z would stop growing if a short call continues a long past.
        z64 = z64 * keep.to(tl.float64) + tl.sum(e_C, 0).to(tl.float64)
        u_V = u_V * keep + tl.sum(e_C[:, None] * v_CV, 0)
    if segment == segments - 1:
        tl.store(m + chunks, now, mask=first)
        tl.store(end_lse + n, now.to(tl.float64) + tl.log(z64), mask=first)
        tl.store(end_mean + n.to(tl.int64) * V + v_V, u_V / z64.to(tl.float32), mask=v_V < V)


@triton.jit(do_not_specialize=LENGTHS)
def query_gradients(
    p, k, v, do, dlse, mask, m, z, u, dp, dlog, r_out, x_out,
    tokens, heads, segments, per,
    p_b, p_h, p_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dp_v, dp_b, dp_h, dp_t,
    L: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, LATENTS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BOUND: tl.constexpr,
):  # fmt: skip
    """Compute dp of one segment's rows, and its R and X in units of its start, stored for the segment before."""
    segment, n = tl.program_id(0) % segments, tl.program_id(0) // segments
    tile = tl.program_id(1)
    v_V = tile * VALUES + tl.arange(0, VALUES)
    p, k = head(p, n, heads, p_b, p_h, False), head(k, n, heads, k_b, k_h, False)
    v, do = head(v, n, heads, v_b, v_h, ALIGNED), head(do, n, heads, do_b, do_h, ALIGNED)
    dp = head(dp + tile.to(tl.int64) * dp_v, n, heads, dp_b, dp_h, False)
    dlog += (tile.to(tl.int64) * (tl.num_programs(0) // segments) + n) * tokens
    chunks = tl.cdiv(tokens, CHUNK)
    begin = segment * per
    at = (n * segments + segment).to(tl.int64)
    m += n.to(tl.int64) * (chunks + 1)
    z += n.to(tl.int64) * chunks
    m_begin = tl.load(m + begin)
    u_V = tl.load(u + at * V + v_V, mask=v_V < V, other=0.0)
    r_V, x = tl.zeros([VALUES], tl.float32), tl.full([], 0.0, tl.float32)
    for chunk in tl.range(begin, tl.minimum(begin + per, chunks), num_stages=2):
        t_C = chunk * CHUNK + tl.arange(0, CHUNK)
        real_C = real_rows(mask, n, heads, t_C, tokens)
        p_C = read_column(p, t_C, p_t, real_C)
        k_C = tl.where(real_C, read_column(k, t_C, k_t, real_C), EMPTY)
        v_CV = read(v, t_C, v_t, v_V, real_C, V).to(tl.float32)
        do_CV = read(do, t_C, do_t, v_V, real_C, V).to(tl.float32)
        before, now, z_in = tl.load(m + chunk), tl.load(m + chunk + 1), tl.load(z + chunk)
        edge, dp_C = tl.full([], 0, tl.int32), tl.zeros([CHUNK], tl.float32)
        carry_C = dp_C
        if chunk * CHUNK < tokens:
            while edge < CHUNK:
                r = reference(k_C, before, edge)
                e_C, inverse_C, edge = window(k_C, before, z_in, r, edge, BOUND)
                own_CV = tl.cumsum(e_C[:, None] * v_CV, 0) + (tl.exp(before - r) * u_V)[None, :]
                dp_C += tl.sum(own_CV * do_CV, 1) * inverse_C
                carry_C += inverse_C * tl.exp(before - r)
        dp_C = tl.where(real_C, dp_C, 0.0)
        write_column(dp, dp_C, t_C, dp_t, tokens)
        dlog_C = p_C * dp_C
        if dlse is not None:
            dlog_C -= read_column(dlse + n.to(tl.int64) * tokens, t_C, 1, (t_C < tokens) & (tile == 0))
        write_column(dlog, dlog_C, t_C, 1, tokens)
        carry_C = carry_C * tl.exp(m_begin - before)
        r_V += tl.sum((p_C * carry_C)[:, None] * do_CV, 0)
        x += tl.sum(dlog_C * carry_C, 0)
        u_V = u_V * tl.exp(before - now) + tl.sum(tl.exp(k_C - now)[:, None] * v_CV, 0)
    if segment > 0:
        tl.store(r_out + (at - 1) * V + v_V, r_V, mask=v_V < V)
        tl.store(x_out + tile.to(tl.int64) * tl.num_programs(0) + at - 1, x)


@triton.jit(do_not_specialize=LENGTHS)
def key_gradients(
    p, k, v, do, dlog, mask, lse, mean, m, z, r, x, dk, dv, dstart_lse, dstart_mean,
    tokens, heads, segments, per,
    p_b, p_h, p_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_v, dk_b, dk_h, dk_t, dv_g, dv_b, dv_h, dv_t,
    L: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, LATENTS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BOUND: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one segment's rows in reverse; the first segment adds the initial state's gradients."""
    segment, n = tl.program_id(0) % segments, tl.program_id(0) // segments
    tile = tl.program_id(1)
    v_V = tile * VALUES + tl.arange(0, VALUES)
    p, k = head(p, n, heads, p_b, p_h, False), head(k, n, heads, k_b, k_h, False)
    v, do = head(v, n, heads, v_b, v_h, ALIGNED), head(do, n, heads, do_b, do_h, ALIGNED)
    count = tl.num_programs(0) // segments
    dlog += (tile.to(tl.int64) * count + n) * tokens
    dk = head(dk + tile.to(tl.int64) * dk_v, n, heads, dk_b, dk_h, False)
    dv = head(dv, n, heads, dv_b, dv_h, ALIGNED)
    chunks = tl.cdiv(tokens, CHUNK)
    begin, end = segment * per, tl.minimum(segment * per + per, chunks)
    m += n.to(tl.int64) * (chunks + 1)
    z += n.to(tl.int64) * chunks
    at = (n * segments + segment).to(tl.int64)
    r_V = tl.load(r + at * V + v_V, mask=v_V < V, other=0.0)
    x_end = tl.load(x + tile.to(tl.int64) * tl.num_programs(0) + at)
    for back in tl.range(0, end - begin, num_stages=2):
        chunk = end - 1 - back
        t_C = chunk * CHUNK + tl.arange(0, CHUNK)
        real_C = real_rows(mask, n, heads, t_C, tokens)
        p_C = read_column(p, t_C, p_t, real_C)
        k_C = tl.where(real_C, read_column(k, t_C, k_t, real_C), EMPTY)
        v_CV = read(v, t_C, v_t, v_V, real_C, V).to(tl.float32)
        do_CV = read(do, t_C, do_t, v_V, real_C, V).to(tl.float32)
        dlog_C = read_column(dlog, t_C, 1, t_C < tokens)
        before, now, z_in = tl.load(m + chunk), tl.load(m + chunk + 1), tl.load(z + chunk)
        edge, later_CV = tl.full([], 0, tl.int32), tl.zeros([CHUNK, VALUES], tl.float32)
        later_C, carry_C = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        if chunk * CHUNK < tokens:
            while edge < CHUNK:
                ref = reference(k_C, before, edge)
                e_C, inverse_C, edge = window(k_C, before, z_in, ref, edge, BOUND)
                later_CV += tl.cumsum((p_C * inverse_C)[:, None] * do_CV, 0, reverse=True) * e_C[:, None]
                later_C += tl.cumsum(dlog_C * inverse_C, 0, reverse=True) * e_C
                carry_C += inverse_C * tl.exp(before - ref)
        end_C = tl.exp(k_C - now)
        dv_CV = later_CV + end_C[:, None] * r_V[None, :]
        dk_C = tl.sum(v_CV * later_CV, 1) - later_C + (tl.sum(v_CV * r_V[None, :], 1) - x_end) * end_C
        write(dv, tl.where(real_C[:, None], dv_CV, 0.0), t_C, dv_t, v_V, tokens, V)
        write_column(dk, tl.where(real_C, dk_C, 0.0), t_C, dk_t, tokens)
        keep = tl.exp(before - now)
        r_V = r_V * keep + tl.sum((p_C * carry_C)[:, None] * do_CV, 0)
        x_end = x_end * keep + tl.sum(dlog_C * carry_C, 0)
    if segment == 0 and lse is not None:
        lse_n = tl.load(lse + n)
        z_r = tl.exp((lse_n - lse_n.to(tl.float32).to(tl.float64)).to(tl.float32))
        mean_V = tl.load(mean + n.to(tl.int64) * V + v_V, mask=v_V < V, other=0.0).to(tl.float32)
        tl.store(dstart_mean + n.to(tl.int64) * V + v_V, r_V * z_r, mask=v_V < V)
        tl.store(dstart_lse + tile.to(tl.int64) * count + n, (tl.sum(mean_V * r_V, 0) - x_end) * z_r)
