"""Parts of Perceiver AR: a window of tokens, its history and its latents.

Rows of a batch may differ in length. A window is left-aligned: slot j of row b holds the token at position `first + j`.
The history is right-aligned, ending before the first latent, and the latents are left-aligned: together they are one
run of consecutive tokens, after `empty` slots and before unused ones. Numbers that all rows share are ints.

Shape letters: B batch, T tokens, W window, S history, M latents, P projected rows, D width, H heads, K channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.ops.padding import Compaction, real_slots

Number = int | Tensor
"""A number for all rows, or `[B]`."""


class Parts(NamedTuple):
    """The cut of a window into history and latents."""

    start: Number
    """Position of the first latent."""
    latents: int
    """Slots of the latents: the most that any row has."""
    history: int
    """Slots of the history: the most that any row has."""


class LastTokens(NamedTuple):
    """The last tokens of each row."""

    tokens_BW: Tensor
    first: Number
    """Position of slot 0."""
    seen: Number
    """Position after the last token."""
    lengths_B: Tensor | None
    """Number of real tokens in each row; None: W."""

    @classmethod
    def of(cls, tokens_BT: Tensor, moved: Compaction | None, limit: int | None) -> LastTokens:
        """Return the last `limit` (None: all) real tokens of each row; `moved` says where padding is."""
        T = tokens_BT.shape[1]
        slots = T if limit is None else min(T, limit)
        if moved is None:
            return cls(tokens_BT[:, T - slots :], T - slots, T, None)
        first_B = (moved.lengths_B - slots).clamp(min=0)
        lengths_B = moved.lengths_B - first_B
        order_BW = neighbours(moved.order_BT, first_B, slots)
        tokens_BW = tokens_BT.gather(1, order_BW).masked_fill(~real_slots(lengths_B, slots), 0)
        return cls(tokens_BW, 0 if slots == T else first_B, moved.lengths_B, lengths_B)

    @classmethod
    def from_last(cls, last_BW: Tensor, seen: Number) -> LastTokens:
        """Return the window whose `last` is `last_BW`."""
        slots = last_BW.shape[1]
        if isinstance(seen, int):
            return cls(last_BW, seen - slots, seen, None)
        first_B = (seen - slots).clamp(min=0)
        tokens_BW = neighbours(last_BW, first_B - (seen - slots), slots)
        lengths_B = seen - first_B
        return cls(tokens_BW.masked_fill(~real_slots(lengths_B, slots), 0), first_B, seen, lengths_B)

    def last(self) -> Tensor:
        """Return the tokens right-aligned."""
        slots = self.tokens_BW.shape[1]
        return self.tokens_BW if self.lengths_B is None else neighbours(self.tokens_BW, self.lengths_B - slots, slots)

    def parts(self, latents: int, history_tokens: int | None) -> Parts:
        """Cut the window into `latents` (fewer if there are fewer tokens) and at most `history_tokens` before them."""
        slots = self.tokens_BW.shape[1]
        used = min(latents, slots)
        history = slots - used if history_tokens is None else min(slots - used, history_tokens)
        start = self.seen - used if isinstance(self.seen, int) else (self.seen - latents).clamp(min=0)
        return Parts(start, used, history)

    def at_the_end(self, h_BMD: Tensor, parts: Parts) -> Tensor:
        """Move each row's latents from the start to the end, after zeros."""
        if isinstance(self.seen, int):
            return h_BMD
        used_B = self.seen - parts.start
        empty_BM = ~real_slots(used_B, parts.latents).flip(1)
        return neighbours(h_BMD, used_B - parts.latents, parts.latents).masked_fill(empty_BM[..., None], 0.0)


class History(NamedTuple):
    """Vectors before the latents: one a token, or the rows of a compressed history."""

    x_BSD: Tensor
    places: Number
    """Position of slot 0, or of every slot, `[B, S]`."""
    empty: Number
    """Number of leading empty slots."""


