"""Engine B in plain PyTorch: on a CPU tile by tile, never a T x T tensor; elsewhere on gathered tiles.

On a CPU, small tiles are matrix products whose scores stay in cache, because torch's fused kernel cuts tiles of fewer
than 192 queries into blocks of 32 rows, which run at half the speed (docs/decisions/0009-tiles-in-cache.md). All other
tiles go through the fused kernel, on strided views of the keys.

Shape letters: B batch, H heads, T queries, S keys, K key channels, V value channels; a group has N tiles of C queries
and W keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.memory import empty_like, zeros_like
from subquad.ops._torch.gathered import gathered
from subquad.ops._torch.tiles import Group, row_bias, static_bias, static_groups, tile_groups
from subquad.ops.backends import without_autocast
from subquad.ops.patterns import Pattern
from subquad.ops.patterns.sparse import Ranks
from subquad.ops.slots import SCHEMA, Slots, nothing, seen_slots
from subquad.tracing import without_tangents

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MORE = 8
"""Channels that are added where one is needed, so that rows stay aligned."""
Index = tuple[int, slice, slice]
"""One row of the batch, a range of its heads and a range of its slots."""
LEAST_ROWS = 32
"""Tiles with fewer rows go to the fused kernel, many in one call."""
LONGEST_TRIANGLE = 256
ENTRIES = 1 << 18
"""Scores held at once, 1 MiB in float32: they fit in the second-level cache."""


def attend(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, pattern: Pattern, slots: Slots, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, H, T, V]` and logsumexp `[B, H, T]`; keys and values have as many heads as queries."""
    T, S = q_BHTK.shape[2], k_BHSK.shape[2]
    whole = slots.q_pos_BT is None and slots.q_start == slots.k_start == 0 and T == S
    if whole and pattern.folded:
        return _by_residue(q_BHTK, k_BHSK, v_BHSV, *pattern.folded, slots.lengths_B, scale, dropout_p)
    if whole and pattern.columns:
        # Only these keys are ever seen: take them alone, numbered by rank.
        size, last = pattern.columns
        count = T // size * last + max(0, T % size - (size - last))
        rank_S = torch.arange(count, device=q_BHTK.device)
        columns_S = rank_S // last * size + size - last + rank_S % last
        k_BHSK, v_BHSV = k_BHSK.index_select(2, columns_S), v_BHSV.index_select(2, columns_S)
        pattern = Ranks(*pattern.columns)
    if k_BHSK.shape[2] == 0:
        return nothing(q_BHTK, v_BHSV)
    if q_BHTK.device.type in ("cpu", "meta") and dropout_p == 0:  # costs, counted on meta, are those of a CPU
        return _on_cpu(q_BHTK, k_BHSK, v_BHSV, pattern, slots, scale)
    return gathered(q_BHTK, k_BHSK, v_BHSV, pattern, slots, scale, dropout_p)


