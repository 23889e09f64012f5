"""Engine A, the gated scan, and the input checks that all scans share.

Shape letters: B batch, H heads, T tokens, K key channels, V value channels, F = 1 or K decays.
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
from subquad.ops.padding import check_heads, check_mask

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
    q_BHTK: Tensor,
    i_BHTK: Tensor,
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
        q_BHTK: queries.
        i_BHTK: inputs, which write values to key channels.
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
    B, H, T, V = check_inputs(("q", q_BHTK), ("i", i_BHTK), ("v", v_BHTV))
    K = q_BHTK.shape[-1]
    if i_BHTK.shape[-1] != K:
        raise ValueError(f"q and i must have the same channels, got {K} and {i_BHTK.shape[-1]}")
    if log_f_BHTF is not None and log_f_BHTF.shape not in ((B, H, T, K), (B, H, T, 1)):
        raise ValueError(f"log_f must have shape {(B, H, T, K)} or {(B, H, T, 1)}, got {tuple(log_f_BHTF.shape)}")
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    chunk = chunk_of(chunk_size, chunked.CHUNK)
    tensors = [q_BHTK, i_BHTK, v_BHTV] + ([] if log_f_BHTF is None else [log_f_BHTF])
    wide, sizes = wide_of(*tensors), {"key channels": (K, MOST_CHANNELS), "value channels": (V, MOST_CHANNELS)}
    name = choose_for("gated_scan", backend, tensors, sizes)
    channels = V + normalise
    if state is not None and state.shape != (B, H, K, channels):
        raise ValueError(f"state must have shape {(B, H, K, channels)}, got {tuple(state.shape)}")
    if mask is not None:
        check_mask(mask, B, T)
    if name == "triton":
        from subquad.ops._triton.scan import gated_scan as kernels

        return ScanOutput(*kernels(q_BHTK, i_BHTK, v_BHTV, log_f_BHTF, state, mask, normalise, eps))
    q, i, v, *rest = (x.flatten(0, 1) for x in masked(tensors, mask, wide, (0.0, 0.0, 0.0, 0.0)))
    log_f = rest[0].clamp(min=FORGET_ALL) if rest else None
    s = q.new_zeros(B * H, K, channels) if state is None else state.flatten(0, 1).to(wide)
    if name == "reference":
        out, s = reference.gated_scan(q, i, v, log_f, s, normalise, eps)
    elif name == "torch" and T == 1:
        out, s = single.gated_scan(q, i, v, log_f, s, normalise, eps)
    elif name == "sequential":
        out, s = sequential.gated_scan(q, i, F.pad(v, (0, 1), value=1.0) if normalise else v, log_f, s, chunk_size)
        out = reference.divide(out[..., :V], out[..., V], eps) if normalise else out
    else:
        save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, i, v, s, *rest))
        out, s, *_ = chunked.gated_scan_op(q, i, v, log_f, s, normalise, eps, chunk, save)
    out = out.unflatten(0, (B, H)).to(v_BHTV.dtype)
    return ScanOutput(zero_padding(out, mask), s.unflatten(0, (B, H)))


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


def choose_for(op: str, backend: str | None, tensors: list[Tensor], sizes: dict[str, tuple[int, int]]) -> str:
    """Return the backend: without a request `triton` if its kernels suit the GPU, dtypes and sizes, else `torch`."""
    fitting = wide_of(*tensors) == torch.float32 and all(size <= most for size, most in sizes.values())
    kernels = HAS_TRITON and fitting and has_tensor_cores(tensors[0].device)
    name = choose(op, backend, BACKENDS, "triton" if kernels else "torch")
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
