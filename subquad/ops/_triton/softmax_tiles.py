"""What the kernels of the running softmax share: reading rows, dots, and the weights inside a chunk.

The weight of token j for row i of a latent is exp(k_j) / sum_{s <= i} exp(k_s). Inside a chunk it is taken against a
reference r that no later row can change, the running maximum at the chunk's first row:

    e_j = exp(k_j - r),   Z_i = exp(m - r) z + sum_{j <= i} e_j,   w_ij = e_j / Z_i

with m and z those of the tokens before; so one exponential an entry and matmuls do. It holds while no logit exceeds r
by more than BOUND. Where one does, the latent's *window* of rows ends, and the next one begins with that logit as its
reference. A row belongs to one window of a latent, which follows from tokens up to that row alone, and the other
windows add zero to it: a later token changes no bit of an earlier row. Most chunks have one window.

Shape letters: C rows of a chunk, L latents, V value channels, as tiles; N batch times heads, G tiles of latents,
M chunks, S segments of chunks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (parameters are pointers, numbers and Triton's own tensors)

from __future__ import annotations

import triton
import triton.language as tl

from subquad.ops._triton import common

EMPTY = tl.constexpr(-(2.0**100))
INTERPRETED = tl.constexpr(common.INTERPRETED)


@triton.jit
def head(pointer, n, heads, stride_b, stride_h, ALIGNED: tl.constexpr):
    """Where batch row and head n of a `[B, H, T, .]` tensor begin; ALIGNED promises multiples of 16."""
    offset = (n // heads).to(tl.int64) * stride_b + (n % heads).to(tl.int64) * stride_h
    if ALIGNED and not INTERPRETED:
        offset = tl.multiple_of(offset, 16)
    return pointer + offset


@triton.jit
def real_rows(mask, n, heads, t_C, tokens):
    """Whether the tokens t exist: `[C]`."""
    real_C = t_C < tokens
    if mask is not None:
        real_C = tl.load(mask + (n // heads).to(tl.int64) * tokens + t_C, mask=real_C, other=0) != 0
    return real_C


@triton.jit
def read(base, t_C, stride_t, x_X, real_C, SIZE: tl.constexpr):
    """Channels x of the rows t, `[C, X]`; zero where there are none."""
    at_CX = base + t_C.to(tl.int64)[:, None] * stride_t + x_X[None, :]
    return tl.load(at_CX, mask=real_C[:, None] & (x_X < SIZE)[None, :], other=0.0)


@triton.jit
def read_logits(base, t_C, stride_t, l_L, real_C, SIZE: tl.constexpr):
    """Logits in float32, EMPTY where there are none."""
    k_CL = read(base, t_C, stride_t, l_L, real_C, SIZE).to(tl.float32)
    return tl.where(real_C[:, None] & (l_L < SIZE)[None, :], k_CL, EMPTY)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x in DTYPE, to nearest."""
    if INTERPRETED and tl.bfloat16 == DTYPE:  # the interpreter cuts digits off instead
        x = x.to(tl.float32)
        carried = x * 65537.0
        x = carried - (carried - x)
    return x.to(DTYPE)


@triton.jit
def write(base, x_CX, t_C, stride_t, x_X, tokens, SIZE: tl.constexpr):
    """Channels x of the rows t, in the dtype of what `base` points to."""
    at_CX = base + t_C.to(tl.int64)[:, None] * stride_t + x_X[None, :]
    tl.store(at_CX, rounded(x_CX, base.dtype.element_ty), mask=(t_C < tokens)[:, None] & (x_X < SIZE)[None, :])


@triton.jit
def dot(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """`a @ b` with operands rounded to DTYPE, summed in float32."""
    a, b = rounded(a, DTYPE), rounded(b, DTYPE)
    if INTERPRETED and tl.bfloat16 == DTYPE:  # the interpreter has no arithmetic of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def past_rows(CHUNK: tl.constexpr):
    """`[i, j]`: whether j <= i."""
    rows_C = tl.arange(0, CHUNK)
    return rows_C[None, :] <= rows_C[:, None]


@triton.jit
def whole_window(k_CL, m_L, z_L, r_L, BOUND: tl.constexpr):
    """`e` and 1 / Z against r; of use in the rows before a logit exceeds it by more than BOUND."""
    e_CL = tl.exp(tl.minimum(k_CL - r_L[None, :], BOUND))
    return e_CL, 1.0 / ((z_L * tl.exp(m_L - r_L))[None, :] + tl.cumsum(e_CL, 0))


@triton.jit
def reference(k_CL, m_L, begin_L):
    """The running maximum at row `begin`, where a window begins; something no smaller than m at the chunk's end."""
    here_CL = tl.arange(0, k_CL.shape[0])[:, None] == begin_L[None, :]
    return tl.maximum(m_L, tl.sum(tl.where(here_CL, k_CL, 0.0), 0))


@triton.jit
def window_end(k_CL, r_L, begin_L, BOUND: tl.constexpr):
    """The first row from `begin` on whose logit exceeds r by more than BOUND; the chunk's end where there is none."""
    C: tl.constexpr = k_CL.shape[0]
    rows_C1 = tl.arange(0, C)[:, None]
    over_CL = (k_CL - r_L[None, :] > BOUND) & (rows_C1 >= begin_L[None, :])
    return tl.min(tl.where(over_CL, rows_C1, C), 0)


@triton.jit
def window(k_CL, m_L, z_L, r_L, begin_L, BOUND: tl.constexpr):
    """`e`; 1 / Z in the rows of the window that begins at row `begin`, else zero; where the window ends."""
    rows_C1 = tl.arange(0, k_CL.shape[0])[:, None]
    end_L = window_end(k_CL, r_L, begin_L, BOUND)
    inside_CL = (rows_C1 >= begin_L[None, :]) & (rows_C1 < end_L[None, :])
    e_CL = tl.exp(tl.minimum(k_CL - r_L[None, :], BOUND))
    # Outside, Z may have no digits left.
    total_CL = tl.where(inside_CL, (z_L * tl.exp(m_L - r_L))[None, :] + tl.cumsum(e_CL, 0), 1.0)
    return e_CL, tl.where(inside_CL, 1.0 / total_CL, 0.0), end_L


@triton.jit
def window_lse(r_L, inverse_CL):
    """The running logsumexp in the rows of the window, else zero."""
    inside_CL = inverse_CL > 0.0
    return tl.where(inside_CL, r_L[None, :] - tl.log(tl.where(inside_CL, inverse_CL, 1.0)), 0.0)
