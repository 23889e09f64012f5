"""Engine B on a CPU: one fused softmax attention a group of tiles, on strided views of the keys, never a T x T tensor.

Shape letters: B batch, H heads, T queries, S keys, K channels; a group has N tiles of C queries and W keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops._torch import attend_tiles
from subquad.ops._torch.attend_masks import bias_to, ragged_bias, static_bias
from subquad.ops._torch.memory import empty_like, zeros_like
from subquad.ops._torch.tiles import Group, ragged_groups, static_groups
from subquad.ops.backends import without_autocast
from subquad.ops.patterns import Pattern

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MORE = 8
"""Channels by which one is added: rows stay aligned."""


@torch.library.custom_op("subquad::block_attention_cpu", mutates_args=())
def block_attention_cpu(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    pattern: str,
    q_start: int,
    k_start: int,
    scale: float,
    lengths_B: Tensor | None,
    q_pos_BT: Tensor | None,
    k_pos_BS: Tensor | None,
    q_doc_BT: Tensor | None,
    k_doc_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs and the logsumexp of each row's scores (-inf where a query sees no key).

    With lengths only the first so many key slots of a row hold a token. With positions given (negative for a slot that
    holds no token) every row of the batch has its own; else slots are positions from `q_start` and `k_start`. With
    documents given a query sees keys of its own document only.
    """
    out_BHTK, lse_BHT = empty_like(q_BHTK), q_BHTK.new_empty(q_BHTK.shape[:3])
    slots = (lengths_B, q_pos_BT, k_pos_BS, q_doc_BT, k_doc_BS)
    for call in _calls(q_BHTK, k_BHSK, pattern, q_start, k_start, *slots):
        q, out = call.queries(q_BHTK), call.queries(out_BHTK)
        lse = call.queries(lse_BHT[..., None]).squeeze(-1)
        if call.group.kind == "empty":
            out.zero_()
            lse.fill_(-torch.inf)
            continue
        if call.in_cache:
            work = attend_tiles.Workspace(call.bias, scale)
            for at in attend_tiles.tiles(call.group, call.row, q_BHTK.shape):
                q, k, v = q_BHTK[at.queries], k_BHSK[at.keys], v_BHSK[at.keys]
                out_BHTK[at.queries], lse_BHT[at.queries] = work.forward(q, k, v)
            continue
        o, row_lse = _forward(
            q,
            call.keys(k_BHSK),
            call.keys(v_BHSK),
            0.0,
            call.group.kind == "causal",
            attn_mask=call.mask(),
            scale=scale,
        )
        out.copy_(o)
        lse.copy_(row_lse)
        if call.bias is not None:
            # The fused kernel says 0 for a row without keys; a merge of partial attentions needs -inf.
            lse.masked_fill_(torch.isneginf(call.bias).all(-1), -torch.inf)
    return out_BHTK, lse_BHT


@block_attention_cpu.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty(q.shape[:3])


