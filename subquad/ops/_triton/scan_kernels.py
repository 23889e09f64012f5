"""The kernels of the gated scan: states between chunks, outputs, one step of decoding.

    S_t = f_t * S_{t-1} + i_t (x) v_t,    o_t = q_t S_t,    or over  q_t . z_t + eps  with  z_t = f_t * z_{t-1} + i_t

One kernel walks over the chunks and leaves the state at the start of each; then all chunks' outputs are taken at once:
what the state gives, and the scores inside the chunk times its values. The same walk backward leaves gradients of
states.

Shape letters: C rows of a chunk, K key channels, V value channels. Tensors q, i, v, log f come with their strides; the
others are contiguous: outputs `[B, T, H, .]`, totals `[B, H, T]`, states `[B, H, chunks, K, V]`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the parameters of a kernel are pointers, numbers and Triton's own tensors)

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton.scan_tiles import (
    carried,
    cast,
    decayed,
    decays,
    of_head,
    operand,
    product,
    read,
    read_decay,
    real_rows,
    scores_and_sums,
    write,
)

LENGTHS = ["T", *(f"{x}_stride_{dim}" for x in ("q", "i", "v", "log_f", "grad", "a", "b") for dim in "bh")]
"""Never a reason to compile again: the length, and the strides that it moves."""


@triton.jit(do_not_specialize=LENGTHS)
def states_kernel(
    a,
    b,
    log_f,
    mask,
    total,
    dtotal,
    first,
    states,
    z_states,
    last,
    H,
    T,
    a_stride_b: tl.int64,
    a_stride_h: tl.int64,
    a_stride_t: tl.int64,
    b_stride_b: tl.int64,
    b_stride_h: tl.int64,
    b_stride_t: tl.int64,
    log_f_stride_b: tl.int64,
    log_f_stride_h: tl.int64,
    log_f_stride_t: tl.int64,
    K: tl.constexpr,
    V: tl.constexpr,
    DECAY: tl.constexpr,
    NORMALISE: tl.constexpr,
    BACKWARD: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Walks over the chunks: `S <- decay * S + (a * decay)^T b` from `first` to `last`, keeping S before each chunk.

    Forward a is i and b is v. BACKWARD goes from the last chunk to the first with q and the outputs' gradients, over
    the totals where NORMALISE: the states are then gradients of the state at each chunk's end.
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
            if v_tile == 0:
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
    q,
    i,
    v,
    log_f,
    mask,
    states,
    z_states,
    out,
    total,
    eps,
    H,
    T,
    q_stride_b: tl.int64,
    q_stride_h: tl.int64,
    q_stride_t: tl.int64,
    i_stride_b: tl.int64,
    i_stride_h: tl.int64,
    i_stride_t: tl.int64,
    v_stride_b: tl.int64,
    v_stride_h: tl.int64,
    v_stride_t: tl.int64,
    log_f_stride_b: tl.int64,
    log_f_stride_h: tl.int64,
    log_f_stride_t: tl.int64,
    K: tl.constexpr,
    V: tl.constexpr,
    DECAY: tl.constexpr,
    NORMALISE: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Outputs of one chunk, and the sums of their weights plus eps, infinity where that is zero."""
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
        total_C = tl.where(total_C == 0, float("inf"), total_C)
        out_CV /= total_C[:, None]
        if v_tile == 0:
            tl.store(total + n.to(tl.int64) * T + start + row_C, total_C, mask=row_C < T - start)
    out += ((n // H).to(tl.int64) * T + start) * H * V + (n % H) * V
    write(out, out_CV, row_C, H * V, v_V, row_C < T - start, V)


@triton.jit(do_not_specialize=LENGTHS)
def step_kernel(
    q,
    i,
    v,
    log_f,
    mask,
    before,
    out,
    after,
    eps,
    H,
    q_stride_b: tl.int64,
    q_stride_h: tl.int64,
    i_stride_b: tl.int64,
    i_stride_h: tl.int64,
    v_stride_b: tl.int64,
    v_stride_h: tl.int64,
    log_f_stride_b: tl.int64,
    log_f_stride_h: tl.int64,
    K: tl.constexpr,
    V: tl.constexpr,
    DECAY: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One token: the state after it and its output."""
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
