"""Block attention's backward kernels: the weights w = e^(s - m) / z again, and with them

    delta_i = do_i . o_i - dlse_i,   ds_ij = w_ij (do_i . v_j - delta_i),
    dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i w_ij do_i

One kernel walks over the keys of a tile of queries, another over the queries of a tile of keys, through all the heads
that share it. Nothing is added up in memory: the same inputs give the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton.attend_kernels import (
    SCALARS,
    key_range,
    load_tile,
    power,
    query_range,
    row_slots,
    same_document,
    store_tile,
)


@triton.jit(do_not_specialize=SCALARS)
def queries_kernel(
    q, k, v, do, out, dlse, top, inverse, delta, dq, rows, q_docs, k_docs,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, do_b, do_h, do_t, heads, group, queries, keys, q_start, k_start,
    lo_step, before, hi_step, after, offset, prefix, last, start, scale, score_scale,
    K: tl.constexpr, V: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and delta."""
    tiles = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    head, tile = program // tiles, tiles - 1 - program % tiles
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    r = tile * ROWS + tl.arange(0, ROWS)
    inside = r < queries
    q_start, q_first, q_stop, k_start, k_first, k_stop = row_slots(rows, b, queries, keys, q_start, k_start)
    lo, hi = key_range(q_start + r, lo_step, before, hi_step, after, offset, prefix, last, start)
    real = inside & (r >= q_first) & (r < q_stop)
    lo, hi = tl.maximum(lo - k_start, k_first), tl.where(real, tl.minimum(hi - k_start, k_stop), 0)
    begin, end = tl.min(tl.where(lo < hi, lo, keys), 0), tl.max(hi, 0)
    whole_from, whole_to = tl.max(lo, 0), tl.min(hi, 0)

    at = head.to(tl.int64) * queries
    q_RK = load_tile(q + b * q_b * K_UNIT + h * q_h * K_UNIT, r, inside, q_t, K_UNIT, K, K_WIDTH, TYPE)
    do_RV = load_tile(do + b * do_b * V_UNIT + h * do_h * V_UNIT, r, inside, do_t, V_UNIT, V, V_WIDTH, TYPE)
    out_RV = load_tile(out + at * V, r, inside, V // V_UNIT, V_UNIT, V, V_WIDTH, TYPE)
    m_R = tl.load(top + at + r, mask=inside, other=0.0)
    inverse_R = tl.load(inverse + at + r, mask=inside, other=0.0)
    delta_R = tl.sum(do_RV.to(tl.float32) * out_RV.to(tl.float32), 1)
    if dlse is not None:
        delta_R -= tl.where(inverse_R > 0, tl.load(dlse + at + r, mask=inside, other=0.0), 0.0)
    tl.store(delta + at + r, delta_R, mask=inside)

    k += b * k_b * K_UNIT + (h // group) * k_g * K_UNIT
    v += b * v_b * V_UNIT + (h // group) * v_g * V_UNIT
    dq_RK = tl.zeros([ROWS, K_WIDTH], tl.float32)
    for n in range(begin, end, KEYS):
        s = n + tl.arange(0, KEYS)
        k_SK = load_tile(k, s, s < end, k_s, K_UNIT, K, K_WIDTH, TYPE)
        v_SV = load_tile(v, s, s < end, v_s, V_UNIT, V, V_WIDTH, TYPE)
        score_RS = tl.dot(q_RK, tl.trans(k_SK), input_precision=PRECISION) * score_scale
        if q_docs is not None:
            same = same_document(q_docs, k_docs, b, r, inside, s, s < end, queries, keys)
            score_RS = tl.where(same, score_RS, float("-inf"))
        if (n < whole_from) | (n + KEYS > whole_to):
            score_RS = tl.where((s[None] >= lo[:, None]) & (s[None] < hi[:, None]), score_RS, float("-inf"))
        w_RS = power(score_RS - m_R[:, None], PRECISION) * inverse_R[:, None]
        dw_RS = tl.dot(do_RV, tl.trans(v_SV), input_precision=PRECISION)
        ds_RS = w_RS * (dw_RS - delta_R[:, None])
        dq_RK = tl.dot(ds_RS.to(GRAD_TYPE), k_SK.to(GRAD_TYPE), dq_RK, input_precision=PRECISION)
    store_tile(dq + at * K, dq_RK * scale, r, inside, K, K_WIDTH)


@triton.jit(do_not_specialize=SCALARS)
def keys_kernel(
    q, k, v, do, top, inverse, delta, dk, dv, rows, q_docs, k_docs,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, do_b, do_h, do_t, heads, group, queries, keys, q_start, k_start,
    lo_step, before, hi_step, after, offset, prefix, last, start, scale, score_scale,
    K: tl.constexpr, V: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, summed over the heads that share them."""
    tiles = tl.cdiv(keys, KEYS)
    program = tl.program_id(0)
    shared, tile = program // tiles, program % tiles  # causal: the first keys are seen by the most queries
    key_heads = heads // group
    b, g = (shared // key_heads).to(tl.int64), (shared % key_heads).to(tl.int64)
    s = tile * KEYS + tl.arange(0, KEYS)
    inside = s < keys
    q_start, q_first, q_stop, k_start, k_first, k_stop = row_slots(rows, b, queries, keys, q_start, k_start)
    first, stop = query_range(k_start + s, lo_step, before, hi_step, after, offset, prefix, last, start)
    real = inside & (s >= k_first) & (s < k_stop)
    first, stop = tl.maximum(first - q_start, q_first), tl.where(real, tl.minimum(stop - q_start, q_stop), 0)
    begin, end = tl.min(tl.where(first < stop, first, queries), 0), tl.max(stop, 0)
    whole_from, whole_to = tl.max(first, 0), tl.min(stop, 0)

    k_SK = load_tile(k + b * k_b * K_UNIT + g * k_g * K_UNIT, s, inside, k_s, K_UNIT, K, K_WIDTH, TYPE)
    v_SV = load_tile(v + b * v_b * V_UNIT + g * v_g * V_UNIT, s, inside, v_s, V_UNIT, V, V_WIDTH, TYPE)
    dk_SK = tl.zeros([KEYS, K_WIDTH], tl.float32)
    dv_SV = tl.zeros([KEYS, V_WIDTH], tl.float32)
    for h in range(g * group, (g + 1) * group):
        at = (b * heads + h) * queries
        q_h_ptr = q + b * q_b * K_UNIT + h * q_h * K_UNIT
        do_h_ptr = do + b * do_b * V_UNIT + h * do_h * V_UNIT
        for n in range(begin, end, ROWS):
            r = n + tl.arange(0, ROWS)
            q_RK = load_tile(q_h_ptr, r, r < end, q_t, K_UNIT, K, K_WIDTH, TYPE)
            do_RV = load_tile(do_h_ptr, r, r < end, do_t, V_UNIT, V, V_WIDTH, TYPE)
            m_R = tl.load(top + at + r, mask=r < end, other=0.0)
            inverse_R = tl.load(inverse + at + r, mask=r < end, other=0.0)
            delta_R = tl.load(delta + at + r, mask=r < end, other=0.0)
            score_SR = tl.dot(k_SK, tl.trans(q_RK), input_precision=PRECISION) * score_scale
            if q_docs is not None:
                same = same_document(k_docs, q_docs, b, s, inside, r, r < end, keys, queries)
                score_SR = tl.where(same, score_SR, float("-inf"))
            if (n < whole_from) | (n + ROWS > whole_to):
                seen = (r[None] >= first[:, None]) & (r[None] < stop[:, None])
                score_SR = tl.where(seen, score_SR, float("-inf"))
            w_SR = power(score_SR - m_R[None], PRECISION) * inverse_R[None]
            dv_SV = tl.dot(w_SR.to(GRAD_TYPE), do_RV.to(GRAD_TYPE), dv_SV, input_precision=PRECISION)
            dw_SR = tl.dot(v_SV, tl.trans(do_RV), input_precision=PRECISION)
            ds_SR = w_SR * (dw_SR - delta_R[None])
            dk_SK = tl.dot(ds_SR.to(GRAD_TYPE), q_RK.to(GRAD_TYPE), dk_SK, input_precision=PRECISION)
    at_key = shared.to(tl.int64) * keys
    store_tile(dk + at_key * K, dk_SK * scale, s, inside, K, K_WIDTH)
    store_tile(dv + at_key * V, dv_SV, s, inside, V, V_WIDTH)
