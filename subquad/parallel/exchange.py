"""Differentiable exchanges between the ranks of a group: earlier tokens, and summaries of earlier ranks.

Shape letters: B batch, G heads, T tokens of a rank, K channels, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.parallel.group import ContextGroup, Message

Span = tuple[int, int]
"""Start and stop of a range of positions, without `stop`."""
Tensors = tuple[Tensor, ...]


def last_before(reach: int, tokens: int, ranks: int) -> list[Span]:
    """Return, for each rank of `tokens` tokens, the last `reach` positions before its own, or all if fewer."""
    return [(max(0, rank * tokens - reach), rank * tokens) for rank in range(ranks)]


def first_before(count: int, tokens: int, ranks: int) -> list[Span]:
    """Return, for each rank of `tokens` tokens, those of the first `count` positions that precede its own."""
    return [(0, min(count, rank * tokens)) for rank in range(ranks)]


def held(owner: int, span: Span, tokens: int) -> Span:
    """Return the part of a span that `owner` holds, relative to its first token; an empty part has stop = start."""
    first = owner * tokens
    start = min(max(span[0] - first, 0), tokens)
    return start, max(start, min(span[1] - first, tokens))


def earlier(spans: Sequence[Span], group: ContextGroup, /, *tensors_BGTK: Tensor) -> tuple[Tensor, ...]:
    """Fetch the tokens at positions `spans[rank]`, which precede this rank's own, of tensors `[B, G, T, K]`.

    The ranks that hold them send them. Their gradients return to these ranks and are summed there.
    """
    if group.size == 1:
        return tuple(x[:, :, :0] for x in tensors_BGTK)
    return _Earlier.apply(spans, group, *tensors_BGTK)


class _Earlier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spans: Sequence[Span], group: ContextGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.spans, ctx.group, ctx.tokens = spans, group, tensors[0].shape[2]
        outgoing, incoming = [], []
        for rank, (start, stop) in _readers(spans, group.rank, ctx.tokens):
            outgoing += [(rank, x[:, :, start:stop].contiguous()) for x in tensors]
        pieces: list[list[Tensor]] = [[x[:, :, :0]] for x in tensors]
        for rank, (start, stop) in _owners(spans, group.rank, ctx.tokens):
            for x, parts in zip(tensors, pieces, strict=True):
                parts.append(x.new_empty(*x.shape[:2], stop - start, x.shape[3]))
                incoming.append((rank, parts[-1]))
        group.exchange(outgoing, incoming)()
        return tuple(torch.cat(parts, 2) for parts in pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        outgoing, incoming, arrived = list[Message](), list[Message](), list[tuple[int, int, int, Tensor]]()
        place = 0
        for rank, (start, stop) in _owners(ctx.spans, ctx.group.rank, ctx.tokens):
            outgoing += [(rank, grad[:, :, place : place + stop - start].contiguous()) for grad in grads]
            place += stop - start
        for rank, (start, stop) in _readers(ctx.spans, ctx.group.rank, ctx.tokens):
            for i, grad in enumerate(grads):
                part = grad.new_empty(*grad.shape[:2], stop - start, grad.shape[3])
                incoming.append((rank, part))
                arrived.append((i, start, stop, part))
        ctx.group.exchange(outgoing, incoming, backward=True)()
        back = [grad.new_zeros(*grad.shape[:2], ctx.tokens, grad.shape[3]) for grad in grads]
        for i, start, stop, part in arrived:
            back[i][:, :, start:stop] += part
        return None, None, *back


def _readers(spans: Sequence[Span], owner: int, tokens: int) -> list[tuple[int, Span]]:
    """Return the later ranks that need tokens of `owner`, with the span each needs."""
    parts = [(rank, held(owner, spans[rank], tokens)) for rank in range(owner + 1, len(spans))]
    return [(rank, part) for rank, part in parts if part[0] < part[1]]


def _owners(spans: Sequence[Span], reader: int, tokens: int) -> list[tuple[int, Span]]:
    """Return the earlier ranks that hold tokens which `reader` needs, with the span each holds."""
    parts = [(rank, held(rank, spans[reader], tokens)) for rank in range(reader)]
    return [(rank, part) for rank, part in parts if part[0] < part[1]]


def prefix(
    summary: Tensors,
    merge: Callable[[Tensors, Tensors], Tensors],
    empty: tuple[float, ...],
    group: ContextGroup,
    /,
) -> Tensors:
    """Merge the summaries of all earlier ranks in log2(P) steps; the first rank gets tensors filled with `empty`.

    In step d = 1, 2, 4, ... rank r sends rank r + d the merged summaries of ranks r - d + 1 to r.
    `merge(earlier, later)` must be associative, with `empty` as its neutral element.
    """
    before = tuple(torch.full_like(x, fill) for x, fill in zip(summary, empty, strict=True))
    for distance in _distances(group.size):
        moved = _Shift.apply(distance, empty, group, *summary)
        before = merge(moved, before)
        if 2 * distance < group.size:
            summary = merge(moved, summary)
    return before


class _Shift(torch.autograd.Function):
    """Send each rank's tensors to rank + `distance`; the first ranks receive tensors filled with `empty`."""

    @staticmethod
    def forward(
        ctx: Any, distance: int, empty: tuple[float, ...], group: ContextGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.distance, ctx.group = distance, group
        return _moved(group, distance, tensors, empty, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_moved(ctx.group, -ctx.distance, grads, (0.0,) * len(grads), backward=True)


def _moved(
    group: ContextGroup, distance: int, tensors: Sequence[Tensor], empty: Sequence[float], *, backward: bool
) -> tuple[Tensor, ...]:
    target, source = group.rank + distance, group.rank - distance
    like = zip(tensors, empty, strict=True)
    arrived = tuple(torch.full_like(x, fill, memory_format=torch.contiguous_format) for x, fill in like)
    outgoing = [(target, x.contiguous()) for x in tensors] if 0 <= target < group.size else []
    incoming = [(source, x) for x in arrived] if 0 <= source < group.size else []
    group.exchange(outgoing, incoming, backward=backward)()
    return arrived


def _distances(ranks: int) -> list[int]:
    return [1 << step for step in range((ranks - 1).bit_length())]
