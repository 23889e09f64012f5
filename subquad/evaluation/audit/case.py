"""One comparison of logits that should be equal, which can be shortened, saved and replayed.

Shape letters: B batch, T tokens, M outputs, V vocabulary, N positions compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.evaluation.audit.probe import Probe, Refused, wide

Rows = tuple[tuple[int, ...], ...]
LARGEST = 2**31 - 1
"""Largest token."""
MOST_COLUMNS = 1 << 20
"""Longest padded row accepted from a file; an audit writes some hundreds of columns."""


@dataclass(frozen=True)
class Case:
    """An input and the kind of comparison made on it."""

    kind: str
    """finite, repeatable, causality, truncation, cache, padding or batch."""
    tokens: Rows
    """Sequences, all of one length except for padding."""
    changed: Rows = ()
    """causality: `tokens` with other tokens from some position on."""
    keep: int = 0
    """truncation: the number of tokens kept."""
    pieces: tuple[int, ...] = ()
    """cache: sizes of the pieces read in turn, which add up to the length. padding: sizes of the unpadded pieces that
    follow the padded one."""
    side: str = ""
    """padding: left or right."""
    columns: int = 0
    """padding: length of the padded piece."""
    fills: tuple[int, ...] = ()
    """padding: tokens to pad with, one comparison each."""
    order: tuple[int, ...] = ()
    """batch: another order of the rows; empty compares each row by itself."""
    dtype: str = ""
    """Dtype of the weights."""

    def to_dict(self) -> dict[str, Any]:
        """Return the non-empty fields as plain values."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """Read the output of `to_dict`; `ValueError` for anything else."""
        known = {field.name for field in fields(cls)}
        try:
            if not set(values) <= known or values["kind"] not in COMPARE:
                raise ValueError(f"its keys are {sorted(values)}")
            plain = dict(values)
            for name in ("tokens", "changed"):
                plain[name] = tuple(tuple(int(token) for token in row) for row in values.get(name, ()))
            for name in ("pieces", "fills", "order"):
                plain[name] = tuple(int(number) for number in values.get(name, ()))
            case = cls(**plain)
            case.check()
            return case
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a failing input of an audit: {error}") from error

    def check(self) -> None:
        """Raise `ValueError` if the fields contradict each other."""
        if not self.tokens or not all(self.tokens):
            raise ValueError(f"tokens must hold sequences of at least one token, got {list(map(list, self.tokens))}")
        for token in (*self.fills, *(token for row in (*self.tokens, *self.changed) for token in row)):
            if not 0 <= token <= LARGEST:
                raise ValueError(f"tokens must lie between 0 and {LARGEST}, got {token}")
        lengths, after = [len(row) for row in self.tokens], sum(self.pieces)
        if self.kind != "padding" and len(set(lengths)) > 1:
            raise ValueError(f"sequences must have one length, got {lengths}")
        for name in ("keep", "columns"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        for size in self.pieces:
            if size < 1:
                raise ValueError(f"pieces must be at least 1, got {size}")
        changed = [len(row) for row in self.changed]
        if self.kind == "causality" and changed != lengths:
            raise ValueError(f"changed must hold sequences of the lengths of tokens, {lengths}, got {changed}")
        if self.kind == "truncation" and not 0 < self.keep <= lengths[0]:
            raise ValueError(f"keep must lie between 1 and the {lengths[0]} tokens, got {self.keep}")
        if self.kind == "cache" and after != lengths[0]:
            raise ValueError(f"pieces must add up to the {lengths[0]} tokens, got {list(self.pieces)}")
        if self.kind == "batch" and self.order and sorted(self.order) != list(range(len(lengths))):
            raise ValueError(f"order must name each of the {len(lengths)} sequences once, got {list(self.order)}")
        if self.kind == "padding":
            self._check_padding(max(lengths) - after, min(lengths) - after)

    def _check_padding(self, longest: int, shortest: int) -> None:
        if self.side not in ("left", "right"):
            raise ValueError(f"side must be left or right, got {self.side!r}")
        if not self.fills:
            raise ValueError("fills must hold at least one token, got none")
        if shortest < 1:
            raise ValueError(f"pieces must leave at least one token of each sequence, got {list(self.pieces)}")
        if self.columns > MOST_COLUMNS:
            raise ValueError(f"columns must be at most {MOST_COLUMNS}, got {self.columns}")
        if longest > self.columns:
            raise ValueError(f"columns must be at least {longest}, the longest sequence to pad, got {self.columns}")


class Deltas(NamedTuple):
    """The largest difference over the vocabulary at each compared position."""

    size_N: Tensor
    """Float64; infinite for different logits of which one is not finite."""
    row_N: Tensor
    position_N: Tensor
    """Position in its row of the token that the output follows."""

    @property
    def worst(self) -> float:
        """Return the largest difference; 0 if nothing was compared."""
        return self.size_N.max().item() if self.size_N.numel() else 0.0

    def first(self, band: float) -> dict[str, Any]:
        """Return the place and size of the first difference beyond the band, and the largest difference."""
        at = (self.size_N > band).nonzero().flatten()
        if not at.numel():
            return {}
        n = at[self.position_N[at].argmin()]
        return {
            "row": int(self.row_N[n]),
            "output": int(self.position_N[n]),
            "size": self.size_N[n].item(),
            "worst": self.worst,
        }


def compare(probe: Probe, case: Case) -> Deltas:
    """Return the differences in one case; `Refused` if the model refuses an input."""
    return COMPARE[case.kind](probe, case)


def limit(kind: str, band: float) -> float:
    """Return the largest tolerated difference: the band, or 0 for "finite", which involves no rounding."""
    return 0.0 if kind == "finite" else band


def fails(probe: Probe, case: Case, band: float) -> bool:
    """Return whether a difference exceeds the band; a case that the model refuses doesn't fail."""
    try:
        return not compare(probe, case).worst <= limit(case.kind, band)
    except Refused:
        return False


