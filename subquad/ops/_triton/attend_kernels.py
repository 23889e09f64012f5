"""Block attention's kernels, forward and backward, and their shared parts: ranges of keys and queries, tiles.

A program takes one tile of queries of one head and walks over the keys they see, under a running maximum and sum:

    m' = max(m, max_j s_j),   z' = z e^(m - m') + sum_j e^(s_j - m'),   a' = a e^(m - m') + sum_j e^(s_j - m') v_j

No exponent is positive, so nothing overflows. In half precision the scale of the scores s includes log2(e), and
exponentials are powers of two, which a GPU computes in one instruction. In float32 (`NATURAL`) it does not: the product
would be rounded at the size of the scores, while only their differences count.

In every supported pattern a query at position q sees one range of keys, whose ends are rounded down to whole blocks:

    lo(q) = floor(q + offset, lo_step) - offset - before
    hi(q) = min(max(floor(q + offset, hi_step) - offset + hi_step + after, prefix), last),   empty where q < start

A tile of keys that all its queries see whole needs no mask.

The backward kernels recompute the weights w = e^(s - m) / z, and with them

    delta_i = do_i . o_i - dlse_i,   ds_ij = w_ij (do_i . v_j - delta_i),
    dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i w_ij do_i

One kernel walks over the keys of a tile of queries, the other over the queries of a tile of keys, in all heads that
share it. Sums stay in registers and no program adds to memory, so the same inputs give the same bits.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LN_2 = tl.constexpr(math.log(2))
SCALARS = (
    *("q_b", "q_h", "q_t", "k_b", "k_g", "k_s", "v_b", "v_g", "v_s", "do_b", "do_h", "do_t"),
    *("heads", "group", "queries", "keys", "q_start", "k_start"),
    *("lo_step", "before", "hi_step", "after", "offset", "prefix", "last", "start"),
)
"""Not specialised, so a new length or window doesn't recompile a kernel."""


@triton.jit
def _floor(x, step):
    """Round `x` down to a multiple of `step`; the remainder of a negative number may be negative."""
    return x - (x % step + step) % step


@triton.jit
def key_range(q_pos, lo_step, before, hi_step, after, offset, prefix, last, start):
    """Return the keys `[lo, hi)` that a query sees, by position."""
    lo = _floor(q_pos + offset, lo_step) - offset - before
    hi = _floor(q_pos + offset, hi_step) - offset + hi_step + after
    hi = tl.minimum(tl.maximum(hi, prefix), last)
    return lo, tl.where(q_pos >= start, hi, lo)


@triton.jit
def query_range(k_pos, lo_step, before, hi_step, after, offset, prefix, last, start):
    """Return the queries `[first, stop)` that see a key, by position: the inverse of `key_range`."""
    first = tl.maximum(_floor(k_pos + offset - after, hi_step) - offset, start)
    first = tl.where(k_pos < prefix, start, first)
    stop = _floor(k_pos + offset + before, lo_step) + lo_step - offset
    return first, tl.where(k_pos < last, stop, first)


@triton.jit
def power(x, NATURAL: tl.constexpr):
    """`e^x` for differences of scores, which include log2(e) unless natural."""
    return tl.exp(x) if NATURAL else tl.exp2(x)


@triton.jit
def logsumexp(m, z, NATURAL: tl.constexpr):
    """Return the natural logsumexp from maxima and sums."""
    return m + tl.log(z) if NATURAL else (m + tl.log2(z)) * LN_2


@triton.jit
def row_slots(lengths, q_starts, k_starts, q_docs, b, queries, keys, q_start, k_start):
    """Return, for queries and then keys, the position of slot 0 and the slots `[first, stop)` that hold a token.

    Starts and lengths by row are read on the device: no launch is needed, and a replayed CUDA graph reads new ones.
    """
    q_first, q_stop, k_stop = 0, queries, keys
    if q_starts is not None:
        q_start = tl.load(q_starts + b).to(tl.int32)
    if k_starts is not None:
        k_start = tl.load(k_starts + b).to(tl.int32)
    if lengths is not None:
        k_stop = tl.minimum(tl.load(lengths + b).to(tl.int32), keys)
    if q_starts is not None or k_starts is not None or q_docs is not None:  # the queries are the last of the keys
        q_first = tl.maximum(0, -q_start)
        q_stop = k_stop - (keys - queries)
    return q_start, q_first, q_stop, k_start, tl.maximum(0, -k_start), k_stop


