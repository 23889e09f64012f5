"""One comparison of logits that should be equal: the form in which a fault is found, made short, kept and replayed.

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
"""The largest token."""
MOST_COLUMNS = 1 << 20
"""Of a row with its padding; an audit writes some hundreds."""


@dataclass(frozen=True)
class Case:
    """An input, and which two ways of computing are compared on it."""

    kind: str
    """finite, repeatable, causality, truncation, cache, padding or batch."""
    tokens: Rows
    """Sequences; of one length, but for padding."""
    changed: Rows = ()
    """causality: the same with other tokens from some position on."""
    keep: int = 0
    """truncation: the tokens that stay."""
    pieces: tuple[int, ...] = ()
    """cache: the sizes of the pieces, which add up to the length. padding: of those after the padded ones."""
    side: str = ""
    """padding: left or right."""
    columns: int = 0
    """padding: the length with the padding, of the piece that has it."""
    fills: tuple[int, ...] = ()
    """padding: tokens that stand in it, in turn."""
    order: tuple[int, ...] = ()
    """batch: the rows in another order; none: each row alone."""
    dtype: str = ""
    """Of the weights."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; what is empty is left out."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """Read what `to_dict` wrote; `ValueError` for anything else."""
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
            raise ValueError(f"this is no failing input of an audit: {error}") from error

    def check(self) -> None:
        """Raise `ValueError` for an input that no audit writes: its parts must fit each other."""
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
            raise ValueError(f"order must have each of the {len(lengths)} sequences once, got {list(self.order)}")
        if self.kind == "padding":
            self._check_padding(max(lengths) - after, min(lengths) - after)

    def _check_padding(self, longest: int, shortest: int) -> None:
        if self.side not in ("left", "right"):
            raise ValueError(f"side must be left or right, got {self.side!r}")
        if not self.fills:
            raise ValueError("fills must hold at least one token, got none")
        if shortest < 1:
            raise ValueError(f"pieces must leave a token of each sequence before them, got {list(self.pieces)}")
        if self.columns > MOST_COLUMNS:
            raise ValueError(f"columns must be at most {MOST_COLUMNS}, got {self.columns}")
        if longest > self.columns:
            raise ValueError(f"columns must be at least {longest}, the longest sequence to pad, got {self.columns}")


class Deltas(NamedTuple):
    """The largest difference over the vocabulary at each position that was compared."""

    size_N: Tensor
    """Float64; infinite where either logit is not finite and they are not the same."""
    row_N: Tensor
    position_N: Tensor
    """Of the token after which the output stands, in its row."""

    @property
    def worst(self) -> float:
        """Return the largest difference; 0 where nothing was compared."""
        return self.size_N.max().item() if self.size_N.numel() else 0.0

    def first(self, band: float) -> dict[str, Any]:
        """Return where the differences beyond the band begin, and the largest of them."""
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
    """Return the differences in one case; `Refused` where the model does not take an input."""
    return COMPARE[case.kind](probe, case)


def limit(kind: str, band: float) -> float:
    """Return the largest difference that is no fault: the band; 0 for finite logits, since rounding has no part."""
    return 0.0 if kind == "finite" else band


def fails(probe: Probe, case: Case, band: float) -> bool:
    """Return whether a difference is beyond the band; a case that the model does not take does not fail."""
    try:
        return not compare(probe, case).worst <= limit(case.kind, band)
    except Refused:
        return False


def delta(a_BMV: Tensor, b_BMV: Tensor) -> Tensor:
    """Return `[B, M]`: the largest difference over the vocabulary, 0 where all is equal, infinite for NaN."""
    a, b = wide(a_BMV), wide(b_BMV)
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).amax(-1)


def positions(size_BM: Tensor, tokens: int | Sequence[int]) -> Deltas:
    """Return the deltas of the last M tokens of rows with `tokens` tokens each."""
    B, M = size_BM.shape
    lengths = [tokens] * B if isinstance(tokens, int) else list(tokens)
    position_BM = torch.tensor(lengths)[:, None] - M + torch.arange(M)
    return Deltas(size_BM.flatten(), torch.arange(B).repeat_interleave(M), position_BM.flatten())


def join(parts: Sequence[Deltas]) -> Deltas:
    """Return all deltas as one."""
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
    """Compare the pieces' outputs with the full pass.

    Where outputs stand at the end, those after the first piece against the last output of the full pass up to each.
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
    """Return tokens and mask `[B, columns]` of the rows, without those in `pieces`, padded with one token."""
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
    """Compare real tokens' outputs with padding with each row alone; then those of pieces after it."""
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
    """One row's logits without padding: of one pass; where outputs stand at the end, of a pass up to each token."""

    def __init__(self, probe: Probe, row: tuple[int, ...]) -> None:
        self.probe, self.row = probe, row
        self.whole = None if probe.adapter.aligned_at_end else probe.full([row])[0]

    def outputs(self, start: int, stop: int) -> Tensor:
        """Return outputs `[n, V]` up to the token before `stop`; n is `stop - start` or less."""
        if self.whole is not None:
            end = self.whole.shape[0] - (len(self.row) - stop)
            return self.whole[max(0, end - (stop - start)) : end]
        if start == 0:
            return self.probe.full([self.row[:stop]])[0]
        return torch.cat([self.probe.full([self.row[: t + 1]])[0, -1:] for t in range(start, stop)])


def real_outputs(probe: Probe, logits_BMV: Tensor, mask_BT: Tensor, b: int) -> Tensor:
    """Return row b's outputs at its real tokens, `[n, V]`."""
    M, real = logits_BMV.shape[1], int(mask_BT[b].sum())
    if probe.adapter.aligned_at_end:
        return logits_BMV[b, M - min(M, real) :]
    return logits_BMV[b][mask_BT[b, -M:].to(logits_BMV.device)]


def _row(b: int, out_MV: Tensor, alone: _Alone, start: int, stop: int) -> Deltas:
    """Compare row b's outputs of its tokens from `start` to before `stop` with those that it has alone."""
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
"""What each kind of case compares."""


BUDGET = 150
"""Cases tried at most."""


def shrink(case: Case, failing: Callable[[Case], bool], budget: int = BUDGET) -> Case:
    """Return the last of a row of ever smaller failing cases: none of its smaller ones fails, or the budget is out."""
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
    """Yield smaller cases, the smallest first: fewer rows, shorter ones (halves, then less), fewer changed tokens."""
    if case.kind == "batch":
        yield from _smaller_batch(case)
    elif len(case.tokens) > 1:
        for b, row in enumerate(case.tokens):
            changed = (case.changed[b],) if case.changed else ()
            yield replace(case, tokens=(row,), changed=changed, columns=min(case.columns, len(row) + 1))
    yield from _SMALLER.get(case.kind, _shorter)(case)


def _cuts(length: int, least: int) -> Iterator[int]:
    """Yield how many of `length` tokens to leave out: half of them, then ever fewer, at least `least` staying."""
    cut = length // 2
    while cut:
        if length - cut >= least:
            yield cut
        cut //= 2


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    return tuple(row[start:stop] for row in rows)


def _shorter(case: Case, least: int = 1) -> Iterator[Case]:
    """Yield the case without its last tokens, or its first."""
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
    """Yield it without the last pieces; with the first ones as one; with smaller ones."""
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
    """Yield it with one row, one padding token, fewer tokens and pieces."""
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