def delta(a_BMV: Tensor, b_BMV: Tensor) -> Tensor:
    """Return the largest difference over the vocabulary `[B, M]`: 0 for equal logits (also infinite), inf for NaN."""
    a, b = wide(a_BMV), wide(b_BMV)
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).amax(-1)


def positions(size_BM: Tensor, tokens: int | Sequence[int]) -> Deltas:
    """Return the deltas of the last M outputs of rows with `tokens` tokens each."""
    B, M = size_BM.shape
    lengths = [tokens] * B if isinstance(tokens, int) else list(tokens)
    position_BM = torch.tensor(lengths)[:, None] - M + torch.arange(M)
    return Deltas(size_BM.flatten(), torch.arange(B).repeat_interleave(M), position_BM.flatten())


def join(parts: Sequence[Deltas]) -> Deltas:
    """Concatenate deltas."""
    return Deltas(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _compare_finite(probe: Probe, case: Case) -> Deltas:
    logits = probe.full(case.tokens)
    bad_BM = (~logits.isfinite()).any(-1).cpu()
    return positions(torch.where(bad_BM, torch.inf, 0.0).double(), len(case.tokens[0]))


def _compare_repeatable(probe: Probe, case: Case) -> Deltas:
    return positions(delta(probe.full(case.tokens), probe.full(case.tokens)), len(case.tokens[0]))


def _compare_causality(probe: Probe, case: Case) -> Deltas:
    found = positions(delta(probe.full(case.tokens), probe.full(case.changed)), len(case.tokens[0]))
    first_B = torch.tensor(
        [min(differing(a, b), default=len(a)) for a, b in zip(case.tokens, case.changed, strict=True)]
    )
    before = found.position_N < first_B[found.row_N]
    return Deltas(*(values[before] for values in found))


def differing(row: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the positions where two rows differ."""
    return [t for t, (a, b) in enumerate(zip(row, other, strict=True)) if a != b]


def _compare_truncation(probe: Probe, case: Case) -> Deltas:
    T = len(case.tokens[0])
    whole = probe.full(case.tokens)
    if whole.shape[1] < T:
        raise Refused(f"of {T} tokens only the last {whole.shape[1]} have outputs")
    part = probe.full([row[: case.keep] for row in case.tokens])
    return positions(delta(whole[:, : part.shape[1]], part), case.keep)


def _compare_cache(probe: Probe, case: Case) -> Deltas:
    """Compare the outputs of pieces read with a cache with those of a full pass.

    With outputs aligned at the end, later outputs are compared with the last output of a full pass up to each token.
    """
    T = len(case.tokens[0])
    tokens_BT = probe.tensor(case.tokens)
    whole = None if probe.adapter.aligned_at_end else probe.full(tokens_BT)
    cache, start, found = None, 0, []
    for size in case.pieces:
        stop = start + size
        logits, cache = probe.step(tokens_BT[:, start:stop], cache, None)
        M = logits.shape[1]
        if whole is not None:
            right = whole[:, stop - M - T + whole.shape[1] : stop - T + whole.shape[1]]
        elif start == 0:
            right = probe.full(tokens_BT[:, :stop])[:, -M:]
        else:
            right = torch.cat([probe.full(tokens_BT[:, : t + 1])[:, -1:] for t in range(stop - M, stop)], 1)
        found.append(positions(delta(logits, right), stop))
        start = stop
    return join(found)


def padded(case: Case, fill: int) -> tuple[Tensor, Tensor]:
    """Return tokens and mask `[B, columns]`: rows without the tokens of later `pieces`, padded with `fill`."""
    rows, masks = [], []
    after = sum(case.pieces)
    for row in case.tokens:
        real = row[: len(row) - after]
        padding = (fill,) * (case.columns - len(real))
        rows.append(padding + real if case.side == "left" else real + padding)
        hidden = (False,) * len(padding)
        masks.append(hidden + (True,) * len(real) if case.side == "left" else (True,) * len(real) + hidden)
    return torch.tensor(rows), torch.tensor(masks)


def _compare_padding(probe: Probe, case: Case) -> Deltas:
    """Compare the outputs of real tokens in padded rows, then of later pieces, with those of each row alone."""
    after = sum(case.pieces)
    alone = [_Alone(probe, row) for row in case.tokens]
    found = []
    for fill in case.fills:
        tokens, mask = padded(case, fill)
        if case.pieces:
            logits, cache = probe.step(tokens, None, mask)
        else:
            logits, cache = probe.full(tokens, mask), None
        for b, row in enumerate(case.tokens):
            found.append(_row(b, real_outputs(probe, logits, mask, b), alone[b], 0, len(row) - after))
        left = after
        for size in case.pieces:
            new = torch.tensor([row[len(row) - left : len(row) - left + size] for row in case.tokens])
            mask = torch.cat([mask, torch.ones_like(new, dtype=torch.bool)], 1)
            logits, cache = probe.step(new, cache, mask)
            for b, row in enumerate(case.tokens):
                found.append(_row(b, logits[b], alone[b], len(row) - left, len(row) - left + size))
            left -= size
    return join(found)


class _Alone:
    """The logits of one row without padding: from one pass, or from one per token if aligned at the end."""

    def __init__(self, probe: Probe, row: tuple[int, ...]) -> None:
        self.probe, self.row = probe, row
        self.whole = None if probe.adapter.aligned_at_end else probe.full([row])[0]

    def outputs(self, start: int, stop: int) -> Tensor:
        """Return the last n <= `stop - start` outputs `[n, V]` up to token `stop - 1`."""
        if self.whole is not None:
            end = self.whole.shape[0] - (len(self.row) - stop)
            return self.whole[max(0, end - (stop - start)) : end]
        if start == 0:
            return self.probe.full([self.row[:stop]])[0]
        return torch.cat([self.probe.full([self.row[: t + 1]])[0, -1:] for t in range(start, stop)])


def real_outputs(probe: Probe, logits_BMV: Tensor, mask_BT: Tensor, b: int) -> Tensor:
    """Return the outputs `[n, V]` of row b at its real tokens."""
    M, real = logits_BMV.shape[1], int(mask_BT[b].sum())
    if probe.adapter.aligned_at_end:
        return logits_BMV[b, M - min(M, real) :]
    return logits_BMV[b][mask_BT[b, -M:].to(logits_BMV.device)]


def _row(b: int, out_MV: Tensor, alone: _Alone, start: int, stop: int) -> Deltas:
    """Compare the outputs of row b at tokens `start` to `stop - 1` with the same row alone."""
    right_MV = alone.outputs(start, stop)
    n = min(out_MV.shape[0], right_MV.shape[0])
    found = positions(delta(out_MV[None, out_MV.shape[0] - n :], right_MV[None, right_MV.shape[0] - n :]), stop)
    return found._replace(row_N=torch.full_like(found.row_N, b))


def _compare_batch(probe: Probe, case: Case) -> Deltas:
    T, together = len(case.tokens[0]), probe.full(case.tokens)
    if case.order:
        moved = probe.full([case.tokens[b] for b in case.order])
        return positions(delta(together[list(case.order)], moved), T)
    return positions(delta(together, torch.cat([probe.full([row]) for row in case.tokens])), T)


COMPARE = {
    "finite": _compare_finite,
    "repeatable": _compare_repeatable,
    "causality": _compare_causality,
    "truncation": _compare_truncation,
    "cache": _compare_cache,
    "padding": _compare_padding,
    "batch": _compare_batch,
}
"""The comparison of each kind of case."""


BUDGET = 150
"""Most cases tried while shrinking."""


def shrink(case: Case, failing: Callable[[Case], bool], budget: int = BUDGET) -> Case:
    """Make a failing case smaller while a smaller one fails, trying at most `budget` cases."""
    while True:
        for smaller in candidates(case):
            budget -= 1
            if budget < 0:
                return case
            if failing(smaller):
                case = smaller
                break
        else:
            return case


def candidates(case: Case) -> Iterator[Case]:
    """Yield smaller cases, the smallest first: fewer rows, shorter rows (halves, then less), fewer changed tokens."""
    if case.kind == "batch":
        yield from _smaller_batch(case)
    elif len(case.tokens) > 1:
        for b, row in enumerate(case.tokens):
            changed = (case.changed[b],) if case.changed else ()
            yield replace(case, tokens=(row,), changed=changed, columns=min(case.columns, len(row) + 1))
    yield from _SMALLER.get(case.kind, _shorter)(case)


def _cuts(length: int, least: int) -> Iterator[int]:
    """Yield numbers of tokens to drop from `length`: half, a quarter, ..., 1, if at least `least` remain."""
    cut = length // 2
    while cut:
        if length - cut >= least:
            yield cut
        cut //= 2


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    return tuple(row[start:stop] for row in rows)


def _shorter(case: Case, least: int = 1) -> Iterator[Case]:
    """Yield the case without its last tokens, or without its first."""
    T = len(case.tokens[0])
    for cut in _cuts(T, least):
        yield replace(case, tokens=_cut(case.tokens, 0, T - cut), changed=_cut(case.changed, 0, T - cut))
        yield replace(case, tokens=_cut(case.tokens, cut, T), changed=_cut(case.changed, cut, T))


def _smaller_batch(case: Case) -> Iterator[Case]:
    if len(case.tokens) > 2:
        for b in range(len(case.tokens)):
            rows = case.tokens[:b] + case.tokens[b + 1 :]
            order = tuple(range(len(rows)))[::-1] if case.order else ()
            yield replace(case, tokens=rows, order=order)


def _smaller_causality(case: Case) -> Iterator[Case]:
    for shorter in _shorter(case, least=2):
        if shorter.tokens != shorter.changed:
            yield shorter
    row, other = case.tokens[0], case.changed[0]
    places = differing(row, other)
    if len(places) > 1:
        for kept in (places[len(places) // 2 :], places[: len(places) // 2], *([t] for t in places)):
            yield replace(case, changed=(tuple(other[t] if t in kept else row[t] for t in range(len(row))),))


def _smaller_truncation(case: Case) -> Iterator[Case]:
    T = len(case.tokens[0])
    for cut in _cuts(T - case.keep, 1):
        yield replace(case, tokens=_cut(case.tokens, 0, T - cut))
    for cut in _cuts(case.keep, 1):
        yield replace(case, tokens=_cut(case.tokens, cut, T), keep=case.keep - cut)
        yield replace(case, tokens=_cut(case.tokens, 0, T - cut), keep=case.keep - cut)


def _smaller_cache(case: Case) -> Iterator[Case]:
    """Yield the case without its last pieces, with its first pieces joined, and with smaller pieces."""
    pieces = case.pieces
    for cut in _cuts(len(pieces), 1):
        yield _with_pieces(case, pieces[:-cut])
    for cut in _cuts(len(pieces), 2):
        yield _with_pieces(case, (sum(pieces[: cut + 1]), *pieces[cut + 1 :]))
    for i, piece in enumerate(pieces):
        for cut in _cuts(piece, 2 if i and piece > 1 else 1):
            yield _with_pieces(case, (*pieces[:i], piece - cut, *pieces[i + 1 :]), skip=cut if not i else 0)


def _with_pieces(case: Case, pieces: tuple[int, ...], skip: int = 0) -> Case:
    return replace(case, tokens=_cut(case.tokens, skip, skip + sum(pieces)), pieces=pieces)


def _smaller_padding(case: Case) -> Iterator[Case]:
    """Yield the case with one kind of padding token, fewer pieces, less padding and shorter rows."""
    if len(case.fills) > 1:
        for fill in case.fills:
            yield replace(case, fills=(fill,))
    after = sum(case.pieces)
    length = max(len(row) for row in case.tokens)
    for cut in _cuts(len(case.pieces), 1):
        gone = sum(case.pieces[-cut:])
        rows = tuple(row[: len(row) - gone] for row in case.tokens)
        yield replace(case, tokens=rows, pieces=case.pieces[:-cut])
    if case.columns > length - after + 1:
        yield replace(case, columns=length - after + 1)
    if len(case.tokens) == 1:
        for cut in _cuts(length - after, 1):
            yield replace(case, tokens=_cut(case.tokens, cut, length), columns=case.columns - cut)


_SMALLER = {
    "causality": _smaller_causality,
    "truncation": _smaller_truncation,
    "cache": _smaller_cache,
    "padding": _smaller_padding,
}