def cut(x_BWD: Tensor, window: LastTokens, parts: Parts) -> tuple[History, Tensor]:
    """Cut the window's vectors into those before the first latent and those of the latents."""
    start, latents, history = parts
    if isinstance(start, int) and isinstance(window.first, int):
        border = start - window.first
        return History(x_BWD[:, border - history : border], start - history, 0), x_BWD[:, border:]
    start_B = torch.as_tensor(start, device=x_BWD.device)
    old_BSD = neighbours(x_BWD, start_B - history - window.first, history)
    places_B = start_B - history
    return History(old_BSD, places_B, (-places_B).clamp(min=0)), neighbours(x_BWD, start_B - window.first, latents)


def thin(history: History, fraction: float) -> History:
    """Drop `int(fraction * h)` random tokens from each row's h, keeping their order: prefix dropout in training."""
    B, S, _ = history.x_BSD.shape
    kept = S - int(fraction * S)
    slots_S = torch.arange(S, device=history.x_BSD.device)
    empty_B1 = torch.as_tensor(history.empty, device=slots_S.device).expand(B)[:, None]
    real_B1 = S - empty_B1
    kept_B1 = real_B1 - (fraction * real_B1.double()).long()
    draw_BS = torch.rand(B, S, device=slots_S.device).masked_fill(slots_S < empty_B1, 2.0)
    chosen_BS = draw_BS.argsort(-1).argsort(-1) < kept_B1
    # Dropped slots sort first (negative), so that the kept ones end up right-aligned, in order.
    index_BS = torch.where(chosen_BS, slots_S, slots_S - S).sort(-1).values[:, S - kept :] % S
    places = torch.as_tensor(history.places, device=slots_S.device).expand(B)[:, None] + index_BS
    x_BSD = history.x_BSD.gather(1, index_BS[..., None].expand(-1, -1, history.x_BSD.shape[-1]))
    return History(x_BSD, places, 0 if isinstance(history.empty, int) else kept - kept_B1[:, 0])


def compress(history: History, project: nn.Module, columns: int, rows: int, start: Number) -> History:
    """Project the history's vectors along the sequence, from `columns` tokens to the P = `rows` of V3.

    The last history token meets the last column of the projection, as if zeros preceded a shorter history. The position
    of row p is that of the last token of the p-th of P equal parts of the columns. A row of the batch without a history
    gets no rows.
    """
    x_BSD, places, empty = history
    (B, S, _), device = x_BSD.shape, x_BSD.device
    start_B1 = torch.as_tensor(start, device=device).expand(B)[:, None]
    ends_P = torch.arange(1, rows + 1, device=device) * columns // rows - 1
    if isinstance(empty, Tensor):
        filled_BS = torch.arange(S, device=device) >= empty[:, None]
        x_BSD = x_BSD.masked_fill(~filled_BS[..., None], 0.0)
        empty = torch.where(empty < S, 0, rows)
    if isinstance(places, Tensor) and places.ndim == 2:
        column_BS1 = (columns - start_B1 + places).clamp(0, columns - 1)[..., None]
        wide_BCD = x_BSD.new_zeros(B, columns, x_BSD.shape[2]).scatter_add(1, column_BS1.expand_as(x_BSD), x_BSD)
    else:
        wide_BCD = F.pad(x_BSD, (0, 0, columns - S, 0))
    return History(project(wide_BCD.mT).mT.to(x_BSD.dtype), start_B1 - columns + ends_P, empty)


def neighbours(x: Tensor, begin_B: Tensor, slots: int) -> Tensor:
    """Return consecutive slots of each row from `begin` on, `[B, slots, ...]`; slots beyond an end repeat that end."""
    index_BS = begin_B[:, None] + torch.arange(slots, device=x.device)
    index_BS = index_BS.clamp(0, max(x.shape[1] - 1, 0))
    return x.gather(1, index_BS.view(*index_BS.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))
