"""Positions of queries and keys, from starts, lengths and documents, as engine B passes them to its backends.

Shape letters: B batch, H query heads, T queries, S keys, K key channels, V value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.ops.padding import real_slots
from subquad.ops.patterns import Pattern


class Slots(NamedTuple):
    """Positions of the tokens of queries and keys.

    `q_pos_BT`, `k_pos_BS`: positions by row, negative for an empty slot; None: counted from `q_start` and `k_start`.
    `lengths_B`: number of each row's key slots that hold a token; None if no query could see a later slot.
    `q_doc_BT`, `k_doc_BS`: document ids, only with positions by row; a query sees the keys of its own document.
    """

    q_start: int
    k_start: int
    lengths_B: Tensor | None = None
    q_pos_BT: Tensor | None = None
    k_pos_BS: Tensor | None = None
    q_doc_BT: Tensor | None = None
    k_doc_BS: Tensor | None = None

    @property
    def starts(self) -> tuple[int, int] | None:
        """Positions of the first query and the first key; None if positions are given by row."""
        return (self.q_start, self.k_start) if self.q_pos_BT is None else None

    def of_row(self, row: int | None) -> Slots:
        """Return the slots of one row of the batch (None: of all)."""
        if row is None:
            return self
        return Slots(self.q_start, self.k_start, *(None if x is None else x[row : row + 1] for x in self[2:]))


class Starts(NamedTuple):
    """Positions of the tokens of queries and keys for the kernels: slot i of a row is at the row's start plus i.

    `q_start_B`, `k_start_B`: positions of each row's first query and key, where they differ from `q_start`, `k_start`.
    The other fields are those of `Slots`, in the same places.
    """

    q_start: int
    k_start: int
    lengths_B: Tensor | None = None
    q_start_B: Tensor | None = None
    k_start_B: Tensor | None = None
    q_doc_BT: Tensor | None = None
    k_doc_BS: Tensor | None = None


SCHEMA = (
    "SymInt q_start, SymInt k_start, Tensor? lengths_B, "
    "Tensor? q_pos_BT, Tensor? k_pos_BS, Tensor? q_doc_BT, Tensor? k_doc_BS"
)
"""Fields of `Slots` in the schema of a torch operator."""


def placed(
    q_start: int | Tensor,
    k_start: int | Tensor,
    lengths: Tensor | None,
    doc_ids: Tensor | None,
    pattern: Pattern,
    q_BHTK: Tensor,
    S: int,
    *,
    for_kernels: bool = False,
) -> tuple[Slots | Starts, Tensor | None]:
    """Return the positions by starts, lengths and documents, and bool `[B, T]`, True for real queries (None: all are).

    `for_kernels` gives `Starts`, which need no operation on the device and keep no position in a CUDA graph.
    Raises `ValueError` for starts, lengths and documents that do not agree.
    """
    B, _, T, _ = q_BHTK.shape
    real_BS = real_BT = None
    if lengths is not None:
        _check_whole("lengths", lengths, (B,))
    if doc_ids is not None:
        _check_whole("doc_ids", doc_ids, (B, S))
    if (lengths is not None or doc_ids is not None) and T > S:
        raise ValueError(f"with lengths or doc_ids the queries are the last of the keys, got T={T} > S={S}")
    if lengths is not None:
        real_BS = real_slots(lengths, S)
        real_BT = real_BS[:, S - T :]
    docs = (None, None) if doc_ids is None else (doc_ids[:, S - T :], doc_ids)
    if isinstance(q_start, int) and isinstance(k_start, int):
        if (lengths is not None or doc_ids is not None) and pattern.causal and q_start - k_start != S - T:
            raise ValueError(
                "with lengths or doc_ids the queries must be the last of the keys: q_start - k_start = S - T, "
                f"got q_start={q_start}, k_start={k_start}, S={S}, T={T}"
            )
        if doc_ids is None:
            # In a causal pattern a padded key lies after every real query.
            kind = Starts if for_kernels else Slots
            return kind(q_start, k_start, None if pattern.causal else lengths), real_BT
    if for_kernels:
        (q_first, q_start_B), (k_first, k_start_B) = (
            (0, _start(x, B)) if isinstance(x, Tensor) else (x, None) for x in (q_start, k_start)
        )
        return Starts(q_first, k_first, lengths, q_start_B, k_start_B, *docs), real_BT
    q_pos_BT = _positions(q_start, T, B, q_BHTK.device)
    k_pos_BS = _positions(k_start, S, B, q_BHTK.device)
    if real_BS is not None and real_BT is not None:
        q_pos_BT, k_pos_BS = q_pos_BT.masked_fill(~real_BT, -1), k_pos_BS.masked_fill(~real_BS, -1)
    return Slots(0, 0, None, q_pos_BT, k_pos_BS, *docs), real_BT


def placed_apart(
    q_start: int | Tensor, k_start: int | Tensor, key_lengths: Tensor, others: bool, pattern: Pattern, B: int
) -> Slots:
    """Return the positions for cross-attention: queries are not among the keys, which number `key_lengths` per row."""
    _check_whole("key_lengths", key_lengths, (B,))
    if others or pattern.causal or isinstance(q_start, Tensor) or isinstance(k_start, Tensor):
        raise ValueError(
            "key_lengths needs a non-causal pattern, integer starts, and neither lengths, mask nor doc_ids, "
            f"got {pattern!r}"
        )
    return Slots(q_start, k_start, key_lengths)


def _check_whole(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.is_floating_point():
        raise ValueError(f"{name} must hold integers in the shape {shape}, got {x.dtype} {tuple(x.shape)}")


def _positions(start: int | Tensor, slots: int, batch: int, device: torch.device) -> Tensor:
    first = _start(start, batch)[:, None] if isinstance(start, Tensor) else start
    return (torch.arange(slots, device=device) + first).expand(batch, slots)


def _start(start_B: Tensor, batch: int) -> Tensor:
    if start_B.shape not in ((), (batch,)) or start_B.is_floating_point():
        raise ValueError(
            f"a start must be an int or an integer tensor [] or [{batch}], got {start_B.dtype} {tuple(start_B.shape)}"
        )
    return start_B.expand(batch)


def allowed_between(pattern: Pattern, slots: Slots, q_slot: Tensor, k_slot: Tensor) -> Tensor:
    """Return bool `[B or 1, ..., C, W]`: queries in the slots `[..., C]` may see keys in the slots `[..., W]`."""
    if slots.q_pos_BT is None or slots.k_pos_BS is None:
        q, k = (q_slot + slots.q_start)[..., :, None], (k_slot + slots.k_start)[..., None, :]
        allowed = pattern.allowed(q, k)[None] & (k >= 0)
        return allowed if slots.lengths_B is None else allowed & real_keys(slots.lengths_B, k_slot)
    q, k = slots.q_pos_BT[:, q_slot][..., :, None], slots.k_pos_BS[:, k_slot][..., None, :]
    allowed = pattern.allowed(q, k) & (q >= 0) & (k >= 0)
    if slots.q_doc_BT is not None and slots.k_doc_BS is not None:
        allowed = allowed & (slots.q_doc_BT[:, q_slot][..., :, None] == slots.k_doc_BS[:, k_slot][..., None, :])
    return allowed


def real_keys(lengths_B: Tensor, k_slot: Tensor) -> Tensor:
    """Return bool `[B, ..., 1, W]`: True for key slots `[..., W]` within the lengths."""
    return (k_slot < lengths_B.reshape(-1, *(1,) * k_slot.ndim))[..., None, :]


def allowed_pairs(pattern: Pattern, slots: Slots, T: int, S: int, device: torch.device) -> Tensor:
    """Return the pattern slot by slot, bool `[B or 1, T, S]`."""
    return allowed_between(pattern, slots, torch.arange(T, device=device), torch.arange(S, device=device))


def seen_slots(
    pattern: Pattern, starts: tuple[int, int] | None, start: int, stop: int, queries: int, keys: int
) -> tuple[int, int]:
    """Return a range of key slots that covers all that the queries in the slots `[start, stop)` may see.

    `starts` holds the positions of the first query and the first key. None: rows differ in their positions, and the
    queries are the last of the key slots.
    """
    lo: int
    hi: int | None
    if starts is not None:
        lo, hi = pattern.key_range(start + starts[0], stop + starts[0])
        lo, hi = lo - starts[1], None if hi is None else hi - starts[1]
    elif pattern.anchored:
        lo, hi = 0, None
    else:
        earlier = keys - queries
        lo = 0 if pattern.reach is None else start + earlier - pattern.reach
        hi = None if pattern.ahead is None else stop + earlier + pattern.ahead
    return max(lo, 0), keys if hi is None else min(hi, keys)


def nothing(q_BHTK: Tensor, v_BHSV: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over no keys: outputs of zero, still connected to the graph, and a logsumexp of -inf."""
    out_BHTV = q_BHTK[..., :0].sum(-1, keepdim=True).expand(*q_BHTK.shape[:3], v_BHSV.shape[-1])
    return out_BHTV, q_BHTK.new_full(q_BHTK.shape[:3], -torch.inf)
