"""Move packed documents to rows of their own and back, so that no document sees another.

Shape letters: B batch, T tokens, N = B * T, D channels, R documents of a group, C slots of each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops.padding import check_mask, compaction, real_slots
from subquad.tracing import to_numpy

PADDING = -1
"""Document id of padding."""
GROUP_TOKENS = 256
"""Least number of padding slots that another group must save, since a group is another call of the mechanism."""


class Group(NamedTuple):
    """Documents laid out together, one per row, from the start of the row."""

    places_RC: Tensor
    """Index of each slot's token among all N; an empty slot holds N, the index of a row of zeros."""
    lengths_R: Tensor | None
    """Tokens of each document; None if all have C."""
    rows_R: Tensor
    """Row of the batch that holds each document."""


class Documents(NamedTuple):
    """Layout that takes packed rows apart into documents and puts them together again."""

    groups: tuple[Group, ...]
    slots_BT: Tensor
    """Index of each token among the slots of all groups, end to end; padding has the index after the last slot."""
    positions_BT: Tensor
    """Position of each token in its document."""
    real_BT: Tensor
    """Bool: False at padding."""

    @property
    def seen(self) -> int | Tensor:
        """Tokens of each document of the first group, as a state counts them."""
        first = self.groups[0]
        return first.places_RC.shape[1] if first.lengths_R is None else first.lengths_R

    def take(self, x_BTD: Tensor, group: Group) -> Tensor:
        """Return the documents of a group, `[R, C, D]`, with zeros in empty slots."""
        D = x_BTD.shape[-1]
        padded_ND = torch.cat([x_BTD.reshape(-1, D), x_BTD.new_zeros(1, D)])
        return padded_ND.index_select(0, group.places_RC.flatten()).view(*group.places_RC.shape, D)

    def put(self, parts: list[Tensor]) -> Tensor:
        """Return `[B, T, D]` from the outputs `[R, C, D]` of all groups, with zeros at padding."""
        D = parts[0].shape[-1]
        slots_ND = torch.cat([*(part.reshape(-1, D) for part in parts), parts[0].new_zeros(1, D)])
        return slots_ND.index_select(0, self.slots_BT.flatten()).view(*self.slots_BT.shape, D)


def lay_out(doc_ids: Tensor, mask: Tensor | None, batch: int, tokens: int, *, last_apart: bool = True) -> Documents:
    """Return the layout that takes rows `[batch, tokens]` apart into documents.

    A document begins where the id differs from the id of the last real token before; padding (id -1, or False in
    `mask`) does not count. With `last_apart` the first group holds the last document of each row in the order of the
    rows (an empty one if a row has none); the others are grouped by length to save padding.

    The layout is made on the CPU: ids on a GPU are fetched once. Raises `TypeError` for ids that aren't integers,
    `ValueError` for a wrong shape or an id below -1.
    """
    if doc_ids.is_floating_point() or doc_ids.dtype == torch.bool:
        raise TypeError(f"doc_ids must hold integers, the document's id at each of its tokens, got {doc_ids.dtype}")
    if doc_ids.shape != (batch, tokens):
        raise ValueError(f"doc_ids must have shape {(batch, tokens)}, one id per token, got {tuple(doc_ids.shape)}")
    ids_BT = to_numpy(doc_ids, "doc_ids").astype(np.int64)
    if ids_BT.size and ids_BT.min() < PADDING:
        raise ValueError(f"doc_ids must be 0 or more, or -1 for padding, got {ids_BT.min()}")
    real_BT = ids_BT != PADDING
    if mask is not None:
        check_mask(mask, batch, tokens)
        real_BT &= to_numpy(mask, "a mask beside doc_ids").astype(bool)
    return _layout(ids_BT, real_BT, last_apart, doc_ids.device)


