"""Engine A, the gated scan, and the input checks that all scans share.

Shape letters: B batch, H heads, G groups of heads, T tokens, K key channels, V value channels, F = 1 or K decays.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from subquad.ops import _reference as reference
from subquad.ops._torch import scan as chunked
from subquad.ops._torch import single
from subquad.ops._torch.scan_by_value import gated_scan_by_value_op
from subquad.ops.backends import choose, without_autocast
from subquad.ops.groups import by_heads, share_of
from subquad.ops.padding import check_heads, check_mask
from subquad.ops.precision import wide_dtype
from subquad.tracing import saves

BACKENDS = ("reference", "torch", "sequential", "triton")
BACKENDS_ON_VALUES = BACKENDS[:-1]
"""Backends of the scan with decays of the value channels."""
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
    log_g: Tensor | None = None,
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
        log_g: in place of log_f, natural log of decays of the value channels, `[B, H, T, V]`: `S_t = S_{t-1} g_t +
            i_t (x) v_t` with g_t along the last axis. The limits of log_f apply.
        state: the state that this function returned for the earlier tokens.
        normalise: divide by the sum of the weights, `q_t . z_t + eps` with `z_t = f_t * z_{t-1} + i_t`; the state then
            holds z as a last value channel. If the divisor is zero the output is zero.
        eps: added to the sum of the weights.
        mask: bool `[B, T]`, True for a real token: padding leaves the state unchanged and gives zeros.
        chunk_size: tokens per chunk (rounded up to a power of two if there are decays), or between the states that
            `sequential` keeps for its backward pass (None: about sqrt(T)); changes only the order of summation.
        backend: `reference` (token by token, the definition), `torch` (chunks; the default on a CPU), `sequential`
            (token by token in the memory of one state, or of 2 sqrt(T) states in training), `triton` (kernels; the
            default on a GPU for what they support: no float64, no log_g, at most 512 channels per head).

    Raises `ValueError` and `TypeError` for invalid shapes and options.
    """
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    more = int(normalise)
    check_scan(q_BGTK, ("i", i_BGTK), v_BHTV, log_f_BHTF, state, more, mask, chunk_size)
    if log_g is not None:
        _check_value_decays(log_g, v_BHTV, log_f_BHTF, normalise)
    (B, G, T, K), (_, H, _, V) = q_BGTK.shape, v_BHTV.shape
    tensors = [q_BGTK, i_BGTK, v_BHTV, *(x for x in (log_f_BHTF, log_g) if x is not None)]
    wide = wide_dtype(*tensors)
    sizes = {"key channels": (K, MOST_CHANNELS), "value channels": (V, MOST_CHANNELS)}
    available, default = (BACKENDS, None) if log_g is None else (BACKENDS_ON_VALUES, "torch")
    name = choose("gated_scan", backend, available, default, tensors, (state,), sizes)
    if name == "triton":
        from subquad.ops._triton.scan import gated_scan as kernels

        return ScanOutput(*kernels(q_BGTK, i_BGTK, v_BHTV, log_f_BHTF, state, mask, normalise, eps))
    tensors = [x.to(wide) for x in tensors]
    if mask is not None:
        tensors = masked(tensors, mask, (0.0, 0.0, 0.0, 0.0))
    q, i, v, *rest = (x.flatten(0, 1) for x in tensors)
    decays = rest[0].clamp(min=FORGET_ALL) if rest else None
    # Shaped to multiply a state along its key channels, or along its value channels.
    decays_NTKV = None if decays is None else decays.unsqueeze(-1 if log_g is None else -2)
    s = q.new_zeros(B * H, K, V + more) if state is None else state.flatten(0, 1).to(wide)
    if name == "reference" or (name == "torch" and T == 1):
        if G != H:
            q, i = by_heads(q, H // G), by_heads(i, H // G)
        out, s = (reference if name == "reference" else single).gated_scan(q, i, v, decays_NTKV, s, normalise, eps)
    elif name == "sequential":
        from subquad.ops._sequential.scan import scan

        v = F.pad(v, (0, 1), value=1.0) if normalise else v
        out, s = scan(q, i, v, None, decays_NTKV, s, chunk_size)
        out = reference.divide(out[..., :V], out[..., V], eps) if normalise else out
    else:
        chunk = chunked.CHUNK if chunk_size is None else chunk_size
        save = saves(q, i, v, s, *rest)
        if log_g is None:
            out, s, *_ = chunked.gated_scan_op(q, i, v, decays, s, normalise, eps, chunk, save)
        else:
            assert decays is not None
            out, s, _ = gated_scan_by_value_op(q, i, v, decays, s, chunk, save)
    out = out.unflatten(0, (B, H)).to(v_BHTV.dtype)
    out = out if mask is None else out.masked_fill(~mask[:, None, :, None], 0.0)
    return ScanOutput(out, s.unflatten(0, (B, H)))


def _check_value_decays(log_g: Tensor, v_BHTV: Tensor, log_f_BHTF: Tensor | None, normalise: bool) -> None:
    """Raise unless decays of the value channels have the right shape and no others are given."""
    if log_f_BHTF is not None:
        raise ValueError("keys and values can't both decay: give log_f or log_g, and None for the other")
    if normalise:
        raise ValueError("log_g needs normalise=False: each value channel would have a sum of weights of its own")
    if log_g.shape != v_BHTV.shape:
        raise ValueError(f"log_g must have the shape of v, {tuple(v_BHTV.shape)}, got {tuple(log_g.shape)}")


def check_scan(
    q_BGTK: Tensor,
    k: tuple[str, Tensor],
    v_BHTV: Tensor,
    log_f_BHTF: Tensor | None,
    state: Tensor | None,
    more: int,
    mask: Tensor | None,
    chunk_size: int | None,
) -> None:
    """Raise unless the inputs of a scan agree; `k` with its name, and the state has `more` channels than v."""
    q, v = q_BGTK.shape, v_BHTV.shape
    if not (
        len(q) == len(v) == 4
        and q == k[1].shape
        and q[::2] == v[::2]
        and (q[1] == v[1] or (q[1] >= 1 and v[1] % q[1] == 0))
        and (log_f_BHTF is None or log_f_BHTF.shape in ((*v[:3], q[3]), (*v[:3], 1)))
        and (state is None or state.shape == (*v[:2], q[3], v[3] + more))
        and (q_BGTK.is_floating_point() and k[1].is_floating_point() and v_BHTV.is_floating_point())
    ):
        _refuse(q_BGTK, k, v_BHTV, log_f_BHTF, state, more)
    if mask is not None:
        check_mask(mask, q[0], q[2])
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def _refuse(
    q_BGTK: Tensor, k: tuple[str, Tensor], v_BHTV: Tensor, log_f_BHTF: Tensor | None, state: Tensor | None, more: int
) -> None:
    """Raise the error of inputs that do not agree."""
    B, G, T, K = check_inputs(("q", q_BGTK), k)
    if q_BGTK.shape[-1] != K:
        raise ValueError(f"q and {k[0]} must have the same channels, got {q_BGTK.shape[-1]} and {K}")
    check_heads("v", v_BHTV)
    H, V = v_BHTV.shape[1], v_BHTV.shape[3]
    if (v_BHTV.shape[0], v_BHTV.shape[2]) != (B, T):
        raise ValueError(f"v must agree with q in B and T, got {tuple(v_BHTV.shape)} and {tuple(q_BGTK.shape)}")
    share_of(G, H)
    if log_f_BHTF is not None and log_f_BHTF.shape not in ((B, H, T, K), (B, H, T, 1)):
        raise ValueError(f"log_f must have shape {(B, H, T, K)} or {(B, H, T, 1)}, got {tuple(log_f_BHTF.shape)}")
    assert state is not None
    raise ValueError(f"state must have shape {(B, H, K, V + more)}, got {tuple(state.shape)}")


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


def masked(tensors: list[Tensor], mask: Tensor, fills: tuple[float, ...]) -> list[Tensor]:
    """Return the tensors, each with its fill at padding."""
    padding = ~mask[:, None, :, None]
    return [x.masked_fill(padding, fill) for x, fill in zip(tensors, fills, strict=False)]
