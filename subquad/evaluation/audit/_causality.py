"""Does any output depend on a later token: which, on which, by how much.

Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.evaluation.audit._case import Case, compare, delta
from subquad.evaluation.audit._checks import Audited, listed, size
from subquad.evaluation.audit._probe import Probe
from subquad.evaluation.audit._shrink import shrink
from subquad.evaluation.audit.report import Check

ENTRIES = 2**24
"""Logits that one pass may make here."""
MOST_CUTS = 64
"""Places in one length after which all tokens are changed."""


class Leak(NamedTuple):
    """What one length shows."""

    length: int
    size: float
    """The largest change."""
    case: Case


def causality(audited: Audited) -> None:
    """Change all tokens from n on, for many n at every length; outputs before n must keep their bits.

    Where they don't, the change is compared with the band. Of a leak: which outputs change with which single token.
    """
    leaks, tried = list[Leak](), [T for T in audited.lengths if T >= 2]
    if not tried:
        audited.skip("causality", "the model takes no sequence of two tokens or more")
        return
    worst, alone = 0.0, True
    for T in tried:
        for _ in range(2 if audited.tokens == T else 1):
            found = _leak(audited, T, together=alone)
            broken = not audited.within(found.case, found.size)
            if broken and alone and not audited.failing(found.case):
                alone = False  # the batch mixes its rows: one at a time from here on
                found = _leak(audited, T, together=False)
                broken = not audited.within(found.case, found.size)
            worst = max(worst, found.size)
            if broken:
                leaks.append(found)
                break
    done = f"lengths {listed(tried, 16)}"
    if leaks:
        audited.checks.append(_violation(audited, leaks, tried))
    elif worst and audited.verdict("repeatable") == "pass":
        detail = f"{done}; bits of some outputs change with later tokens, within rounding"
        audited.checks.append(Check("causality", "finding", detail, worst))
    else:
        same = "no bit of an earlier output changes" if not worst else "bits change as between equal calls"
        audited.checks.append(Check("causality", "pass", f"{done}; {same}", worst))


def _leak(audited: Audited, length: int, together: bool) -> Leak:
    """The largest change of an earlier output at one length, over all cuts."""
    row = audited.source.row(length)
    changes = [row[:n] + audited.source.other(row[n:]) for n in cuts(length, audited.sizes)]
    size_BT = changed_outputs(audited.probe, row, changes, None if together else 1)
    b = int(size_BT.amax(1).argmax())
    case = Case("causality", (row,), (changes[b],), dtype=audited.dtype)
    return Leak(length, size_BT.max().item(), case)


def cuts(length: int, sizes: Sequence[int]) -> list[int]:
    """Places from which tokens are changed: all, or some, those beside the model's own sizes among them."""
    if length <= MOST_CUTS:
        return list(range(1, length))
    near = {k * s + d for s in sizes for k in range(1, length // s + 1) for d in (-1, 0, 1)}
    even = set(range(1, length, max(1, length // 16)))
    chosen = sorted(n for n in near | even | {1, length - 1} if 0 < n < length)
    return chosen[:: -(-len(chosen) // MOST_CUTS)]


def changed_outputs(
    probe: Probe, row: tuple[int, ...], changes: Sequence[tuple[int, ...]], at_once: int | None = None
) -> Tensor:
    """`[changes, T]`: how far each change moves each output before its first changed token; 0 elsewhere.

    Both passes have the same shape, of `at_once` rows (None: as many as fit): equal inputs would give equal bits.
    """
    T, rows = len(row), len(changes)
    B = at_once or max(1, min(rows, ENTRIES // (T * max(1, probe.logits_seen))))
    before = probe.full([row] * B)
    found = torch.zeros(rows, T, dtype=torch.float64)
    for start in range(0, rows, B):
        part = list(changes[start : start + B])
        after = probe.full(part + [row] * (B - len(part)))
        M = after.shape[1]
        found[start : start + len(part), T - M :] = delta(before, after)[: len(part)]
    first = (torch.tensor(changes) != torch.tensor(row)).int().argmax(1)
    return found.masked_fill(torch.arange(T) >= first[:, None], 0.0)


def _violation(audited: Audited, leaks: list[Leak], tried: Sequence[int]) -> Check:
    first = leaks[0]
    row = first.case.tokens[0]
    pairs = dependencies(audited, row, audited.source.other(row))
    case = first.case
    if pairs:
        t_out, t_in, _ = pairs[0]
        changed = (*row[:t_in], _other(audited, row, t_in, t_out), *row[t_in + 1 :])
        case = Case("causality", (row,), (changed,), dtype=audited.dtype)
        case = case if audited.failing(case) else first.case
    short = shrink(case, audited.failing)
    where: dict[str, Any] = compare(audited.probe, short).first(audited.band)
    later = [t for t, (a, b) in enumerate(zip(short.tokens[0], short.changed[0], strict=True)) if a != b]
    length = len(short.tokens[0])
    where |= {"token": later[0], "tokens": later, "distance": later[0] - where["output"], "length": length}
    where |= {"lengths": [leak.length for leak in leaks], "first_length": len(row)}
    where |= {"pairs": [list(pair) for pair in pairs[:64]], "pairs_in_all": len(pairs)}
    at = f"output {where['output']} changes with token {listed(later)}, {where['distance']} later, by "
    at += f"{size(where['size'])} in {length} tokens (shortest input found)"
    among = f"lengths that leak: {listed(where['lengths'])} of {listed(tried, 16)}"
    many = f"; at {len(row)} tokens {len(pairs)} pairs of an output and one later token" if pairs else ""
    worst = max(leak.size for leak in leaks)
    return Check("causality", "violation", f"{at}; {among}{many}", worst, where, short.to_dict())


def dependencies(audited: Audited, row: tuple[int, ...], other: tuple[int, ...]) -> list[tuple[int, int, float]]:
    """`(output, later token, change)` of every pair that a change of this one token alone shows, outputs rising."""
    T = len(row)
    places = range(1, T) if T <= 4 * MOST_CUTS else cuts(T, audited.sizes)
    changes = [(*row[:t], other[t], *row[t + 1 :]) for t in places]
    size_BT = changed_outputs(audited.probe, row, changes)
    found = [(int(t), places[b], size_BT[b, t].item()) for b, t in (size_BT > audited.band).nonzero().tolist()]
    return sorted(found)


def _other(audited: Audited, row: tuple[int, ...], t_in: int, t_out: int) -> int:
    """A token at `t_in` that changes the output."""
    for step in range(1, min(8, audited.source.vocab_size)):
        token = (row[t_in] + step) % audited.source.vocab_size
        changed = (*row[:t_in], token, *row[t_in + 1 :])
        if changed_outputs(audited.probe, row, [changed])[0, t_out] > audited.band:
            return token
    return (row[t_in] + 1) % audited.source.vocab_size
