"""Ring attention, for patterns of unbounded reach: blocks of keys and values are passed from rank to rank.

Forward, each rank merges its outputs over the blocks by their logsumexp (`merge_attention`) and saves only its own
queries, keys, values and outputs. Backward, the blocks travel again and their weights are recomputed; the gradients of
a block's keys and values travel with it and reach its owner in the last step.

Shape letters: B batch, H query heads, G key heads, T tokens of a rank, K key channels, V value channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.ops import merge_attention
from subquad.parallel.group import ContextGroup

Attend = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
"""Maps queries, a block's keys and values, and both starts to outputs `[B, H, T, V]` and logsumexp `[B, H, T]`."""


def ring_attention(attend: Attend, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, group: ContextGroup, /) -> Tensor:
    """Return the outputs `[B, H, T, V]` of this rank's queries over all ranks' keys, for causal patterns.

    A rank passes on the blocks after its queries without using them. So rank r computes r + 1 of the P blocks, and all
    wait for the last rank.
    """
    return _Ring.apply(attend, group, q_BHTK, k_BGTK, v_BGTV)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attend: Attend, group: ContextGroup, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor
    ) -> Tensor:
        own, tokens = group.offset(q_BHTK.shape[2]), q_BHTK.shape[2]
        block = [k_BGTK.contiguous(), v_BGTV.contiguous()]
        merged: tuple[Tensor, Tensor] | None = None
        for step in range(group.size):
            coming, wait = _rotate(block, group, step)
            owner = (group.rank - step) % group.size
            if owner <= group.rank and (step == 0 or not q_BHTK.is_meta):  # without data, blocks only travel
                out, lse = attend(q_BHTK, block[0], block[1], own, owner * tokens)
                out = out.to(lse.dtype)
                merged = (out, lse) if merged is None else merge_attention(*zip(merged, (out, lse), strict=True))
            wait()
            block = coming
        assert merged is not None
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTV, *merged)
        ctx.attend, ctx.group = attend, group
        return merged[0].to(v_BGTV.dtype)

    @staticmethod
    def backward(ctx: Any, grad_BHTV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, own, tokens = ctx.group, ctx.group.offset(q.shape[2]), q.shape[2]
        grad = grad_BHTV.to(out.dtype)
        block = [k.contiguous(), v.contiguous()]
        dq, home = torch.zeros_like(q, dtype=out.dtype), _zeros(block, out.dtype)
        travelling = _zeros(block, out.dtype)
        for step in range(group.size):
            coming, wait = _rotate(block, group, step, backward=True)
            owner = (group.rank - step) % group.size
            if owner <= group.rank and (step == 0 or not q.is_meta):
                parts = _gradients(ctx.attend, (q, *block), own, owner * tokens, out, lse, grad)
                dq += parts[0]
                for total, part in zip(home if step == 0 else travelling, parts[1:], strict=True):
                    total += part
            wait()
            block = coming
            if step:  # at step 0 every rank has its own block
                arriving = _zeros(travelling, out.dtype)
                _send_on(travelling, arriving, group, backward=True)()
                travelling = arriving
        dk, dv = (a + b for a, b in zip(home, travelling, strict=True))
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _gradients(
    attend: Attend, inputs: Sequence[Tensor], q_start: int, k_start: int, out: Tensor, lse: Tensor, grad: Tensor
) -> Sequence[Tensor]:
    """Return one block's gradients: from `out = sum_j exp(lse_j - lse) out_j`, `do_j = exp(lse_j - lse) do` and
    `dlse_j = exp(lse_j - lse) do . (out_j - out)`.
    """
    with torch.enable_grad():
        q, k, v = leaves = [x.detach().requires_grad_() for x in inputs]
        part, part_lse = attend(q, k, v, q_start, k_start)
    # Zero for rows that see no key of this block; exp(-inf + inf) would be NaN for rows without any key.
    share = (part_lse.detach() - lse).exp().masked_fill(torch.isneginf(part_lse.detach()), 0.0)[..., None]
    grads = (share * grad).to(part.dtype), (share * grad * (part.detach() - out)).sum(-1)
    pairs = [(y, g) for y, g in zip((part, part_lse), grads, strict=True) if y.requires_grad]
    ys, gs = zip(*pairs, strict=True)
    return torch.autograd.grad(ys, leaves, gs, materialize_grads=True)


def _rotate(
    block: list[Tensor], group: ContextGroup, step: int, *, backward: bool = False
) -> tuple[list[Tensor], Callable[[], None]]:
    """Pass the block on; return the previous rank's block, valid after the wait. The last step passes nothing."""
    if step == group.size - 1:
        return block, lambda: None
    coming = [torch.empty_like(x) for x in block]
    return coming, _send_on(block, coming, group, backward=backward)


def _send_on(
    tensors: list[Tensor], arriving: list[Tensor], group: ContextGroup, *, backward: bool
) -> Callable[[], None]:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return group.exchange([(after, x) for x in tensors], [(before, x) for x in arriving], backward=backward)


def _zeros(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros_like(x, dtype=dtype) for x in tensors]
