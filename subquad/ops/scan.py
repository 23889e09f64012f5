"""Engine A, the gated scan, and the input checks that all scans share.

Shape letters: B batch, H heads, G groups of heads, T tokens, K key channels, V value channels, F = 1 or K decays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops import _reference as reference
from subquad.ops._sequential import scan as sequential
from subquad.ops._torch import scan as chunked
from subquad.ops._torch import single
from subquad.ops.backends import HAS_TRITON, choose, has_tensor_cores, without_autocast
from subquad.ops.groups import by_heads, share_of
from subquad.ops.padding import check_heads, check_mask
from subquad.tracing import saves

BACKENDS = ("reference", "torch", "sequential", "triton")
MOST_CHANNELS = 512
"""Most channels or latents per head in the kernels of `triton`."""
FORGET_ALL = -1e4
"""Floor of log decays: its exp is zero in every dtype, and sums of floored logarithms stay finite."""


class ScanOutput(NamedTuple):
    """`out` `[B, H, T, V]` in the dtype of v; `state` `[B, H, K, V]`, float32 or wider (V + 1 if normalised)."""

    out: Tensor
    state: Tensor


@without_autocast
def gated_scan(
    q_BGTK: Tensor,
    i_BGTK: Tensor,
    v_BHTV: Tensor,
    log_f_BHTF: Tensor | None,
    /,
    *,
    state: Tensor | None = None,
    normalise: bool = False,
    eps: float = 0.0,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> ScanOutput:
    """`S_t = f_t * S_{t-1} + i_t (x) v_t`, `o_t = q_t S_t`: a linear recurrence whose state decays.

    Args:
        q_BGTK: queries; each is that of H / G neighbouring heads, whose scores are computed once.
        i_BGTK: inputs, which write values to key channels.
        v_BHTV: values.
        log_f_BHTF: natural log of the decays, one per channel (F = K) or per head (F = 1), or None for f = 1. Must be
            at most 0, which is not checked; -inf forgets everything.
        state: the state that this function returned for the earlier tokens.
        normalise: divide by the sum of the weights, `q_t . z_t + eps` with `z_t = f_t * z_{t-1} + i_t`; the state then
            holds z as a last value channel. If the divisor is zero the output is zero.
        eps: added to the sum of the weights.
        mask: bool `[B, T]`, True for a real token: padding leaves the state unchanged and gives zeros.
        chunk_size: tokens per chunk (rounded up to a power of two if there are decays), or between the states that
            `sequential` keeps for its backward pass (None: about sqrt(T)); changes only the order of summation.
        backend: `reference` (token by token, the definition), `torch` (chunks; the default on a CPU), `sequential`
            (token by token in the memory of one state, or of 2 sqrt(T) states in training), `triton` (kernels; the
            default on a GPU for what they support: no float64, at most 512 channels per head).

    Raises `ValueError` and `TypeError` for invalid shapes and options.
    """
    B, H, T, K, V = check_scan(("q", q_BGTK), ("i", i_BGTK), v_BHTV, log_f_BHTF)
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    chunk = chunk_of(chunk_size, chunked.CHUNK)
    tensors = [q_BGTK, i_BGTK, v_BHTV] + ([] if log_f_BHTF is None else [log_f_BHTF])
    wide, sizes = wide_of(*tensors), {"key channels": (K, MOST_CHANNELS), "value channels": (V, MOST_CHANNELS)}
    name = choose_for("gated_scan", backend, tensors, sizes, state)
    channels = V + int(normalise)
    check_before(state, mask, (B, H, K, channels), T)
    if name == "triton":
        from subquad.ops._triton.scan import gated_scan as kernels

        return ScanOutput(*kernels(q_BGTK, i_BGTK, v_BHTV, log_f_BHTF, state, mask, normalise, eps))
    q, i, v, *rest = (x.flatten(0, 1) for x in masked(tensors, mask, wide, (0.0, 0.0, 0.0, 0.0)))
    log_f = rest[0].clamp(min=FORGET_ALL) if rest else None
    s = q.new_zeros(B * H, K, channels) if state is None else state.flatten(0, 1).to(wide)
    if name == "reference" or (name == "torch" and T == 1):
        scan, share = (reference if name == "reference" else single).gated_scan, share_of(q_BGTK.shape[1], H)
        out, s = scan(by_heads(q, share), by_heads(i, share), v, log_f, s, normalise, eps)
    elif name == "sequential":
        out, s = sequential.scan(q, i, F.pad(v, (0, 1), value=1.0) if normalise else v, None, log_f, s, chunk_size)
        out = reference.divide(out[..., :V], out[..., V], eps) if normalise else out
    else:
        out, s, *_ = chunked.gated_scan_op(q, i, v, log_f, s, normalise, eps, chunk, saves(q, i, v, s, *rest))
    out = out.unflatten(0, (B, H)).to(v_BHTV.dtype)
    return ScanOutput(zero_padding(out, mask), s.unflatten(0, (B, H)))


def check_scan(
    q: tuple[str, Tensor], k: tuple[str, Tensor], v_BHTV: Tensor, log_f_BHTF: Tensor | None
) -> tuple[int, int, int, int, int]:
    """Return B, H, T, K and V of a scan; raise if queries and keys, by name, values and decays do not agree."""
    B, G, T, K = check_inputs(q, k)
    if q[1].shape[-1] != K:
        raise ValueError(f"{q[0]} and {k[0]} must have the same channels, got {q[1].shape[-1]} and {K}")
    check_heads("v", v_BHTV)
    H, V = v_BHTV.shape[1], v_BHTV.shape[3]
    if (v_BHTV.shape[0], v_BHTV.shape[2]) != (B, T):
        raise ValueError(f"v must agree with {q[0]} in B and T, got {tuple(v_BHTV.shape)} and {tuple(q[1].shape)}")
    share_of(G, H)
    if log_f_BHTF is not None and log_f_BHTF.shape not in ((B, H, T, K), (B, H, T, 1)):
        raise ValueError(f"log_f must have shape {(B, H, T, K)} or {(B, H, T, 1)}, got {tuple(log_f_BHTF.shape)}")
    return B, H, T, K, V


def check_before(state: Tensor | None, mask: Tensor | None, shape: tuple[int, int, int, int], tokens: int) -> None:
    """Raise unless the state, if any, has this shape, and the mask, if any, that of the tokens."""
    if state is not None and state.shape != shape:
        raise ValueError(f"state must have shape {shape}, got {tuple(state.shape)}")
    if mask is not None:
        check_mask(mask, shape[0], tokens)


def check_inputs(*tensors: tuple[str, Tensor]) -> tuple[int, int, int, int]:
    """Return B, H, T and the channels of the last tensor; raise if the named tensors do not agree."""
    for name, x in tensors:
        check_heads(name, x)
        if x.shape[:3] != tensors[0][1].shape[:3]:
            raise ValueError(
                f"{name} must agree with {tensors[0][0]} in B, H and T, "
                f"got {tuple(x.shape)} and {tuple(tensors[0][1].shape)}"
            )
    B, H, T, V = tensors[-1][1].shape
    return B, H, T, V


def choose_for(
    op: str, backend: str | None, tensors: list[Tensor], sizes: dict[str, tuple[int, int]], *state: Tensor | None
) -> str:
    """Return the backend: without a request `triton` if its kernels suit the GPU, dtypes and sizes, else `torch`."""
    fitting = wide_of(*tensors) == torch.float32 and all(size <= most for size, most in sizes.values())
    kernels = HAS_TRITON and fitting and has_tensor_cores(tensors[0].device)
    name = choose(op, backend, BACKENDS, "triton" if kernels else "torch", [*tensors, *state])
    for what, (size, most) in sizes.items():
        if name == "triton" and size > most:
            raise ValueError(f"backend 'triton' of {op} holds at most {most} {what} per head, got {size}")
    return name


def chunk_of(chunk_size: int | None, default: int) -> int:
    """Return the requested chunk size, or the default."""
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    return chunk_size or default


def wide_of(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of the recurrence: float32, or float64 if an input has it."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def masked(tensors: list[Tensor], mask: Tensor | None, dtype: torch.dtype, fills: tuple[float, ...]) -> list[Tensor]:
    """Return the tensors in `dtype`, each with its fill at padding."""
    wide = [x.to(dtype) for x in tensors]
    if mask is None:
        return wide
    padding = ~mask[:, None, :, None]
    return [x.masked_fill(padding, fill) for x, fill in zip(wide, fills, strict=False)]


def zero_padding(out_BHTV: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the outputs at padding."""
    return out_BHTV if mask is None else out_BHTV.masked_fill(~mask[:, None, :, None], 0.0)