@triton.jit
def walk(lo, hi, real, start, first, stop, slots):
    """Return the ranges in slots, the slots that a walk over all of them covers, and the slots within every range.

    A row that is not real gets an empty range, so that all tiles are masked.
    """
    lo, hi = tl.maximum(lo - start, first), tl.where(real, tl.minimum(hi - start, stop), 0)
    return lo, hi, tl.min(tl.where(lo < hi, lo, slots), 0), tl.max(hi, 0), tl.max(lo, 0), tl.min(hi, 0)


@triton.jit
def load_tile(x, slots, inside, stride, UNIT: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TYPE):
    """Load `[slots, WIDTH]`, zeros outside and beyond the channels; strides in units tell that rows are aligned."""
    channels = tl.arange(0, WIDTH)
    # int64: offsets in a long batch exceed 2^31.
    at = x + slots.to(tl.int64)[:, None] * stride * UNIT + channels[None]
    if CHANNELS == WIDTH:
        tile = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=inside[:, None] & (channels < CHANNELS)[None], other=0.0)
    return tile.to(TYPE)


@triton.jit
def store_tile(x, tile, slots, inside, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a tile into contiguous rows."""
    channels = tl.arange(0, WIDTH)
    at = x + slots.to(tl.int64)[:, None] * CHANNELS + channels[None]
    tl.store(at, tile.to(x.dtype.element_ty), mask=inside[:, None] & (channels < CHANNELS)[None])


@triton.jit
def same_document(q_docs, k_docs, b, q_slots, q_inside, k_slots, k_inside, queries, keys):
    """Return bool `[q_slots, k_slots]`: True for a query and a key of one document."""
    q = tl.load(q_docs + b * queries + q_slots, mask=q_inside, other=0)
    k = tl.load(k_docs + b * keys + k_slots, mask=k_inside, other=0)
    return q[:, None] == k[None]


@triton.jit(do_not_specialize=SCALARS)
def forward_kernel(
    q, k, v, out, lse, top, inverse, lengths, q_starts, k_starts, q_docs, k_docs,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, heads, group, queries, keys, q_start, k_start,
    lo_step, before, hi_step, after, offset, prefix, last, start, scale,
    K: tl.constexpr, V: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    NATURAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SAME_POSITION: tl.constexpr,
):  # fmt: skip
    """Compute outputs, logsumexp, and each query's maximum m and 1 / z (0 and 0 without keys).

    With `SAME_POSITION` (decoding) the "queries" are the heads of one token that share keys. The second dimension of
    the grid splits the keys; its parts are stored one after another.
    """
    tiles = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    head, tile = program // tiles, tiles - 1 - program % tiles  # causal: start the longest walks first
    b, h = (head // heads).to(tl.int64), head % heads
    r = tile * ROWS + tl.arange(0, ROWS)
    inside = r < queries
    q_slots = r * 0 if SAME_POSITION else r
    tokens = 1 if SAME_POSITION else queries
    places = row_slots(lengths, q_starts, k_starts, q_docs, b, tokens, keys, q_start, k_start)
    q_start, q_first, q_stop, k_start, k_first, k_stop = places
    lo, hi = key_range(q_start + q_slots, lo_step, before, hi_step, after, offset, prefix, last, start)
    real = inside & (q_slots >= q_first) & (q_slots < q_stop)
    lo, hi, begin, end, whole_from, whole_to = walk(lo, hi, real, k_start, k_first, k_stop, keys)
    part = tl.cdiv(tl.cdiv(end - begin, KEYS), tl.num_programs(1)) * KEYS
    begin += tl.program_id(1) * part
    end = tl.minimum(begin + part, end)

    q_RK = load_tile(q + b * q_b * K_UNIT + h.to(tl.int64) * q_h * K_UNIT, r, inside, q_t, K_UNIT, K, K_WIDTH, TYPE)
    k += b * k_b * K_UNIT + (h // group).to(tl.int64) * k_g * K_UNIT
    v += b * v_b * V_UNIT + (h // group).to(tl.int64) * v_g * V_UNIT
    # float32 in every dtype: in half precision sums over many keys would stop growing.
    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    z_R = tl.zeros([ROWS], tl.float32)
    a_RV = tl.zeros([ROWS, V_WIDTH], tl.float32)
    for n in range(begin, end, KEYS):
        s = n + tl.arange(0, KEYS)
        k_SK = load_tile(k, s, s < end, k_s, K_UNIT, K, K_WIDTH, TYPE)
        score_RS = tl.dot(q_RK, tl.trans(k_SK), input_precision=PRECISION) * scale
        if q_docs is not None:
            same = same_document(q_docs, k_docs, b, q_slots, inside, s, s < end, tokens, keys)
            score_RS = tl.where(same, score_RS, float("-inf"))
        if (n < whole_from) | (n + KEYS > whole_to):
            score_RS = tl.where((s[None] >= lo[:, None]) & (s[None] < hi[:, None]), score_RS, float("-inf"))
        top_R = tl.maximum(m_R, tl.max(score_RS, 1))
        floor_R = tl.where(top_R == float("-inf"), 0.0, top_R)  # a row without keys so far: -inf - -inf is NaN
        keep_R = power(m_R - floor_R, NATURAL)
        w_RS = power(score_RS - floor_R[:, None], NATURAL)
        z_R = z_R * keep_R + tl.sum(w_RS, 1)
        v_SV = load_tile(v, s, s < end, v_s, V_UNIT, V, V_WIDTH, TYPE)
        a_RV = tl.dot(w_RS.to(TYPE), v_SV, a_RV * keep_R[:, None], input_precision=PRECISION)
        m_R = top_R
    # A row without keys gives zeros and an lse of -inf; with 1 / z = 0 its weights are zero in the backward pass.
    seen_R = z_R > 0
    m_R = tl.where(seen_R, m_R, 0.0)
    z_R = tl.where(seen_R, z_R, 1.0)
    at = (tl.program_id(1) * (tl.num_programs(0) // tiles) + head).to(tl.int64) * queries
    store_tile(out + at * V, a_RV / z_R[:, None], r, inside, V, V_WIDTH)
    tl.store(lse + at + r, tl.where(seen_R, logsumexp(m_R, z_R, NATURAL), float("-inf")), mask=inside)
    tl.store(top + at + r, m_R, mask=inside)
    tl.store(inverse + at + r, tl.where(seen_R, 1.0 / z_R, 0.0), mask=inside)


@triton.jit(do_not_specialize=SCALARS)
def queries_kernel(
    q, k, v, do, out, dlse, top, inverse, delta, dq, lengths, q_starts, k_starts, q_docs, k_docs,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, do_b, do_h, do_t, heads, group, queries, keys, q_start, k_start,
    lo_step, before, hi_step, after, offset, prefix, last, start, scale, score_scale,
    K: tl.constexpr, V: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr,
    PRECISION: tl.constexpr, NATURAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, and delta for `keys_kernel`."""
    tiles = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    head, tile = program // tiles, tiles - 1 - program % tiles
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    r = tile * ROWS + tl.arange(0, ROWS)
    inside = r < queries
    places = row_slots(lengths, q_starts, k_starts, q_docs, b, queries, keys, q_start, k_start)
    q_start, q_first, q_stop, k_start, k_first, k_stop = places
    lo, hi = key_range(q_start + r, lo_step, before, hi_step, after, offset, prefix, last, start)
    real = inside & (r >= q_first) & (r < q_stop)
    lo, hi, begin, end, whole_from, whole_to = walk(lo, hi, real, k_start, k_first, k_stop, keys)

    at = head.to(tl.int64) * queries
    q_RK = load_tile(q + b * q_b * K_UNIT + h * q_h * K_UNIT, r, inside, q_t, K_UNIT, K, K_WIDTH, TYPE)
    do_RV = load_tile(do + b * do_b * V_UNIT + h * do_h * V_UNIT, r, inside, do_t, V_UNIT, V, V_WIDTH, TYPE)
    out_RV = load_tile(out + at * V, r, inside, V // V_UNIT, V_UNIT, V, V_WIDTH, TYPE)
    m_R = tl.load(top + at + r, mask=inside, other=0.0)
    inverse_R = tl.load(inverse + at + r, mask=inside, other=0.0)
    delta_R = tl.sum(do_RV.to(tl.float32) * out_RV.to(tl.float32), 1)
    if dlse is not None:  # the lse of a row without keys is a constant, whatever its gradient
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
        w_RS = power(score_RS - m_R[:, None], NATURAL) * inverse_R[:, None]
        dw_RS = tl.dot(do_RV, tl.trans(v_SV), input_precision=PRECISION)
        ds_RS = w_RS * (dw_RS - delta_R[:, None])
        dq_RK = tl.dot(ds_RS.to(GRAD_TYPE), k_SK.to(GRAD_TYPE), dq_RK, input_precision=PRECISION)
    store_tile(dq + at * K, dq_RK * scale, r, inside, K, K_WIDTH)


@triton.jit(do_not_specialize=SCALARS)
def keys_kernel(
    q, k, v, do, top, inverse, delta, dk, dv, lengths, q_starts, k_starts, q_docs, k_docs,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, do_b, do_h, do_t, heads, group, queries, keys, q_start, k_start,
    lo_step, before, hi_step, after, offset, prefix, last, start, scale, score_scale,
    K: tl.constexpr, V: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr,
    PRECISION: tl.constexpr, NATURAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values, summed over the heads that share them."""
    tiles = tl.cdiv(keys, KEYS)
    program = tl.program_id(0)
    shared, tile = program // tiles, program % tiles  # causal: the first keys, which the most queries see, start first
    key_heads = heads // group
    b, g = (shared // key_heads).to(tl.int64), (shared % key_heads).to(tl.int64)
    s = tile * KEYS + tl.arange(0, KEYS)
    inside = s < keys
    places = row_slots(lengths, q_starts, k_starts, q_docs, b, queries, keys, q_start, k_start)
    q_start, q_first, q_stop, k_start, k_first, k_stop = places
    first, stop = query_range(k_start + s, lo_step, before, hi_step, after, offset, prefix, last, start)
    real = inside & (s >= k_first) & (s < k_stop)
    first, stop, begin, end, whole_from, whole_to = walk(first, stop, real, q_start, q_first, q_stop, queries)

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
            # Keys are rows here, so that dk and dv add up in this program's registers over all queries.
            score_SR = tl.dot(k_SK, tl.trans(q_RK), input_precision=PRECISION) * score_scale
            if q_docs is not None:
                same = same_document(k_docs, q_docs, b, s, inside, r, r < end, keys, queries)
                score_SR = tl.where(same, score_SR, float("-inf"))
            if (n < whole_from) | (n + ROWS > whole_to):
                seen = (r[None] >= first[:, None]) & (r[None] < stop[:, None])
                score_SR = tl.where(seen, score_SR, float("-inf"))
            w_SR = power(score_SR - m_R[None], NATURAL) * inverse_R[None]
            dv_SV = tl.dot(w_SR.to(GRAD_TYPE), do_RV.to(GRAD_TYPE), dv_SV, input_precision=PRECISION)
            dw_SR = tl.dot(v_SV, tl.trans(do_RV), input_precision=PRECISION)
            ds_SR = w_SR * (dw_SR - delta_R[None])
            dk_SK = tl.dot(ds_SR.to(GRAD_TYPE), q_RK.to(GRAD_TYPE), dk_SK, input_precision=PRECISION)
    at_key = shared.to(tl.int64) * keys
    store_tile(dk + at_key * K, dk_SK * scale, s, inside, K, K_WIDTH)
    store_tile(dv + at_key * V, dv_SV, s, inside, V, V_WIDTH)