def _by_residue(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    residues: int,
    inner: Pattern,
    lengths_B: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Attend within each residue modulo `residues`, with every residue as a row of the batch."""
    B, _, T, _ = q_BHTK.shape
    steps = -(-T // residues)

    def fold(x_BHTK: Tensor) -> Tensor:
        x_BHTK = F.pad(x_BHTK, (0, 0, 0, steps * residues - T))
        return x_BHTK.unflatten(2, (steps, residues)).permute(0, 3, 1, 2, 4).flatten(0, 1)

    def unfold(x_RHTK: Tensor) -> Tensor:
        return x_RHTK.unflatten(0, (B, residues)).permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :T]

    if not inner.causal:  # the padding at the end would be seen
        real_B = q_BHTK.new_full((B,), T, dtype=torch.int64) if lengths_B is None else lengths_B
        left_BR = real_B[:, None] - torch.arange(residues, device=q_BHTK.device)
        lengths_B = ((left_BR + residues - 1) // residues).clamp(min=0).flatten()
    slots = Slots(0, 0, None if inner.causal else lengths_B)
    q, k, v = fold(q_BHTK), fold(k_BHTK), fold(v_BHTV)
    out_RHTV, lse_RHT = attend(q, k, v, inner, slots, scale, dropout_p)
    return unfold(out_RHTV), unfold(lse_RHT[..., None])[..., 0]


def _on_cpu(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, pattern: Pattern, slots: Slots, scale: float
) -> tuple[Tensor, Tensor]:
    K, V, S = q_BHTK.shape[-1], v_BHSV.shape[-1], k_BHSK.shape[2]
    if K != V:  # the fused kernel needs K = V; zero channels change no score and no value
        q_BHTK, k_BHSK, v_BHSV = (F.pad(x, (0, max(K, V) - x.shape[-1])) for x in (q_BHTK, k_BHSK, v_BHSV))
    # The fused kernel needs contiguous channels.
    q_BHTK, k_BHSK, v_BHSV = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHTK, k_BHSK, v_BHSV))
    one = q_BHTK.shape[2] == 1 and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    seen = _seen_by_one(pattern, slots, S) if one else None
    if seen is not None:
        out_BHTV, lse_BHT = FUSED(q_BHTK, k_BHSK[:, :, seen], v_BHSV[:, :, seen], scale=scale)
    else:
        out_BHTV, lse_BHT = block_attention_cpu(q_BHTK, k_BHSK, v_BHSV, pattern.key(), scale, *slots)
    return out_BHTV[..., :V], lse_BHT


def _seen_by_one(pattern: Pattern, slots: Slots, keys: int) -> slice | None:
    """Return the key slots that the only query of a decoding step sees if they follow one another, else None."""
    starts = q_start, k_start = slots.q_start, slots.k_start
    if slots.q_pos_BT is not None or slots.lengths_B is not None:
        return None
    lo, hi = seen_slots(pattern, starts, 0, 1, 1, keys)
    lo = max(lo, -k_start)  # slots at negative positions hold no key
    return slice(lo, hi) if lo < hi and pattern.sees_all(q_start, q_start + 1, lo + k_start, hi + k_start) else None


@torch.library.custom_op(
    "subquad::block_attention_cpu",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, str pattern, float scale, {SCHEMA}) -> (Tensor, Tensor)",
)
def block_attention_cpu(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, pattern: str, scale: float, *slots: Any
) -> tuple[Tensor, Tensor]:
    """Return outputs and the scores' logsumexp (-inf for a query without keys); `slots` are the fields of `Slots`."""
    out_BHTK, lse_BHT = empty_like(q_BHTK), q_BHTK.new_empty(q_BHTK.shape[:3])
    for call in _calls(q_BHTK, k_BHSK, Pattern.from_key(pattern), Slots(*slots)):
        q, out = call.queries(q_BHTK), call.queries(out_BHTK)
        lse = call.queries(lse_BHT[..., None]).squeeze(-1)
        if call.group.kind == "empty":
            out.zero_()
            lse.fill_(-torch.inf)
            continue
        if call.in_cache:
            work = Workspace(call.bias, scale)
            for queries, keys in tiles_of(call.group, call.row, q_BHTK.shape):
                out_BHTK[queries], lse_BHT[queries] = work.forward(q_BHTK[queries], k_BHSK[keys], v_BHSK[keys])
            continue
        o, row_lse = FUSED(
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
            # The fused kernel returns 0 for a row without keys; a merge of partial attentions needs -inf.
            lse.masked_fill_(torch.isneginf(call.bias).all(-1), -torch.inf)
    return out_BHTK, lse_BHT


@block_attention_cpu.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty(q.shape[:3])


@torch.library.custom_op(
    "subquad::block_attention_cpu_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str pattern, "
    f"float scale, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
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
    scale: float,
    *slots: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    The scores' gradient is `P (dO . v - dO . o + dlse)`. The fused kernel takes no dlse, so one more channel carries
    it: 1 in dO, 0 in v, -dlse in o.
    """
    K = q_BHTK.shape[-1]
    # The kernel takes exp(score - lse): rows without keys need a finite lse, and their masked scores then weigh zero.
    empty_BHT = torch.isneginf(lse_BHT)
    lse_BHT = lse_BHT.masked_fill(empty_BHT, 0.0)
    if grad_lse_BHT is not None:
        grad_lse_BHT = grad_lse_BHT.masked_fill(empty_BHT, 0.0)[..., None]
        grad_BHTK = _with_channel(grad_BHTK, torch.ones_like(grad_lse_BHT))
        out_BHTK = _with_channel(out_BHTK, -grad_lse_BHT)
        q_BHTK, k_BHSK, v_BHSK = (F.pad(x, (0, MORE)) for x in (q_BHTK, k_BHSK, v_BHSK))
    dq, dk, dv = empty_like(q_BHTK), zeros_like(k_BHSK), zeros_like(v_BHSK)
    for call in _calls(q_BHTK, k_BHSK, Pattern.from_key(pattern), Slots(*slots)):
        if call.group.kind == "empty":
            call.queries(dq).zero_()
            continue
        if call.in_cache:
            work = Workspace(call.bias, scale)
            for queries, keys in tiles_of(call.group, call.row, q_BHTK.shape):
                do, o, q = (x[queries] for x in (grad_BHTK, out_BHTK, q_BHTK))
                gradients = work.backward(do, o, q, k_BHSK[keys], v_BHSK[keys])
                dq[queries] = gradients[0]
                dk[keys].add_(gradients[1])
                dv[keys].add_(gradients[2])
            continue
        gradients = FUSED_BACKWARD(
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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *static, lengths, q_pos, k_pos, q_doc, k_doc = inputs
    ctx.save_for_backward(q, k, v, *output, lengths, q_pos, k_pos, q_doc, k_doc)
    ctx.static = static
    ctx.set_materialize_grads(False)


@without_tangents
def _backward(ctx: Any, grad_BHTK: Tensor | None, grad_lse_BHT: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *slots = ctx.saved_tensors
    rest = (None,) * (len(ctx.static) + len(slots))
    if grad_BHTK is None and grad_lse_BHT is None:
        return None, None, None, *rest
    if grad_BHTK is None:
        grad_BHTK = torch.zeros_like(out)
    elif grad_BHTK.stride(-1) != 1:  # the fused kernel needs contiguous channels
        grad_BHTK = grad_BHTK.contiguous()
    dq, dk, dv = block_attention_cpu_backward(grad_BHTK, grad_lse_BHT, q, k, v, out, lse, *ctx.static, *slots)
    return dq, dk, dv, *rest


block_attention_cpu.register_autograd(_backward, setup_context=_setup_context)


class _Call:
    """Tiles of `group` in all rows of the batch (`row` None) or one, for `Workspace` if `in_cache`, else `FUSED`."""

    def __init__(self, group: Group, row: int | None, bias: Tensor | None, in_cache: bool = False) -> None:
        self.group, self.row, self.bias, self.in_cache = group, row, bias, in_cache

    def mask(self) -> Tensor | None:
        """Return the additive mask `[., ., C, W]`, or None."""
        return None if self.bias is None else self.bias.expand(*self.bias.shape[:-2], self.group.rows, -1)

    def queries(self, x_BHTK: Tensor) -> Tensor:
        """Return a view `[., ., C, K]` of the tiles' queries."""
        g = self.group
        x = self._rows(x_BHTK.narrow(2, g.q, g.rows * g.count))
        return x if g.count == 1 else x.unflatten(-2, (g.count, g.rows))

    def keys(self, x_BHSK: Tensor) -> Tensor:
        """Return the tiles' keys `[., ., W, K]`: a view with overlapping tiles, or a copy if keys lie anywhere."""
        g = self.group
        if g.places:
            return self._rows(x_BHSK).index_select(-2, g.key_slots().flatten()).unflatten(-2, (g.count, g.keys))
        x = self._rows(x_BHSK.narrow(2, g.k, g.keys + g.rows * (g.count - 1)))
        return x if g.count == 1 else x.unfold(-2, g.keys, g.rows).transpose(-1, -2)

    def add_to_keys(self, total_BHSK: Tensor, part: Tensor) -> None:
        """Add the tiles' gradients to their keys, one slab of C keys at a time: tiles don't overlap in a slab."""
        g = self.group
        if g.places:
            self._rows(total_BHSK).index_add_(-2, g.key_slots().flatten(), part.flatten(-3, -2))
            return
        x = self._rows(total_BHSK.narrow(2, g.k, g.keys + g.rows * (g.count - 1)))
        if g.count == 1:
            x.add_(part)
            return
        for start in range(0, g.keys, g.rows):
            width = min(g.rows, g.keys - start)
            slab = x.narrow(-2, start, g.rows * (g.count - 1) + width).unfold(-2, width, g.rows).transpose(-1, -2)
            slab.add_(part.narrow(-2, start, width))

    def _rows(self, x_BHTK: Tensor) -> Tensor:
        """Select all rows or the own one; folded tiles take the place of the batch."""
        if self.group.count > 1 or self.group.places:
            return x_BHTK[0 if self.row is None else self.row]
        return x_BHTK if self.row is None else x_BHTK[self.row][None]


def _calls(q_BHTK: Tensor, k_BHSK: Tensor, pattern: Pattern, slots: Slots) -> Iterator[_Call]:
    """Yield the calls; folded tiles take the place of the batch, so they go one row at a time, as views."""
    B, _, T, _ = q_BHTK.shape
    if pattern.anchored and slots.q_pos_BT is not None and slots.k_pos_BS is not None and slots.q_doc_BT is None:
        yield from _row_calls(pattern, T, slots.q_pos_BT, slots.k_pos_BS, q_BHTK)
        return
    by_row = slots.starts is None or slots.lengths_B is not None
    for group in tile_groups(pattern, slots.starts, T, k_BHSK.shape[2]):
        rows = [None] if group.count == 1 else range(B)
        if by_row:
            yield from (_Call(group, row, row_bias(pattern, group, slots.of_row(row), q_BHTK)) for row in rows)
            continue
        if fits_in_cache(group):
            bias = static_bias(pattern, group, slots.q_start, slots.k_start, q_BHTK, triangles=True)
            # A softmax over a row of -inf is NaN; the fused kernel gives zero.
            if bias is None or not torch.isneginf(bias).all(-1).any():
                yield _Call(group, None, bias, in_cache=True)
                continue
        bias = static_bias(pattern, group, slots.q_start, slots.k_start, q_BHTK)
        yield from (_Call(group, row, bias) for row in rows)


def _row_calls(pattern: Pattern, T: int, q_pos_BT: Tensor, k_pos_BS: Tensor, like: Tensor) -> Iterator[_Call]:
    """Cut each row by its own positions, which have no gaps, for keys at fixed places."""
    for row, (q_real, k_real) in enumerate(zip(q_pos_BT >= 0, k_pos_BS >= 0, strict=True)):
        queries, keys = int(q_real.sum()), int(k_real.sum())
        first_q, first_k = (int(real.int().argmax()) for real in (q_real, k_real))
        q_start, k_start = int(q_pos_BT[row, first_q]), int(k_pos_BS[row, first_k])
        for start, stop in ((0, first_q), (first_q + queries, T)):
            if start < stop:
                yield _Call(Group(start, stop - start, 1, 0, 0, "empty"), row, None)
        for group in static_groups(pattern, q_start, queries, k_start, keys):
            places = tuple(place + first_k for place in group.places)
            moved = replace(group, q=group.q + first_q, k=group.k + first_k, places=places)
            yield _Call(moved, row, static_bias(pattern, group, q_start, k_start, like))


def fits_in_cache(group: Group) -> bool:
    """Return True if the group's tiles are small enough for matrix products in cache."""
    if group.kind == "empty" or group.places or group.rows < LEAST_ROWS:
        return False
    # The fused kernel skips masked blocks above a long diagonal.
    return group.rows <= LONGEST_TRIANGLE if group.kind == "causal" else group.rows * group.keys <= ENTRIES


def tiles_of(group: Group, row: int | None, shape_BHTK: torch.Size) -> Iterator[tuple[Index, Index]]:
    """Yield indices of queries and keys for each tile, in all rows of the batch or one, for some heads at a time."""
    B, H = shape_BHTK[:2]
    heads = max(1, ENTRIES // (group.rows * group.keys))
    for b in range(B) if row is None else (row,):
        for first in range(0, H, heads):
            some = slice(first, min(first + heads, H))
            for n in range(group.count):
                q, k = group.q + n * group.rows, group.k + n * group.rows
                yield (b, some, slice(q, q + group.rows)), (b, some, slice(k, k + group.keys))


class Workspace:
    """Forward and backward pass of one tile after another in memory that is allocated once.

    Freed blocks of a megabyte go back to the system, and new pages for each tile would take as long as its products.
    """

    def __init__(self, bias_CW: Tensor | None, scale: float) -> None:
        self.bias_CW, self.scale = bias_CW, scale
        self.blocks: dict[str, Tensor] = {}

    def _block(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return memory for a tensor of this shape, reused under its name."""
        if name not in self.blocks or self.blocks[name].numel() < math.prod(shape):
            self.blocks[name] = like.new_empty(math.prod(shape))
        return self.blocks[name][: math.prod(shape)].view(shape)

    def _weights(self, q_HCK: Tensor, k_HWK: Tensor) -> tuple[Tensor, Tensor]:
        shape = (q_HCK.shape[0], q_HCK.shape[1], k_HWK.shape[1])
        scores_HCW, weights_HCW = (self._block(name, q_HCK, *shape) for name in ("scores", "weights"))
        if self.bias_CW is None:
            torch.bmm(q_HCK, k_HWK.mT, out=scores_HCW).mul_(self.scale)
        else:
            torch.baddbmm(self.bias_CW, q_HCK, k_HWK.mT, alpha=self.scale, out=scores_HCW)
        # softmax, not exp: torch's exp is ten times slower on masked entries.
        return scores_HCW, torch.softmax(scores_HCW, -1, out=weights_HCW)

    def forward(self, q_HCK: Tensor, k_HWK: Tensor, v_HWK: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and logsumexp of one tile, valid until the next call; every query must see a key."""
        scores_HCW, weights_HCW = self._weights(q_HCK, k_HWK)
        # lse = largest score - log(largest weight), which saves a pass over exponentials.
        lse_HC = scores_HCW.amax(-1).sub_(weights_HCW.amax(-1).log_())
        return torch.bmm(weights_HCW, v_HWK, out=self._block("rows", q_HCK, *q_HCK.shape)), lse_HC

    def backward(
        self, grad_HCK: Tensor, out_HCK: Tensor, q_HCK: Tensor, k_HWK: Tensor, v_HWK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of one tile's queries, keys and values, valid until the next call."""
        grad_scores_HCW, weights_HCW = self._weights(q_HCK, k_HWK)
        dq_HCK, dk_HWK, dv_HWK = (
            self._block(name, x, *x.shape) for name, x in (("rows", q_HCK), ("keys", k_HWK), ("values", v_HWK))
        )
        delta_HC1 = torch.mul(grad_HCK, out_HCK, out=dq_HCK).sum(-1, keepdim=True)
        torch.bmm(weights_HCW.mT, grad_HCK, out=dv_HWK)
        torch.bmm(grad_HCK, v_HWK.mT, out=grad_scores_HCW).sub_(delta_HC1).mul_(weights_HCW).mul_(self.scale)
        torch.bmm(grad_scores_HCW, k_HWK, out=dq_HCK)
        return dq_HCK, torch.bmm(grad_scores_HCW.mT, q_HCK, out=dk_HWK), dv_HWK
