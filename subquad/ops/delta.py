"""Engine C, the delta scan: a recurrence that writes what its state does not predict yet.

Shape letters: B batch, H heads, G groups of heads, T tokens, K key channels, V value channels, F = 1 or K decays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.ops import _reference as reference
from subquad.ops._torch import delta as chunked
from subquad.ops._torch import single
from subquad.ops.backends import choose, without_autocast
from subquad.ops.groups import by_heads
from subquad.ops.precision import wide_dtype
from subquad.ops.scan import (
    BACKENDS,
    FORGET_ALL,
    MOST_CHANNELS,
    ScanOutput,
    check_scan,
    masked,
)
from subquad.tracing import saves

MOST_KEYS = 256
"""Most key channels per head in the kernels of `triton`, which hold all of them at once."""

FEW_TOKENS = 5
"""Most tokens that `torch` reads one after another: chunks take 1.2 to 3 times as long there."""


def has_few(tokens: int) -> bool:
    """Return whether tokens are read one after another; while compiling one alone, since each number is a graph."""
    return 1 <= tokens <= (1 if torch.compiler.is_compiling() else FEW_TOKENS)


@without_autocast
def delta_scan(
    q_BGTK: Tensor,
    k_BGTK: Tensor,
    v_BHTV: Tensor,
    beta_BHT1: Tensor,
    log_f_BHTF: Tensor | None,
    /,
    *,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> ScanOutput:
    """`S_t = (I - b_t k_t k_t^T) (f_t * S_{t-1}) + b_t k_t (x) v_t`, `o_t = q_t S_t`: the delta rule, with decays.

    For keys of length 1, `b_t` is the fraction of the value stored for `k_t` that is replaced by `v_t`. Keys and
    queries are not scaled. The state stays bounded if `b_t |k_t|^2` is at most 2; beyond, it may overflow, and the
    outputs of earlier tokens keep their bits. (Yang et al. 2024, arXiv:2406.06484, equation 1; with decays by head
    arXiv:2412.06464, equation 10, by channel arXiv:2510.26692, equation 1.)

    Args:
        q_BGTK: queries; each is that of H / G neighbouring heads, whose scores are computed once.
        k_BGTK: keys.
        v_BHTV: values.
        beta_BHT1: strengths of writing, in [0, 2], which is not checked.
        log_f_BHTF: natural log of the decays, one per channel (F = K) or per head (F = 1), or None for f = 1. Must be
            at most 0, which is not checked; -inf forgets everything.
        state: the state that this function returned for the earlier tokens.
        mask: bool `[B, T]`, True for a real token: padding leaves the state unchanged and gives zeros.
        chunk_size: tokens per chunk (rounded up to a power of two if there are decays), or between the states that
            `sequential` keeps for its backward pass (None: about sqrt(T)); changes only the order of summation.
        backend: `reference` (token by token, the definition), `torch` (chunks; the default on a CPU), `sequential`
            (token by token in the memory of one state, or of 2 sqrt(T) states in training), `triton` (kernels; the
            default on a GPU for what they support: no float64, at most 256 key and 512 value channels per head).

    Raises `ValueError` and `TypeError` for invalid shapes and options.
    """
    check_scan(q_BGTK, ("k", k_BGTK), v_BHTV, log_f_BHTF, state, 0, mask, chunk_size)
    (B, G, T, K), (_, H, _, V) = q_BGTK.shape, v_BHTV.shape
    if beta_BHT1.shape != (B, H, T, 1):
        raise ValueError(f"beta must have shape {(B, H, T, 1)}, got {tuple(beta_BHT1.shape)}")
    tensors = [q_BGTK, k_BGTK, v_BHTV, beta_BHT1] + ([] if log_f_BHTF is None else [log_f_BHTF])
    wide = wide_dtype(*tensors)
    sizes = {"key channels": (K, MOST_KEYS), "value channels": (V, MOST_CHANNELS)}
    name = choose("delta_scan", backend, BACKENDS, None, tensors, (state,), sizes)
    if name == "triton":
        from subquad.ops._triton.delta import delta_scan as kernels

        return ScanOutput(*kernels(q_BGTK, k_BGTK, v_BHTV, beta_BHT1, log_f_BHTF, state, mask))
    tensors = [x.to(wide) for x in tensors]
    if mask is not None:
        tensors = masked(tensors, mask, (0.0,) * 5)
    q, k, v, beta, *rest = (x.flatten(0, 1) for x in tensors)
    log_f = rest[0].clamp(min=FORGET_ALL) if rest else None
    s = v.new_zeros(B * H, K, V) if state is None else state.flatten(0, 1).to(wide)
    if name == "reference" or (name == "torch" and has_few(T)):
        if G != H:
            q, k = by_heads(q, H // G), by_heads(k, H // G)
        out, s = (reference if name == "reference" else single).delta_scan(q, k, v, beta, log_f, s)
    elif name == "sequential":
        from subquad.ops._sequential.scan import scan

        out, s = scan(q, k, v, beta, None if log_f is None else log_f[..., None], s, chunk_size)
    else:
        chunk = chunked.CHUNK if chunk_size is None else chunk_size
        out, s, *_ = chunked.delta_scan_op(q, k, v, beta, log_f, s, chunk, saves(q, k, v, beta, s, *rest))
    out = out.unflatten(0, (B, H)).to(v_BHTV.dtype)
    out = out if mask is None else out.masked_fill(~mask[:, None, :, None], 0.0)
    return ScanOutput(out, s.unflatten(0, (B, H)))
