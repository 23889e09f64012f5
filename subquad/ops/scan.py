"""Engine A, the gated scan, and the running softmax that is made of it.

Shape letters: B batch, H heads, T tokens, K key channels, V value channels, L latents, F = 1 or K decays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops._reference import scan as reference
from subquad.ops._sequential import scan as sequential
from subquad.ops._torch import scan as chunked
from subquad.ops._torch import softmax as chunked_softmax
from subquad.ops.backends import choose, without_autocast
from subquad.ops.padding import check_mask

BACKENDS = ("reference", "torch", "sequential")
FORGET_ALL = -1e4
"""Decays below exp of this are zero in every dtype; the floor keeps sums of their logarithms finite."""


class ScanOutput(NamedTuple):
    """`out` `[B, H, T, V]` in the dtype of v; `state` `[B, H, K, V]`, float32 or wider (V + 1 where normalised)."""

    out: Tensor
    state: Tensor


class SoftmaxState(NamedTuple):
    """`lse` `[B, H, L]`, float64, the log-normaliser so far; `mean` `[B, H, L, V]`, the weighted mean of the values."""

    lse: Tensor
    mean: Tensor


class SoftmaxOutput(NamedTuple):
    """`out` `[B, H, T, V]` in the dtype of v; the state after the last token; `lse` `[B, H, T, L]`."""

    out: Tensor
    state: SoftmaxState
    lse: Tensor


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
    """`S_t = f_t * S_{t-1} + i_t (x) v_t`, `o_t = q_t S_t`, or over `q_t . z_t + eps`, `z_t = f_t * z_{t-1} + i_t`.

    Args:
        q_BHTK: queries.
        i_BHTK: inputs, which write values to key channels.
        v_BHTV: values.
        log_f_BHTF: natural log of the decays: one a channel (F = K), one a head (F = 1), or None for f = 1. At most 0,
            which is not checked; -inf forgets all.
        state: the state that earlier tokens left, as this function returned it.
        normalise: divide by the sum of the weights; the state then holds z as a last value channel. Where that sum plus
            `eps` is zero the output is zero.
        eps: added to the sum of the weights.
        mask: bool `[B, T]`, True for a real token: padding leaves the state alone and gives zeros.
        chunk_size: tokens a chunk (with decays: rounded up to a power of two), or between the states that `sequential`
            keeps for its backward pass (None: about sqrt(T)); changes the order of sums only.
        backend: `reference` (token by token, the definition), `torch` (chunks, the default), `sequential` (token by
            token in the memory of one state, or of 2 sqrt(T) states in training).

    Raises `ValueError` and `TypeError` for shapes and options that do not fit.
    """
    B, H, T, V = _check(("q", q_BHTK), ("i", i_BHTK), ("v", v_BHTV))
    K = q_BHTK.shape[-1]
    if i_BHTK.shape[-1] != K:
        raise ValueError(f"q and i must have the same channels, got {K} and {i_BHTK.shape[-1]}")
    if log_f_BHTF is not None and log_f_BHTF.shape not in ((B, H, T, K), (B, H, T, 1)):
        raise ValueError(f"log_f must have shape {(B, H, T, K)} or {(B, H, T, 1)}, got {tuple(log_f_BHTF.shape)}")
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    chunk = _chunk(chunk_size, chunked.CHUNK)
    name = choose("gated_scan", backend, BACKENDS, "torch")
    tensors = [q_BHTK, i_BHTK, v_BHTV] + ([] if log_f_BHTF is None else [log_f_BHTF])
    wide = _wide(*tensors)
    q, i, v, *rest = (x.flatten(0, 1) for x in _masked(tensors, mask, wide, (0.0, 0.0, 0.0, 0.0)))
    log_f = rest[0].clamp(min=FORGET_ALL) if rest else None
    channels = V + normalise
    if state is None:
        s = q.new_zeros(B * H, K, channels)
    elif state.shape != (B, H, K, channels):
        raise ValueError(f"state must have shape {(B, H, K, channels)}, got {tuple(state.shape)}")
    else:
        s = state.flatten(0, 1).to(wide)
    if name == "reference":
        out, s = reference.gated_scan(q, i, v, log_f, s, normalise, eps)
    elif name == "sequential":
        out, s = sequential.gated_scan(q, i, F.pad(v, (0, 1), value=1.0) if normalise else v, log_f, s, chunk_size)
        out = reference.divide(out[..., :V], out[..., V], eps) if normalise else out
    else:
        save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, i, v, s, *rest))
        out, s, _, _ = chunked.gated_scan_op(q, i, v, log_f, s, normalise, eps, chunk, save)
    out = out.unflatten(0, (B, H)).to(v_BHTV.dtype)
    return ScanOutput(_zero_padding(out, mask), s.unflatten(0, (B, H)))


@without_autocast
def running_softmax(
    p_BHTL: Tensor,
    logits_BHTL: Tensor,
    v_BHTV: Tensor,
    /,
    *,
    state: SoftmaxState | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> SoftmaxOutput:
    """`o_t = sum_l p_tl sum_{s <= t} softmax_{s <= t}(logits_sl) v_s`: a scan whose gates add up to one (causal Latte).

    Args:
        p_BHTL: `p(l | t)`, already normalised over the latents (dropout acts on it before).
        logits_BHTL: key logits of each latent; of any size, up to +-1e4 and beyond.
        v_BHTV: values.
        state: the state that earlier tokens left, as this function returned it.
        mask: bool `[B, T]`, True for a real token: padding leaves the state alone and gives zeros.
        chunk_size: tokens a chunk, rounded up to a power of two, or between the states that `sequential` keeps for its
            backward pass (None: about sqrt(T)); changes the order of sums only.
        backend: `reference` (token by token, the definition), `torch` (chunks, the default), `sequential` (token by
            token in the memory of one state, or of 2 sqrt(T) states in training).

    `lse` is the running logsumexp of the logits (differentiable; -2^100, nothing, before the first real token). Raises
    `ValueError` and `TypeError` for shapes and options that do not fit.
    """
    B, H, _T, V = _check(("p", p_BHTL), ("logits", logits_BHTL), ("v", v_BHTV))
    L = p_BHTL.shape[-1]
    if logits_BHTL.shape[-1] != L:
        raise ValueError(f"p and logits must have the same latents, got {L} and {logits_BHTL.shape[-1]}")
    chunk = _chunk(chunk_size, chunked_softmax.CHUNK)
    name = choose("running_softmax", backend, BACKENDS, "torch")
    tensors = [p_BHTL, logits_BHTL, v_BHTV]
    wide = _wide(*tensors)
    p, k, v = (x.flatten(0, 1) for x in _masked(tensors, mask, wide, (0.0, chunked_softmax.EMPTY, 0.0)))
    if state is None:
        a, s = p.new_full((B * H, L), chunked_softmax.EMPTY, dtype=torch.float64), p.new_zeros(B * H, L, V)
    elif state[0].shape != (B, H, L) or state[1].shape != (B, H, L, V):
        shapes = tuple(state[0].shape), tuple(state[1].shape)
        raise ValueError(f"state must have shapes {(B, H, L)} and {(B, H, L, V)}, got {shapes[0]} and {shapes[1]}")
    else:
        a, s = state[0].flatten(0, 1).double(), state[1].flatten(0, 1).to(wide)
    if name == "reference":
        out, lse, a, s = reference.running_softmax(p, k, v, a, s)
    elif name == "sequential":
        out, lse, a, s = sequential.running_softmax(p, k, v, a, s, chunk_size)
    else:
        save = torch.is_grad_enabled() and any(x.requires_grad for x in (p, k, v, a, s))
        out, m, z, a, s, _ = chunked_softmax.running_softmax_op(p, k, v, a, s, chunk, save)
        lse = m + z.log()
    out = _zero_padding(out.unflatten(0, (B, H)).to(v_BHTV.dtype), mask)
    lse, a, s = (x.unflatten(0, (B, H)) for x in (lse, a, s))
    return SoftmaxOutput(out, SoftmaxState(a, s), lse)


def _check(*tensors: tuple[str, Tensor]) -> tuple[int, int, int, int]:
    for name, x in tensors:
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape [B, H, T, channels], got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if x.shape[:3] != tensors[0][1].shape[:3]:
            raise ValueError(
                f"{name} must agree with {tensors[0][0]} in B, H and T, "
                f"got {tuple(x.shape)} and {tuple(tensors[0][1].shape)}"
            )
    B, H, T, V = tensors[-1][1].shape
    return B, H, T, V


def _chunk(chunk_size: int | None, default: int) -> int:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    return chunk_size or default


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype of the recurrence: float32, or float64 where an input has it."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _masked(tensors: list[Tensor], mask: Tensor | None, dtype: torch.dtype, fills: tuple[float, ...]) -> list[Tensor]:
    wide = [x.to(dtype) for x in tensors]
    if mask is None:
        return wide
    check_mask(mask, tensors[0].shape[0], tensors[0].shape[2])
    padding = ~mask[:, None, :, None]
    return [x.masked_fill(padding, fill) for x, fill in zip(wide, fills, strict=False)]


def _zero_padding(out_BHTV: Tensor, mask: Tensor | None) -> Tensor:
    return out_BHTV if mask is None else out_BHTV.masked_fill(~mask[:, None, :, None], 0.0)