@torch.library.custom_op("subquad::block_attention_cpu_backward", mutates_args=())
@without_autocast
def block_attention_cpu_backward(
    grad_BHTK: Tensor,
    grad_lse_BHT: Tensor | None,
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    out_BHTK: Tensor,
    lse_BHT: Tensor,
    pattern: str,
    q_start: int,
    k_start: int,
    scale: float,
    lengths_B: Tensor | None,
    q_pos_BT: Tensor | None,
    k_pos_BS: Tensor | None,
    q_doc_BT: Tensor | None,
    k_doc_BS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values.

    The scores' gradient is `P (dO . v - dO . o + dlse)`. The fused op knows no dlse, so it comes in as one more
    channel: 1 in dO, 0 in v, -dlse in o.
    """
    K = q_BHTK.shape[-1]
    empty_BHT = torch.isneginf(lse_BHT)
    lse_BHT = lse_BHT.masked_fill(empty_BHT, 0.0)
    if grad_lse_BHT is not None:
        grad_lse_BHT = grad_lse_BHT.masked_fill(empty_BHT, 0.0)[..., None]
        grad_BHTK = _with_channel(grad_BHTK, torch.ones_like(grad_lse_BHT))
        out_BHTK = _with_channel(out_BHTK, -grad_lse_BHT)
        q_BHTK, k_BHSK, v_BHSK = (F.pad(x, (0, MORE)) for x in (q_BHTK, k_BHSK, v_BHSK))
    dq, dk, dv = empty_like(q_BHTK), zeros_like(k_BHSK), zeros_like(v_BHSK)
    slots = (lengths_B, q_pos_BT, k_pos_BS, q_doc_BT, k_doc_BS)
    for call in _calls(q_BHTK, k_BHSK, pattern, q_start, k_start, *slots):
        if call.group.kind == "empty":
            call.queries(dq).zero_()
            continue
        if call.in_cache:
            work = attend_tiles.Workspace(call.bias, scale)
            for at in attend_tiles.tiles(call.group, call.row, q_BHTK.shape):
                do, o, q = (x[at.queries] for x in (grad_BHTK, out_BHTK, q_BHTK))
                gradients = work.backward(do, o, q, k_BHSK[at.keys], v_BHSK[at.keys])
                dq[at.queries] = gradients[0]
                dk[at.keys].add_(gradients[1])
                dv[at.keys].add_(gradients[2])
            continue
        gradients = _backward(
            call.queries(grad_BHTK),
            call.queries(q_BHTK),
            call.keys(k_BHSK),
            call.keys(v_BHSK),
            call.queries(out_BHTK),
            call.queries(lse_BHT[..., None]).squeeze(-1),
            0.0,
            call.group.kind == "causal",
            attn_mask=call.mask(),
            scale=scale,
        )
        call.queries(dq).copy_(gradients[0])
        call.add_to_keys(dk, gradients[1])
        call.add_to_keys(dv, gradients[2])
    if grad_lse_BHT is None:
        return dq, dk, dv
    return dq[..., :K].contiguous(), dk[..., :K].contiguous(), dv[..., :K].contiguous()


def _with_channel(x_BHTK: Tensor, channel_BHT1: Tensor) -> Tensor:
    return torch.cat([F.pad(x_BHTK, (0, MORE - 1)), channel_BHT1], -1)


@block_attention_cpu_backward.register_fake
def _(grad, grad_lse, q, k, v, out, lse, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Call:
    """One fused call: the tiles of `group`, of all rows of the batch (`row` None) or of one."""

    def __init__(self, group: Group, row: int | None, bias: Tensor | None, in_cache: bool = False) -> None:
        self.group, self.row, self.bias, self.in_cache = group, row, bias, in_cache

    def mask(self) -> Tensor | None:
        """The additive mask `[., ., C, W]`."""
        return None if self.bias is None else self.bias.expand(*self.bias.shape[:-2], self.group.rows, -1)

    def queries(self, x_BHTK: Tensor) -> Tensor:
        """A view `[., ., C, K]` of the queries' tiles."""
        g = self.group
        x = x_BHTK.narrow(2, g.q, g.rows * g.count)
        if g.count == 1:
            return x if self.row is None else x[self.row][None]
        return _one_row(x, self.row).unflatten(-2, (g.count, g.rows))

    def keys(self, x_BHSK: Tensor) -> Tensor:
        """`[., ., W, K]`: a view of the tiles' keys, where neighbours overlap, or a copy of keys that lie anywhere."""
        g = self.group
        if g.places:
            return _one_row(x_BHSK, self.row).index_select(-2, g.key_slots().flatten()).unflatten(-2, (g.count, g.keys))
        x = x_BHSK.narrow(2, g.k, g.keys + g.rows * (g.count - 1))
        if g.count == 1:
            return x if self.row is None else x[self.row][None]
        return _one_row(x, self.row).unfold(-2, g.keys, g.rows).transpose(-1, -2)

    def add_to_keys(self, total_BHSK: Tensor, part: Tensor) -> None:
        """Add the tiles' gradients to their keys, one slab of C keys at a time since neighbours overlap."""
        g = self.group
        if g.places:
            _one_row(total_BHSK, self.row).index_add_(-2, g.key_slots().flatten(), part.flatten(-3, -2))
            return
        x = total_BHSK.narrow(2, g.k, g.keys + g.rows * (g.count - 1))
        if g.count == 1:
            (x if self.row is None else x[self.row][None]).add_(part)
            return
        x = _one_row(x, self.row)
        for start in range(0, g.keys, g.rows):
            width = min(g.rows, g.keys - start)
            slab = x.narrow(-2, start, g.rows * (g.count - 1) + width).unfold(-2, width, g.rows).transpose(-1, -2)
            slab.add_(part.narrow(-2, start, width))


def _one_row(x_BHTK: Tensor, row: int | None) -> Tensor:
    return x_BHTK[0 if row is None else row]


def _calls(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    pattern: str,
    q_start: int,
    k_start: int,
    lengths: Tensor | None,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    q_doc: Tensor | None,
    k_doc: Tensor | None,
) -> Iterator[_Call]:
    """Folded tiles take the place of the batch in the fused kernel, so they go one row at a time, as views."""
    B, _, T, _ = q_BHTK.shape
    S, shape = k_BHSK.shape[2], Pattern.from_key(pattern)
    if q_pos is None or k_pos is None:
        for group in static_groups(shape, q_start, T, k_start, S):
            if lengths is None and attend_tiles.fits(group):
                bias = static_bias(shape, group, q_start, k_start, q_BHTK, triangles=True)
                if bias is None or not torch.isneginf(bias).all(-1).any():
                    yield _Call(group, None, bias, in_cache=True)
                    continue
            bias = static_bias(shape, group, q_start, k_start, q_BHTK) if lengths is None else None
            for row in [None] if group.count == 1 else range(B):
                if lengths is not None:
                    own = lengths if row is None else lengths[row, None]
                    bias = bias_to(own, shape, group, q_start, k_start, q_BHTK)
                yield _Call(group, row, bias)
        return
    if shape.anchored and q_doc is None:
        yield from _row_calls(shape, T, q_pos, k_pos, q_BHTK)
        return
    for group in ragged_groups(shape, T, S):
        for row in [None] if group.count == 1 else range(B):
            rows = slice(None) if row is None else slice(row, row + 1)
            docs = None if q_doc is None or k_doc is None else (q_doc[rows], k_doc[rows])
            yield _Call(group, row, ragged_bias(shape, group, q_pos[rows], k_pos[rows], docs, q_BHTK))


def _row_calls(shape: Pattern, T: int, q_pos_BT: Tensor, k_pos_BS: Tensor, like: Tensor) -> Iterator[_Call]:
    """Keys at fixed places: each row is cut by its own positions, of which the real ones are without gaps."""
    for row, (q_real, k_real) in enumerate(zip(q_pos_BT >= 0, k_pos_BS >= 0, strict=True)):
        queries, keys = int(q_real.sum()), int(k_real.sum())
        first_q, first_k = (int(real.int().argmax()) for real in (q_real, k_real))
        q_start, k_start = int(q_pos_BT[row, first_q]), int(k_pos_BS[row, first_k])
        for start, stop in ((0, first_q), (first_q + queries, T)):
            if start < stop:
                yield _Call(Group(start, stop - start, 1, 0, 0, "empty"), row, None)
        for group in static_groups(shape, q_start, queries, k_start, keys):
            places = tuple(place + first_k for place in group.places)
            moved = replace(group, q=group.q + first_q, k=group.k + first_k, places=places)
            yield _Call(moved, row, static_bias(shape, group, q_start, k_start, like))
