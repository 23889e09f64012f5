"""Attention without bounded reach: blocks of keys and values travel round the ranks, outputs are merged as they come.

Forward, each rank merges its outputs over the blocks by their logsumexp (`merge_attention`) and keeps its own tokens'
queries, keys, values and outputs, nothing else. Backward, the blocks travel once more; the weights of each are computed
again, and the gradients of a block's keys and values travel along and come home with the last step.

Shape letters: B batch, H query heads, G key heads, T tokens of a rank, K key channels, V value channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.ops import merge_attention
from subquad.parallel.group import ContextGroup, Sent

Attend = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
"""Outputs `[B, H, T, V]` and logsumexp `[B, H, T]` of queries, a block's keys and values, and where both begin."""


def ring_attention(attend: Attend, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, group: ContextGroup, /) -> Tensor:
    """The outputs `[B, H, T, V]` of this rank's queries, which see no later key, over the keys of all ranks.

    Blocks that lie wholly after a rank's queries only pass through it. So later ranks do more: rank r computes r + 1 of
    the P blocks, and all wait for the last.
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
            if owner <= group.rank:
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
            if owner <= group.rank:
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
    """Of one block, through `out = sum_j exp(lse_j - lse) out_j`: `dlse_j = exp(lse_j - lse) do . (out_j - out)`."""
    with torch.enable_grad():
        q, k, v = leaves = [x.detach().requires_grad_() for x in inputs]
        part, part_lse = attend(q, k, v, q_start, k_start)
    # Rows that see no key of this block, or none at all.
    share = (part_lse.detach() - lse).exp().masked_fill(torch.isneginf(part_lse.detach()), 0.0)[..., None]
    grads = (share * grad).to(part.dtype), (share * grad * (part.detach() - out)).sum(-1)
    pairs = [(y, g) for y, g in zip((part, part_lse), grads, strict=True) if y.requires_grad]
    ys, gs = zip(*pairs, strict=True)
    return torch.autograd.grad(ys, leaves, gs, materialize_grads=True)


def _rotate(
    block: list[Tensor], group: ContextGroup, step: int, *, backward: bool = False
) -> tuple[list[Tensor], Callable[[], None]]:
    """The block that the rank before holds, to be there after the wait; in the last step there is none to come."""
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


def sent_for_ring(block_bytes: int, ranks: int) -> list[Sent]:
    """Bytes that each rank sends in `ring_attention`, for blocks of `block_bytes` of float32 keys and values."""
    return [Sent((ranks - 1) * block_bytes, 2 * (ranks - 1) * block_bytes)] * ranks
