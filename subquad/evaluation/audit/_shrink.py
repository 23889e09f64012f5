"""A failing case made short: smaller ones are tried as long as one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from subquad.evaluation.audit._case import Case, Rows

BUDGET = 150
"""Cases tried at most."""


def shrink(case: Case, failing: Callable[[Case], bool], budget: int = BUDGET) -> Case:
    """The last of a row of ever smaller failing cases: none of its own smaller ones fails, or the budget is out."""
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
    """Smaller cases, the smallest first: fewer rows, shorter ones (halves, then less), fewer changed tokens."""
    if case.kind == "batch":
        yield from _batch(case)
    elif len(case.tokens) > 1:
        for b, row in enumerate(case.tokens):
            changed = (case.changed[b],) if case.changed else ()
            yield replace(case, tokens=(row,), changed=changed, columns=min(case.columns, len(row) + 1))
    yield from _SMALLER.get(case.kind, _shorter)(case)


def _cuts(length: int, least: int) -> Iterator[int]:
    """How many of so many tokens to leave out: half of them, then ever fewer, `least` staying."""
    cut = length // 2
    while cut:
        if length - cut >= least:
            yield cut
        cut //= 2


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    return tuple(row[start:stop] for row in rows)


def _shorter(case: Case, least: int = 1) -> Iterator[Case]:
    """Without its last tokens, or its first."""
    T = len(case.tokens[0])
    for cut in _cuts(T, least):
        yield replace(case, tokens=_cut(case.tokens, 0, T - cut), changed=_cut(case.changed, 0, T - cut))
        yield replace(case, tokens=_cut(case.tokens, cut, T), changed=_cut(case.changed, cut, T))


def _batch(case: Case) -> Iterator[Case]:
    if len(case.tokens) > 2:
        for b in range(len(case.tokens)):
            rows = case.tokens[:b] + case.tokens[b + 1 :]
            order = tuple(range(len(rows)))[::-1] if case.order else ()
            yield replace(case, tokens=rows, order=order)


def _causality(case: Case) -> Iterator[Case]:
    for shorter in _shorter(case, least=2):
        if shorter.tokens != shorter.changed:
            yield shorter
    row, other = case.tokens[0], case.changed[0]
    places = [t for t, (a, b) in enumerate(zip(row, other, strict=True)) if a != b]
    if len(places) > 1:
        for kept in (places[len(places) // 2 :], places[: len(places) // 2], *([t] for t in places)):
            yield replace(case, changed=(tuple(other[t] if t in kept else row[t] for t in range(len(row))),))


def _truncation(case: Case) -> Iterator[Case]:
    T = len(case.tokens[0])
    for cut in _cuts(T - case.keep, 1):
        yield replace(case, tokens=_cut(case.tokens, 0, T - cut))
    for cut in _cuts(case.keep, 1):
        yield replace(case, tokens=_cut(case.tokens, cut, T), keep=case.keep - cut)
        yield replace(case, tokens=_cut(case.tokens, 0, T - cut), keep=case.keep - cut)


def _cache(case: Case) -> Iterator[Case]:
    """Without the last pieces; with the first ones as one; with smaller ones."""
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


def _padding(case: Case) -> Iterator[Case]:
    """One row, one padding token, fewer tokens and pieces."""
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


_SMALLER = {"causality": _causality, "truncation": _truncation, "cache": _cache, "padding": _padding}
