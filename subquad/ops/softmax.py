"""The running softmax, a gated scan whose gates add up to one, and the running logsumexp of its logits.

Shape letters: B batch, H heads, T tokens, L latents, V value channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.ops import _reference as reference
from subquad.ops._sequential import scan as sequential
from subquad.ops._torch import softmax as chunked
from subquad.ops._torch.halves import running_logsumexp as chunked_logsumexp
from subquad.ops._torch.softmax import EMPTY as EMPTY
from subquad.ops.backends import without_autocast
from subquad.ops.padding import check_mask
from subquad.ops.scan import MOST_CHANNELS, check_inputs, choose_for, chunk_of, masked, wide_of, zero_padding

MOST_LATENTS = 512
"""Most latents per head in the kernels of `triton`."""


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
        """Running logsumexp `[B, H, T, L]` of the logits; each access costs another pass over them.

        The backends `reference` and `sequential` keep it from their own pass. See `running_logsumexp`.
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
            default on a GPU for what they support: no float64, at most 256 channels and 512 latents per head).

    Raises `ValueError` and `TypeError` for invalid shapes and options.
    """
    B, H, T, V = check_inputs(("p", p_BHTL), ("logits", logits_BHTL), ("v", v_BHTV))
    L = p_BHTL.shape[-1]
    if logits_BHTL.shape[-1] != L:
        raise ValueError(f"p and logits must have the same latents, got {L} and {logits_BHTL.shape[-1]}")
    chunk = chunk_of(chunk_size, chunked.chunk_size(L))
    if own is not None and own.shape != (B, H, T, 1):
        raise ValueError(f"own must have shape {(B, H, T, 1)}, got {tuple(own.shape)}")
    tensors = [p_BHTL, logits_BHTL, v_BHTV] + ([] if own is None else [own])
    wide, sizes = wide_of(*tensors), {"latents": (L, MOST_LATENTS), "value channels": (V, MOST_CHANNELS)}
    name = choose_for("running_softmax", backend, tensors, sizes)
    if state is not None and (state[0].shape != (B, H, L) or state[1].shape != (B, H, L, V)):
        shapes = tuple(state[0].shape), tuple(state[1].shape)
        raise ValueError(f"state must have shapes {(B, H, L)} and {(B, H, L, V)}, got {shapes[0]} and {shapes[1]}")
    if mask is not None:
        check_mask(mask, B, T)
    start = None if state is None else state[0]
    if name == "triton":
        from subquad.ops._triton import common, softmax

        y_BHTV, _, *after = softmax.running_softmax(p_BHTL, logits_BHTL, v_BHTV, state, mask, want_lse=False)
        if own is not None:
            common.check_device("running_softmax", own)
            y_BHTV = torch.addcmul(y_BHTV, *masked([own, v_BHTV], mask, v_BHTV.dtype, (0.0, 0.0)))
        return SoftmaxOutput(y_BHTV, SoftmaxState(*after), logits=logits_BHTL, start=start, mask=mask)
    p, k, v, *rest = (x.flatten(0, 1) for x in masked(tensors, mask, wide, (0.0, EMPTY, 0.0, 0.0)))
    if state is None:
        a, s = p.new_full((B * H, L), EMPTY, dtype=torch.float64), p.new_zeros(B * H, L, V)
    else:
        a, s = state[0].flatten(0, 1).double(), state[1].flatten(0, 1).to(wide)
    if name == "reference" or (name == "torch" and T == 1):  # chunks gain nothing on one token
        out, lse, a, s = reference.running_softmax(p, k, v, a, s)
    elif name == "sequential":
        out, lse, a, s = sequential.running_softmax(p, k, v, a, s, chunk_size)
    else:
        save = torch.is_grad_enabled() and any(x.requires_grad for x in (p, k, v, a, s, *rest))
        gate = rest[0] if rest else None
        out, a, s, *_ = chunked.running_softmax_op(p, k, v, gate, a, s, chunk, save)
        lse = None
    if rest and lse is not None:  # chunks add it themselves
        out = torch.addcmul(out, rest[0], v)
    out = zero_padding(out.unflatten(0, (B, H)).to(v_BHTV.dtype), mask)
    a, s = (x.unflatten(0, (B, H)) for x in (a, s))
    if lse is not None:
        return SoftmaxOutput(out, SoftmaxState(a, s), lse=lse.unflatten(0, (B, H)))
    return SoftmaxOutput(out, SoftmaxState(a, s), logits=k.unflatten(0, (B, H)), start=start)


@without_autocast
def running_logsumexp(logits_BHTL: Tensor, /, *, state: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """`lse_t = log(exp(state) + sum_{s <= t} exp(logits_s))`: the log of the running softmax's normalisers.

    Args:
        logits_BHTL: logits of any size.
        state: `[B, H, L]`, the log-normaliser so far (`SoftmaxState.lse`).
        mask: bool `[B, T]`, True for a real token; padding adds nothing.

    Returns `[B, H, T, L]`, float32 or wider; -2^100 stands for log 0 before the first real token. Raises `ValueError`
    and `TypeError` for invalid shapes.
    """
    B, H, T, L = check_inputs(("logits", logits_BHTL))
    if mask is not None:
        check_mask(mask, B, T)
    k = masked([logits_BHTL], mask, wide_of(logits_BHTL), (EMPTY,))[0].flatten(0, 1)
    if state is None:
        a = k.new_full((B * H, L), EMPTY, dtype=torch.float64)
    elif state.shape != (B, H, L):
        raise ValueError(f"state must have shape {(B, H, L)}, got {tuple(state.shape)}")
    else:
        a = state.flatten(0, 1).double()
    return chunked_logsumexp(k, a).unflatten(0, (B, H))
