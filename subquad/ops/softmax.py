"""The running softmax, a gated scan whose gates add up to one, and the running logsumexp of its logits.

Shape letters: B batch, H heads, T tokens, L latents, V value channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops import _reference as reference
from subquad.ops._torch import single
from subquad.ops._torch import softmax as chunked
from subquad.ops._torch.log_space_sums import running_logsumexp as chunked_logsumexp
from subquad.ops._torch.softmax import EMPTY as EMPTY
from subquad.ops.backends import choose, without_autocast
from subquad.ops.padding import check_mask
from subquad.ops.precision import at_least_float32, wide_dtype
from subquad.ops.scan import BACKENDS, MOST_CHANNELS, check_inputs, masked
from subquad.tracing import saves


class SoftmaxState(NamedTuple):
    """`lse` `[B, H, L]`, float64, the log-normaliser so far; `mean` `[B, H, L, V]`, the weighted mean of the values."""

    lse: Tensor
    mean: Tensor


class SoftmaxOutput:
    """`out` `[B, H, T, V]` in the dtype of v; the state after the last token; `lse`. Unpacks as `out, state, lse`."""

    __slots__ = ("_logits", "_lse", "_mask", "_start", "out", "state")

    def __init__(
        self,
        out: Tensor,
        state: SoftmaxState,
        *,
        lse: Tensor | None = None,
        logits: Tensor | None = None,
        start: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        self.out, self.state = out, state
        self._lse, self._logits, self._start, self._mask = lse, logits, start, mask

    @property
    def lse(self) -> Tensor:
        """Running logsumexp `[B, H, T, L]` of the logits; each access computes it again.

        The backends `reference` and `sequential` have kept it. See `running_logsumexp`.
        """
        if self._lse is not None:
            return self._lse
        assert self._logits is not None
        return running_logsumexp(self._logits, state=self._start, mask=self._mask)

    def __getitem__(self, index: int | slice) -> Any:
        names = ("out", "state", "lse")[index]
        return getattr(self, names) if isinstance(names, str) else tuple(getattr(self, name) for name in names)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(3))


@without_autocast
def running_softmax(
    p_BHTL: Tensor,
    logits_BHTL: Tensor,
    v_BHTV: Tensor,
    /,
    *,
    own: Tensor | None = None,
    state: SoftmaxState | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> SoftmaxOutput:
    """`o_t = sum_l p_tl sum_{s <= t} softmax_{s <= t}(logits_sl) v_s`: a scan whose gates add up to one (causal Latte).

    Args:
        p_BHTL: `p(l | t)`, normalised over the latents (apply dropout before).
        logits_BHTL: key logits of each latent, of any size (+-1e4 and beyond).
        v_BHTV: values.
        own: `[B, H, T, 1]`; token t then adds `own_t v_t` to its output (ELiTA's gate).
        state: the state that this function returned for the earlier tokens.
        mask: bool `[B, T]`, True for a real token: padding leaves the state unchanged and gives zeros.
        chunk_size: tokens per chunk, or between the states that `sequential` keeps for its backward pass (None: about
            sqrt(T)); changes only the order of summation.
        backend: `reference` (token by token, the definition), `torch` (chunks; the default on a CPU), `sequential`
            (token by token in the memory of one state, or of 2 sqrt(T) states in training), `triton` (kernels; the
            default on a GPU for what they support: no float64, at most 512 channels and latents per head).

    Raises `ValueError` and `TypeError` for invalid shapes and options.
    """
    if not (
        p_BHTL.ndim == v_BHTV.ndim == 4
        and p_BHTL.shape == logits_BHTL.shape
        and p_BHTL.shape[:3] == v_BHTV.shape[:3]
        and (p_BHTL.is_floating_point() and logits_BHTL.is_floating_point() and v_BHTV.is_floating_point())
    ):
        _refuse(p_BHTL, logits_BHTL, v_BHTV)
    (B, H, T, L), V = p_BHTL.shape, v_BHTV.shape[3]
    if own is not None and own.shape != (B, H, T, 1):
        raise ValueError(f"own must have shape {(B, H, T, 1)}, got {tuple(own.shape)}")
    if state is not None and (state[0].shape != (B, H, L) or state[1].shape != (B, H, L, V)):
        _refuse_state(state, (B, H, L, V))
    if mask is not None:
        check_mask(mask, B, T)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    tensors = [p_BHTL, logits_BHTL, v_BHTV] + ([] if own is None else [own])
    wide = wide_dtype(*tensors)
    sizes = {"latents": (L, MOST_CHANNELS), "value channels": (V, MOST_CHANNELS)}
    name = choose("running_softmax", backend, BACKENDS, None, tensors, state or (), sizes)
    start = None if state is None else state[0]
    if name == "triton":
        from subquad.ops._triton import common, softmax

        y_BHTV, _, *after = softmax.running_softmax(p_BHTL, logits_BHTL, v_BHTV, state, mask, want_lse=False)
        if own is not None:
            common.check_device("running_softmax", own)
            own_v = [own.to(v_BHTV.dtype), v_BHTV]
            y_BHTV = torch.addcmul(y_BHTV, *(own_v if mask is None else masked(own_v, mask, (0.0, 0.0))))
        return SoftmaxOutput(y_BHTV, SoftmaxState(*after), logits=logits_BHTL, start=start, mask=mask)
    tensors = [x.to(wide) for x in tensors]
    if mask is not None:
        tensors = masked(tensors, mask, (0.0, EMPTY, 0.0, 0.0))
    p, k, v, *rest = (x.flatten(0, 1) for x in tensors)
    if state is None:
        a, s = p.new_full((B * H, L), EMPTY, dtype=torch.float64), p.new_zeros(B * H, L, V)
    else:
        a, s = state[0].flatten(0, 1).double(), state[1].flatten(0, 1).to(wide)
    if name == "reference":
        out, lse, a, s = reference.running_softmax(p, k, v, a, s)
    elif name == "torch" and T == 1:
        out, lse, a, s = single.running_softmax(p, k, v, a, s)
    elif name == "sequential":
        from subquad.ops._sequential import scan as sequential

        out, lse, a, s = sequential.running_softmax(p, k, v, a, s, chunk_size)
    else:
        gate = rest[0] if rest else None
        chunk = (chunked.MEAN_CHUNK if L == 1 else chunked.CHUNK) if chunk_size is None else chunk_size
        out, a, s, *_ = chunked.running_softmax_op(p, k, v, gate, a, s, chunk, saves(p, k, v, gate, a, s))
        lse = None
    if rest and lse is not None:  # chunks add it themselves
        out = torch.addcmul(out, rest[0], v)
    out = out.unflatten(0, (B, H)).to(v_BHTV.dtype)
    out = out if mask is None else out.masked_fill(~mask[:, None, :, None], 0.0)
    a, s = a.unflatten(0, (B, H)), s.unflatten(0, (B, H))
    if lse is not None:
        return SoftmaxOutput(out, SoftmaxState(a, s), lse=lse.unflatten(0, (B, H)))
    return SoftmaxOutput(out, SoftmaxState(a, s), logits=k.unflatten(0, (B, H)), start=start)


def _refuse(p: Tensor, logits: Tensor, v: Tensor) -> None:
    """Raise the error of inputs of `running_softmax` that do not agree."""
    check_inputs(("p", p), ("logits", logits), ("v", v))
    raise ValueError(f"p and logits must have the same latents, got {p.shape[-1]} and {logits.shape[-1]}")


def _refuse_state(state: SoftmaxState | tuple[Tensor, Tensor], shape: tuple[int, ...]) -> None:
    """Raise the error of a state that does not fit a mean of `shape`, `[B, H, L, V]`."""
    shapes = tuple(state[0].shape), tuple(state[1].shape)
    raise ValueError(f"state must have shapes {shape[:3]} and {shape}, got {shapes[0]} and {shapes[1]}")


@without_autocast
def gated_mean(
    gate_BHT1: Tensor,
    logits_BHT1: Tensor,
    v_BHTV: Tensor,
    /,
    *,
    dropout_p: float = 0.0,
    state: SoftmaxState | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> SoftmaxOutput:
    """`y_t = g_t mu_t + (1 - g_t) v_t`, `g_t = sigmoid(gate_t + lse_t)`: a gate between past and token (ELiTA).

    mu_t is the mean of v_s with the weights `softmax_{s <= t}(logits_s)`, lse_t the running logsumexp of the logits.

    Args:
        gate_BHT1: the gate's logit beside lse_t.
        logits_BHT1: key logits of any size (+-1e4 and beyond).
        v_BHTV: values.
        dropout_p: dropout of the two weights g_t and 1 - g_t.
        state, mask, chunk_size, backend: as in `running_softmax`. `triton` takes three launches, or one for a token.

    Raises `ValueError` and `TypeError` for invalid shapes and options.
    """
    B, H, T, V = check_inputs(("gate", gate_BHT1), ("logits", logits_BHT1), ("v", v_BHTV))
    for what, x in (("gate", gate_BHT1), ("logits", logits_BHT1)):
        if x.shape[-1] != 1:
            raise ValueError(f"{what} must have shape {(B, H, T, 1)}, got {tuple(x.shape)}")
    tensors = [gate_BHT1, logits_BHT1, v_BHTV]
    sizes = {"value channels": (V, MOST_CHANNELS)}
    name = choose("gated_mean", backend, BACKENDS, None, tensors, state or (), sizes)
    if name == "triton":
        from subquad.ops._triton import gated_mean as kernels

        if state is not None and (state[0].shape != (B, H, 1) or state[1].shape != (B, H, 1, V)):
            _refuse_state(state, (B, H, 1, V))
        if mask is not None:
            check_mask(mask, B, T)
        factors = F.dropout(logits_BHT1.new_ones(B, H, T, 2), dropout_p) if dropout_p else None
        out, *after = kernels.gated_mean(gate_BHT1, logits_BHT1, v_BHTV, factors, state, mask)
        start = None if state is None else state[0]
        return SoftmaxOutput(out, SoftmaxState(*after), logits=logits_BHT1, start=start, mask=mask)
    lse_BHT1 = _logsumexp(logits_BHT1, None if state is None else state[0], mask, name)
    s_BHT1 = gate_BHT1 + lse_BHT1
    shares_BHT2 = F.dropout(torch.cat([s_BHT1.sigmoid(), (-s_BHT1).sigmoid()], -1), dropout_p)
    past_BHT1, own_BHT1 = shares_BHT2.split(1, -1)
    return running_softmax(
        past_BHT1, logits_BHT1, v_BHTV, own=own_BHT1, state=state, mask=mask, chunk_size=chunk_size, backend=name
    )


@without_autocast
def running_logsumexp(logits_BHTL: Tensor, /, *, state: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """`lse_t = log(exp(state) + sum_{s <= t} exp(logits_s))`: the log of the running softmax's normalisers.

    Args:
        logits_BHTL: logits of any size.
        state: `[B, H, L]`, the log-normaliser so far (`SoftmaxState.lse`).
        mask: bool `[B, T]`, True for a real token; padding adds nothing.

    Returns `[B, H, T, L]`, float32 or wider; -2^100 stands for log 0 before the first real token. Raises `ValueError`
    and `TypeError` for invalid shapes. Computes in chunks, or as the backend `reference` where that is asked.
    """
    name = choose("running_logsumexp", None, BACKENDS, None, [logits_BHTL], (state,))
    return _logsumexp(logits_BHTL, state, mask, name)


def _logsumexp(logits_BHTL: Tensor, state: Tensor | None, mask: Tensor | None, backend: str) -> Tensor:
    B, H, T, L = check_inputs(("logits", logits_BHTL))
    if mask is not None:
        check_mask(mask, B, T)
    k = at_least_float32(logits_BHTL)
    k = (k if mask is None else masked([k], mask, (EMPTY,))[0]).flatten(0, 1)
    if state is None:
        a = k.new_full((B * H, L), EMPTY, dtype=torch.float64)
    elif state.shape != (B, H, L):
        raise ValueError(f"state must have shape {(B, H, L)}, got {tuple(state.shape)}")
    else:
        a = state.flatten(0, 1).double()
    if T == 1 or backend == "reference":
        lse = reference.running_logsumexp(k, a)
    else:
        lse = chunked_logsumexp(k, a)
    return lse.unflatten(0, (B, H))
