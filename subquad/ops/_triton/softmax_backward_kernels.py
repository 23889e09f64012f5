"""The running softmax backward, in three passes: dp and sums of each segment, the gradients after them, dk and dv.

In one window of a chunk, with q_il = p_il / Z_il, G = tril(do v^T) and x_il = (p_il dp_il - dlse_il) / Z_il, minus the
gradient of Z_il,

    dp_il = (exp(m_l - r_l) (do U^T)_il + (G e)_il) / Z_il
    dk_jl = e_jl sum_{i >= j} (q_il G_ij - x_il) + exp(k_jl - m'_l) (v_j . R_l - X_l)
    dv_j  = sum_i scores_ij do_i + sum_l exp(k_jl - m'_l) R_l

with m' the maximum after the chunk, and, over later rows and in units of m', R = sum q (x) do, the gradient of U, and
X = sum x, the gradient of -z. Sums over later rows start from the end: a total minus a prefix would lose all digits.
dp, dk and X are linear in the value channels: if these take several tiles, each tile stores its part.

Shapes and letters: softmax_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton.softmax_kernels import (
    EMPTY,
    LENGTHS,
    dot,
    first_reference,
    head,
    past_rows,
    read,
    read_logits,
    real_rows,
    reference,
    window,
    write,
)


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
    segment = tl.program_id(0) % segments
    n, group = tl.program_id(0) // segments // GROUPS, tl.program_id(0) // segments % GROUPS
    l_L = group * LATENTS + tl.arange(0, LATENTS)
    v_V = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    here_L, past_CC = l_L < L, past_rows(CHUNK)
    here_LV = here_L[:, None] & (v_V < V)[None, :]
    p, k = head(p, n, heads, p_b, p_h, ALIGNED), head(k, n, heads, k_b, k_h, ALIGNED)
    v, do = head(v, n, heads, v_b, v_h, ALIGNED), head(do, n, heads, do_b, do_h, ALIGNED)
    dp = head(dp + tl.program_id(1).to(tl.int64) * dp_v, n, heads, dp_b, dp_h, ALIGNED)
    count = tl.num_programs(0) // GROUPS // segments
    dlog += (tl.program_id(1).to(tl.int64) * count + n) * tokens * L
    chunks = tl.cdiv(tokens, CHUNK)
    begin = segment * per
    at_L = (n * segments + segment).to(tl.int64) * L + l_L
    m += n.to(tl.int64) * (chunks + 1) * L
    z += n.to(tl.int64) * chunks * L
    begin_L = tl.load(m + begin * L + l_L, mask=here_L, other=EMPTY)
    u_LV = tl.load(u + at_L[:, None] * V + v_V[None, :], mask=here_LV, other=0.0)
    r_LV, x_L = tl.zeros([LATENTS, VALUES], tl.float32), tl.zeros([LATENTS], tl.float32)
    for chunk in range(begin, tl.minimum(begin + per, chunks)):
        t_C = chunk * CHUNK + tl.arange(0, CHUNK)
        real_C = real_rows(mask, n, heads, t_C, tokens)
        k_CL = read_logits(k, t_C, k_t, l_L, real_C, L)
        v_CV, do_CV = read(v, t_C, v_t, v_V, real_C, V), read(do, t_C, do_t, v_V, real_C, V)
        m_L = tl.load(m + chunk * L + l_L, mask=here_L, other=EMPTY)
        z_L = tl.load(z + chunk * L + l_L, mask=here_L, other=1.0)
        G_CC = tl.where(past_CC, dot(do_CV, tl.trans(v_CV), DOT, PRECISION), 0.0)
        dp_CL, end_L = tl.zeros([CHUNK, LATENTS], tl.float32), tl.zeros([LATENTS], tl.int32)
        carry_CL = dp_CL
        r_L = first_reference(k, mask, n, heads, chunk * CHUNK, k_t, l_L, m_L, tokens, L)
        # Runs once in most chunks, without a branch for them, which would define operands twice.
        more = chunk * CHUNK < tokens
        if more:  # always true: see `outputs`
            while more:
                e_CL, inverse_CL, end_L = window(k_CL, m_L, z_L, r_L, end_L, BOUND)
                dp_CL += dot(G_CC, e_CL, WIDE, PRECISION) * inverse_CL
                carry_CL += inverse_CL * tl.exp(m_L - r_L)[None, :]
                more = tl.min(end_L, 0) < CHUNK
                if more:
                    r_L = reference(k_CL, m_L, end_L)
        # R is computed in every segment, and before dp, whose product waits for R's: in a branch, or at the same time
        # as U's, its operand in registers would serialise all products.
        p_CL, into_L = read(p, t_C, p_t, l_L, real_C, L).to(tl.float32), tl.exp(begin_L - m_L)
        r_LV += dot(tl.trans(p_CL * carry_CL * into_L[None, :]), do_CV, WIDE, PRECISION)
        dp_CL += dot(do_CV, tl.trans(u_LV), WIDE, PRECISION) * carry_CL
        dp_CL = tl.where(real_C[:, None], dp_CL, 0.0)
        write(dp, dp_CL, t_C, dp_t, l_L, tokens, L)
        dlog_CL = p_CL * dp_CL
        if dlse is not None:
            here_C = (t_C < tokens) & (tl.program_id(1) == 0)
            dlog_CL -= read(dlse + n.to(tl.int64) * tokens * L, t_C, L, l_L, here_C, L)
        write(dlog, dlog_CL, t_C, L, l_L, tokens, L)
        x_L += tl.sum(dlog_CL * carry_CL, 0) * into_L
        now_L = tl.load(m + (chunk + 1) * L + l_L, mask=here_L, other=EMPTY)
        e_CL = tl.exp(k_CL - now_L[None, :])
        u_LV = u_LV * tl.exp(m_L - now_L)[:, None] + dot(tl.trans(e_CL), v_CV, DOT, PRECISION)
    if segment > 0:
        at_L -= L
        tl.store(r_out + at_L[:, None] * V + v_V[None, :], r_LV, mask=here_LV)
        tl.store(x_out + tl.program_id(1).to(tl.int64) * count * segments * L + at_L, x_L, mask=here_L)


@triton.jit(do_not_specialize=LENGTHS)
def segment_ends(
    dend_lse, dend_mean, end_lse, end_mean, m, r, x,
    segments, per, chunks,
    L: tl.constexpr, V: tl.constexpr, LATENTS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute R and X at the end of each segment, from the final state's and the segments'; they replace the latter."""
    count = tl.num_programs(0) // tl.cdiv(L, LATENTS)
    n, tile = tl.program_id(0) // tl.cdiv(L, LATENTS), tl.program_id(0) % tl.cdiv(L, LATENTS)
    l_L, v_V = tile * LATENTS + tl.arange(0, LATENTS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    here_L = l_L < L
    here_LV = here_L[:, None] & (v_V < V)[None, :]
    x += tl.program_id(1).to(tl.int64) * count * segments * L
    m += n.to(tl.int64) * (chunks + 1) * L
    at_L = n.to(tl.int64) * L + l_L
    at_LV = at_L[:, None] * V + v_V[None, :]
    m_L = tl.load(m + chunks * L + l_L, mask=here_L, other=EMPTY)
    lse_L = tl.load(end_lse + at_L, mask=here_L, other=EMPTY)
    z_L = tl.exp((lse_L - m_L.to(tl.float64)).to(tl.float32))
    r_LV, x_L = tl.zeros([LATENTS, VALUES], tl.float32), tl.zeros([LATENTS], tl.float32)
    if dend_mean is not None:
        r_LV = tl.load(dend_mean + at_LV, mask=here_LV, other=0.0) / z_L[:, None]
        x_L = tl.sum(r_LV * tl.load(end_mean + at_LV, mask=here_LV, other=0.0), 1)
    if dend_lse is not None:
        dlse_L = tl.load(dend_lse + at_L, mask=here_L & (tl.program_id(1) == 0), other=0.0)
        x_L -= dlse_L.to(tl.float32) / z_L
    for back in tl.range(segments, num_stages=3):
        segment, later = segments - 1 - back, back > 0
        at_L = (n * segments + segment).to(tl.int64) * L + l_L
        at_LV = at_L[:, None] * V + v_V[None, :]
        before_L = tl.load(m + tl.minimum((segment + 1) * per, chunks) * L + l_L, mask=here_L, other=EMPTY)
        keep_L = tl.exp(before_L - m_L)
        r_LV = r_LV * keep_L[:, None] + tl.load(r + at_LV, mask=here_LV & later, other=0.0)
        x_L = x_L * keep_L + tl.load(x + at_L, mask=here_L & later, other=0.0)
        m_L = before_L
        tl.store(r + at_LV, r_LV, mask=here_LV)
        tl.store(x + at_L, x_L, mask=here_L)


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
    segment = tl.program_id(0) % segments
    n, group = tl.program_id(0) // segments // GROUPS, tl.program_id(0) // segments % GROUPS
    count = tl.num_programs(0) // GROUPS // segments
    l_L = group * LATENTS + tl.arange(0, LATENTS)
    tile = tl.program_id(1)
    v_V = tile * VALUES + tl.arange(0, VALUES)
    here_L, past_CC = l_L < L, past_rows(CHUNK)
    here_LV = here_L[:, None] & (v_V < V)[None, :]
    p, k = head(p, n, heads, p_b, p_h, ALIGNED), head(k, n, heads, k_b, k_h, ALIGNED)
    v, do = head(v, n, heads, v_b, v_h, ALIGNED), head(do, n, heads, do_b, do_h, ALIGNED)
    dlog += (tile.to(tl.int64) * count + n) * tokens * L
    dk = head(dk + tile.to(tl.int64) * dk_v, n, heads, dk_b, dk_h, ALIGNED)
    dv = head(dv + group.to(tl.int64) * dv_g, n, heads, dv_b, dv_h, ALIGNED)
    chunks = tl.cdiv(tokens, CHUNK)
    begin, end = segment * per, tl.minimum(segment * per + per, chunks)
    m += n.to(tl.int64) * (chunks + 1) * L
    z += n.to(tl.int64) * chunks * L
    at_L = (n * segments + segment).to(tl.int64) * L + l_L
    r_LV = tl.load(r + at_L[:, None] * V + v_V[None, :], mask=here_LV, other=0.0)
    x_L = tl.load(x + tile.to(tl.int64) * count * segments * L + at_L, mask=here_L, other=0.0)
    for back in range(end - begin):
        chunk = end - 1 - back
        t_C = chunk * CHUNK + tl.arange(0, CHUNK)
        real_C = real_rows(mask, n, heads, t_C, tokens)
        k_CL = read_logits(k, t_C, k_t, l_L, real_C, L)
        v_CV, do_CV = read(v, t_C, v_t, v_V, real_C, V), read(do, t_C, do_t, v_V, real_C, V)
        m_L = tl.load(m + chunk * L + l_L, mask=here_L, other=EMPTY)
        z_L = tl.load(z + chunk * L + l_L, mask=here_L, other=1.0)
        G_CC = tl.where(past_CC, dot(do_CV, tl.trans(v_CV), DOT, PRECISION), 0.0)
        scores_CC, dk_CL = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, LATENTS], tl.float32)
        carry_CL, x_sum_L, end_L = dk_CL, tl.zeros([LATENTS], tl.float32), tl.zeros([LATENTS], tl.int32)
        ref_L = first_reference(k, mask, n, heads, chunk * CHUNK, k_t, l_L, m_L, tokens, L)
        more = chunk * CHUNK < tokens
        if more:
            while more:
                e_CL, inverse_CL, end_L = window(k_CL, m_L, z_L, ref_L, end_L, BOUND)
                q_CL = read(p, t_C, p_t, l_L, real_C, L).to(tl.float32) * inverse_CL
                x_CL = read(dlog, t_C, L, l_L, t_C < tokens, L) * inverse_CL
                into_L = tl.exp(m_L - ref_L)
                scores_CC += dot(q_CL, tl.trans(e_CL), WIDE, PRECISION)
                dk_CL += (dot(tl.trans(G_CC), q_CL, WIDE, PRECISION) - tl.cumsum(x_CL, 0, reverse=True)) * e_CL
                carry_CL += q_CL * into_L[None, :]
                x_sum_L += tl.sum(x_CL, 0) * into_L
                more = tl.min(end_L, 0) < CHUNK
                if more:
                    ref_L = reference(k_CL, m_L, end_L)
        scores_CC = tl.where(past_CC, scores_CC, 0.0)
        now_L = tl.load(m + (chunk + 1) * L + l_L, mask=here_L, other=EMPTY)
        end_CL, keep_L = tl.exp(k_CL - now_L[None, :]), tl.exp(m_L - now_L)
        dv_CV = dot(tl.trans(scores_CC), do_CV, DOT, PRECISION) + dot(end_CL, r_LV, WIDE, PRECISION)
        write(dv, tl.where(real_C[:, None], dv_CV, 0.0), t_C, dv_t, v_V, tokens, V)
        dk_CL += (dot(v_CV, tl.trans(r_LV), WIDE, PRECISION) - x_L[None, :]) * end_CL
        write(dk, tl.where(real_C[:, None], dk_CL, 0.0), t_C, dk_t, l_L, tokens, L)
        r_LV = r_LV * keep_L[:, None] + dot(tl.trans(carry_CL), do_CV, WIDE, PRECISION)
        x_L = x_L * keep_L + x_sum_L
    if segment == 0 and lse is not None:
        at_L = n.to(tl.int64) * L + l_L
        at_LV = at_L[:, None] * V + v_V[None, :]
        lse_L = tl.load(lse + at_L, mask=here_L, other=EMPTY)
        z_L = tl.exp((lse_L - lse_L.to(tl.float32).to(tl.float64)).to(tl.float32))
        mean_LV = tl.load(mean + at_LV, mask=here_LV, other=0.0).to(tl.float32)
        dlse_L = (tl.sum(mean_LV * r_LV, 1) - x_L) * z_L
        tl.store(dstart_mean + at_LV, r_LV * z_L[:, None], mask=here_LV)
        tl.store(dstart_lse + tile.to(tl.int64) * count * L + at_L, dlse_L, mask=here_L)