def _layout(ids_BT: np.ndarray, real_BT: np.ndarray, last_apart: bool, device: torch.device) -> Documents:
    B, T = ids_BT.shape
    place_n = np.flatnonzero(real_BT)  # n: real tokens
    row_n, id_n = place_n // max(T, 1), ids_BT.reshape(-1)[place_n]
    begins_n = np.ones(len(place_n), dtype=bool)
    begins_n[1:] = (row_n[1:] != row_n[:-1]) | (id_n[1:] != id_n[:-1])
    first = np.flatnonzero(begins_n)
    lengths, rows = np.diff(first, append=len(place_n)), row_n[first]

    last_of_row = np.full(B, len(first))  # an empty document for a row without one
    last_of_row[rows] = np.arange(len(first))  # the last assignment to an index holds
    first, lengths, rows = np.append(first, 0), np.append(lengths, 0), np.append(rows, 0)
    chosen = np.arange(len(first) - 1)
    members = [last_of_row] if last_apart or not len(chosen) else []
    others = np.setdiff1d(chosen, last_of_row) if members else chosen
    members += [others[part] for part in grouped(lengths[others])]

    groups, total = [], 0
    slots = np.zeros(B * T, dtype=np.int64)
    for docs in members:
        C = int(lengths[docs].max(initial=0))
        filled_RC = np.arange(C) < lengths[docs][:, None]
        places_RC = np.full((len(docs), C), B * T)
        places_RC[filled_RC] = place_n[(first[docs][:, None] + np.arange(C))[filled_RC]]
        slots[places_RC[filled_RC]] = total + np.flatnonzero(filled_RC)
        whole = bool((lengths[docs] == C).all())
        rows_R = np.arange(B) if docs is last_of_row else rows[docs]
        groups.append(Group(*(torch.from_numpy(x).to(device) for x in (places_RC, lengths[docs], rows_R))))
        if whole:
            groups[-1] = groups[-1]._replace(lengths_R=None)
        total += filled_RC.size
    slots[~real_BT.reshape(-1)] = total

    positions = np.zeros(B * T, dtype=np.int64)
    positions[place_n] = np.arange(len(place_n)) - np.repeat(first[:-1], lengths[:-1])
    made = (x.reshape(B, T) for x in (slots, positions, real_BT))
    return Documents(tuple(groups), *(torch.from_numpy(x).to(device) for x in made))


def real_tokens(doc_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return bool `[B, T]`: False at padding, by its id or by the mask."""
    return doc_ids != PADDING if mask is None else mask & (doc_ids != PADDING)


def before_others(doc_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return bool `[B, T]`: True at the last token of each document that another one follows in its row."""
    moved = compaction(real_tokens(doc_ids, mask))
    ids_BT = doc_ids.gather(1, moved.order_BT)
    real_BT = real_slots(moved.lengths_B, doc_ids.shape[1])
    changes_BT = F.pad((ids_BT[:, 1:] != ids_BT[:, :-1]) & real_BT[:, 1:], (0, 1))
    return changes_BT.gather(1, moved.inverse_BT)


def grouped(lengths: np.ndarray) -> list[np.ndarray]:
    """Group documents by length; return an array of indices into `lengths` for each group.

    The documents are sorted by length and cut into groups so that the total number of slots is least, where each group
    adds `GROUP_TOKENS` to it.
    """
    if not len(lengths):
        return []
    order = np.argsort(-lengths, kind="stable")
    longest, count = np.unique(-lengths, return_counts=True)  # longest first
    longest, before = -longest, np.concatenate([[0], np.cumsum(count)])
    cost = np.zeros(len(before))
    cut = np.zeros(len(before), dtype=np.int64)
    for end in range(1, len(before)):
        costs = cost[:end] + longest[:end] * (before[end] - before[:end]) + GROUP_TOKENS
        cut[end] = costs.argmin()
        cost[end] = costs[cut[end]]
    parts, end = [], len(before) - 1
    while end:
        parts.append(order[before[cut[end]] : before[end]])
        end = cut[end]
    return parts[::-1]
