"""Checks that compare logits: each tries several cases and shortens the first that fails.

Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.evaluation.audit.case import Case, Deltas, Rows, compare, delta, differing, fails, limit, shrink
from subquad.evaluation.audit.probe import Probe, Refused, Tokens
from subquad.evaluation.audit.report import Check, Verdict

NO_LEAK = "the outputs depend on later tokens (causality), so this comparison means nothing"
NO_TRUNCATION = "the outputs change if later tokens are left out (truncation), so this comparison means nothing"
NO_BATCH = "the outputs change with the rest of the batch (batch), so this comparison means nothing"


@dataclass
class Audited:
    """The state that the checks of one audit share."""

    probe: Probe
    band: float
    lengths: list[int]
    """Lengths that the model takes, ascending, at least one and all of two tokens or more."""
    tokens: int
    """Longest tested length, excluding model-specific sizes."""
    sizes: list[int]
    """The model's windows, segments and chunks."""
    source: Tokens
    batch: int
    dtype: str
    rows: Rows
    """The batch on which the band was measured."""
    checks: list[Check] = field(default_factory=list)

    def verdict(self, name: str) -> Verdict:
        """Return the verdict of a finished check."""
        return next(check.verdict for check in self.checks if check.name == name)

    def skip(self, name: str, reason: str) -> None:
        """Record a check as not checked."""
        self.checks.append(Check(name, "not checked", reason))

    def meaningless(self) -> str | None:
        """Return why an earlier violation makes comparing lengths and batches meaningless, or None."""
        reasons = {"causality": NO_LEAK, "truncation": NO_TRUNCATION, "batch": NO_BATCH}
        return next((why for name, why in reasons.items() if self.verdict(name) == "violation"), None)

    def within(self, case: Case, worst: float) -> bool:
        """Return whether rounding explains the difference `worst`; above the band, measure it on `case` too."""
        if case.kind != "finite" and math.isfinite(worst) and worst > self.band:
            narrowest = self.probe.narrowest(self.rows)
            self.band = max(self.band, *(self.probe.band([row], narrowest, 0)[0] for row in case.tokens))
        return worst <= limit(case.kind, self.band)

    def failing(self, case: Case) -> bool:
        """Return whether a case fails."""
        return fails(self.probe, case, self.band)


def finite(audited: Audited) -> bool:
    """Check the logits at every length and of a batch; return whether all are finite."""
    cases = [Case("finite", (audited.source.row(T),), dtype=audited.dtype) for T in audited.lengths]
    cases.append(Case("finite", audited.rows, dtype=audited.dtype))
    done = f"lengths {listed(audited.lengths)}; a batch of {len(audited.rows)}"
    return judge(audited, "finite", cases, done) != "violation"


def repeatable(audited: Audited) -> bool:
    """Make the same call twice; return whether the logits agree up to rounding."""
    case = Case("repeatable", audited.source.rows(2, audited.tokens), dtype=audited.dtype)
    verdict = judge(audited, "repeatable", [case], f"{audited.tokens} tokens, twice", bits="bits differ between calls")
    return verdict != "violation"


def judge(audited: Audited, name: str, cases: Iterable[Case], done: str, *, bits: str | None = None) -> Verdict:
    """Try all cases, record the check and return its verdict.

    `done` describes what was tried. With `bits`, logits within the band that aren't bitwise equal are a finding.
    """
    worst, refused, tried = 0.0, list[str](), 0
    broken: tuple[Case, Deltas] | None = None
    for case in cases:
        try:
            found = compare(audited.probe, case)
        except Refused as error:
            refused.append(str(error))
            continue
        tried += 1
        worst = max(worst, found.worst)
        if broken is None and not audited.within(case, found.worst):
            broken = case, found
    if not tried:
        audited.skip(name, refused[0] if refused else "the model takes no length to try it on")
        return "not checked"
    if broken:
        audited.checks.append(violation(audited, name, done, worst, *broken))
        return "violation"
    detail = done + (f"; the model refuses some: {refused[0]}" if refused else "")
    verdict: Verdict = "pass"
    if bits and worst:
        verdict, detail = "finding", f"{detail}; {bits}, within rounding"
    audited.checks.append(Check(name, verdict, detail, worst))
    return verdict


def violation(audited: Audited, name: str, done: str, worst: float, case: Case, found: Deltas) -> Check:
    """Return the check of a violation: its place, its size and its shortest input found."""
    short = shrink(case, audited.failing)
    where = compare(audited.probe, short).first(limit(short.kind, audited.band))
    length = max(len(row) for row in short.tokens)
    where |= {"length": length, "first_length": max(len(row) for row in case.tokens)}
    at = f"output {where['output']} of {length} tokens is off by {size(where['size'])}{_how(short)}"
    if short.kind == "finite":
        at = f"the output at {where['output']} of {length} tokens {not_finite(audited.probe, short, where)}"
    worst = max(worst, where["worst"])
    return Check(name, "violation", f"{at} (shortest input found; {done})", worst, where, short.to_dict())


def not_finite(probe: Probe, case: Case, where: dict[str, Any]) -> str:
    """Describe which logits of an output are not finite."""
    logits_BMV = probe.full(case.tokens)
    logits_V = logits_BMV[where["row"], where["output"] - len(case.tokens[0])]
    tokens = (~logits_V.isfinite()).nonzero().flatten().tolist()
    values = " or ".join(sorted({str(logits_V[token].item()) for token in tokens}))
    among = f" in a batch of {len(case.tokens)}" if len(case.tokens) > 1 else ""
    return f"is not finite{among}: {values} for {len(tokens)} of {len(logits_V)} tokens ({listed(tokens)})"


def _how(case: Case) -> str:
    """Describe the comparison of a shortened case."""
    if case.kind == "cache":
        return f" when they come in pieces of {listed(case.pieces, 12)}"
    if case.kind == "padding":
        after = f", then pieces of {listed(case.pieces, 12)}" if case.pieces else ""
        return f" with {case.columns - len(case.tokens[0]) + sum(case.pieces)} of padding on the {case.side}{after}"
    if case.kind == "truncation":
        return f" if only {case.keep} are kept"
    if case.kind == "batch":
        return f" in a batch of {len(case.tokens)}"
    return ""


def truncation(audited: Audited) -> None:
    """Compare f(x[:n]) with f(x)[:n] for every n that the model takes."""
    if audited.verdict("causality") == "violation":
        audited.skip("truncation", NO_LEAK)
        return
    # A model may have outputs only for its last tokens: then try lengths at which every token has one.
    whole = [T for T in audited.lengths if audited.probe.full([[0] * T]).shape[1] == T]
    cases = []
    usual = [T for T in whole if audited.tokens >= T]
    for T in {*usual[-1:], *whole[-1:]}:
        row = audited.source.row(T)
        shorter = {n for n in (*audited.lengths, 1, T // 2, T - 1) if 0 < n < T}
        cases += [Case("truncation", (row,), keep=n, dtype=audited.dtype) for n in sorted(shorter)]
    done = f"{len(cases)} cuts of up to {whole[-1] if whole else 0} tokens"
    if len(whole) < len(audited.lengths):
        done += "; in longer sequences only the last tokens have outputs"
    judge(audited, "truncation", cases, done)


def cached(audited: Audited) -> None:
    """Compare decoding with a full pass, token by token and in pieces of several tokens."""
    names = ("cache, one token", "cache, several tokens")
    reason = audited.meaningless() or audited.probe.adapter.no_cache(audited.probe.model)
    if reason:
        for name in names:
            audited.skip(name, reason)
        return
    T, longest = audited.tokens, audited.lengths[-1]
    half = max(1, T // 2)
    singles = [(1,) * min(T, 12), (half, *(1,) * min(T - half, 16))]
    several = [(half, 2), (half, 3, 2), (max(1, T // 3), 5, 3, 1, 8, 2), (half, 1, 4, 1, 3), (1, 2, 1, 5), (7,) * 5]
    several = [pieces for pieces in several if sum(pieces) <= longest]
    most = audited.probe.adapter.max_tokens(audited.probe.model)
    for s in audited.sizes:  # cut across and beside the boundaries of the model's own segments
        singles.append((max(1, s - 2), 1, 1, 1, 1))
        several += [(max(1, s - 3), 5, 4), (s, 2), (s + 1, s, 3), (max(1, s - 1), 2, 2 * s)]
    for name, patterns in zip(names, (singles, several), strict=True):
        fitting = [pieces for pieces in patterns if most is None or sum(pieces) <= most]
        cases = [Case("cache", audited.source.rows(2, sum(p)), pieces=p, dtype=audited.dtype) for p in fitting]
        end = max((sum(pieces) for pieces in fitting), default=0)
        done = f"{len(cases)} ways to cut up to {end} tokens" + _without_positions(audited, cases[:1])
        judge(audited, name, cases, done)


def padding(audited: Audited) -> None:
    """Check padding on the left and on the right with several pad tokens, then decoding after left padding."""
    adapter, model = audited.probe.adapter, audited.probe.model
    reason = audited.meaningless() or adapter.no_padding(model)
    after = reason or adapter.no_cache(model)
    passed = " and ".join(adapter.passed(model))
    for side in ("left", "right"):
        if reason:
            audited.skip(f"padding {side}", reason)
            continue
        cases = _padding_cases(audited, side, ())
        judge(audited, f"padding {side}", cases, f"{passed} passed" + _without_positions(audited, cases))
    name = "padding left, then cache"
    if after:
        audited.skip(name, after)
        return
    if audited.verdict("padding left") == "violation":
        audited.skip(name, "left padding itself changes real tokens (padding left)")
        return
    several = audited.verdict("cache, several tokens") == "pass"
    pieces = [(1, 1, 1), (2, 3)] if several else [(1, 1, 1)]
    cases = [case for p in pieces for case in _padding_cases(audited, "left", p)]
    done = f"{passed} passed; pieces of {' and '.join(listed(p) for p in pieces)}"
    judge(audited, name, cases, done if several else f"{done}; several at once left out (cache, several tokens)")


def _padding_cases(audited: Audited, side: str, pieces: tuple[int, ...]) -> list[Case]:
    T, source, after = audited.tokens, audited.source, sum(pieces)
    lengths = sorted({max(1, T - 5), T, max(1, T // 2), max(1, T - 1)} - {0})
    rows = tuple(source.row(max(1, length - after) + after) for length in lengths)
    columns = max(len(row) for row in rows) - after
    fills = (0, source.vocab_size - 1, source.vocab_size // 2)
    return [Case("padding", rows, side=side, columns=columns, fills=fills, pieces=pieces, dtype=audited.dtype)]


def _without_positions(audited: Audited, cases: Sequence[Case]) -> str:
    """Return, as text, how far logits move without position_ids; empty if they don't or the model takes none."""
    adapter = audited.probe.adapter
    if "position_ids" not in adapter.passed(audited.probe.model):
        return ""
    adapter.positions = False
    try:
        off = max(compare(audited.probe, case).worst for case in cases)
    except Refused:
        return ""
    finally:
        adapter.positions = True
    return f"; without position_ids off by {size(off)}" if off > audited.band else ""


def batch(audited: Audited) -> None:
    """Compare the rows of a batch with each row alone, and with the rows in reverse order."""
    rows = audited.source.rows(audited.batch, audited.tokens)
    alone = Case("batch", rows, dtype=audited.dtype)
    cases = [alone, replace(alone, order=tuple(range(audited.batch))[::-1])]
    judge(audited, "batch", cases, f"{audited.batch} sequences of {audited.tokens} tokens: each alone, and reversed")


def listed(numbers: Sequence[Any], most: int = 8) -> str:
    """Join as `1, 2, 3`, leaving out the middle of long lists."""
    words = [str(number) for number in numbers]
    if len(words) > most:
        words = [*words[: most - 2], "...", words[-1]]
    return ", ".join(words)


def size(number: float) -> str:
    """Format a difference."""
    return f"{number:.2g}" if number < float("inf") else "infinity or NaN"


ENTRIES = 2**24
"""Most logits of one forward pass here."""
MOST_CUTS = 64
"""Most positions n tried at one length."""


class Leak(NamedTuple):
    """The largest change of an earlier output at one length."""

    length: int
    size: float
    case: Case


def causality(audited: Audited) -> None:
    """Change all tokens from n on, for many n at every length: outputs before n should keep their bits.

    Changes within the band are a finding, beyond it a violation, which lists the outputs that each single token moves.
    """
    leaks, worst, alone = list[Leak](), 0.0, True
    for T in audited.lengths:
        for _ in range(2 if audited.tokens == T else 1):
            found = _leak(audited, T, together=alone)
            broken = not audited.within(found.case, found.size)
            if broken and alone and not audited.failing(found.case):
                alone = False  # rows influence each other: from here on one at a time
                found = _leak(audited, T, together=False)
                broken = not audited.within(found.case, found.size)
            worst = max(worst, found.size)
            if broken:
                leaks.append(found)
                break
    done = f"lengths {listed(audited.lengths, 16)}"
    if leaks:
        audited.checks.append(_violation(audited, leaks))
    elif worst and audited.verdict("repeatable") == "pass":
        detail = f"{done}; bits of some outputs change with later tokens, within rounding"
        audited.checks.append(Check("causality", "finding", detail, worst))
    else:
        same = "no bit of an earlier output changes" if not worst else "bits change as between equal calls"
        audited.checks.append(Check("causality", "pass", f"{done}; {same}", worst))


def _leak(audited: Audited, length: int, together: bool) -> Leak:
    """Return the largest change of an earlier output at one length, over all positions n."""
    row = audited.source.row(length)
    changes = [row[:n] + audited.source.other(row[n:]) for n in cuts(length, audited.sizes)]
    size_BT = changed_outputs(audited.probe, row, changes, None if together else 1)
    b = int(size_BT.amax(1).argmax())
    case = Case("causality", (row,), (changes[b],), dtype=audited.dtype)
    return Leak(length, size_BT.max().item(), case)


def cuts(length: int, sizes: Sequence[int]) -> list[int]:
    """Return positions n: all of them, or for long inputs a sample that includes multiples of the model's sizes."""
    if length <= MOST_CUTS:
        return list(range(1, length))
    near = {k * s + d for s in sizes for k in range(1, length // s + 1) for d in (-1, 0, 1)}
    even = set(range(1, length, max(1, length // 16)))
    chosen = sorted(n for n in near | even | {1, length - 1} if 0 < n < length)
    return chosen[:: -(-len(chosen) // MOST_CUTS)]


def changed_outputs(
    probe: Probe, row: tuple[int, ...], changes: Sequence[tuple[int, ...]], at_once: int | None = None
) -> Tensor:
    """Return `[changes, T]`: how far each change moves each output before its first changed token, else 0.

    Both passes read `at_once` rows (None: as many as fit), since only equal shapes give equal bits for equal inputs.
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


def _violation(audited: Audited, leaks: list[Leak]) -> Check:
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
    later = differing(short.tokens[0], short.changed[0])
    length = len(short.tokens[0])
    where |= {"token": later[0], "tokens": later, "distance": later[0] - where["output"], "length": length}
    where |= {"lengths": [leak.length for leak in leaks], "first_length": len(row)}
    where |= {"pairs": [list(pair) for pair in pairs[:64]], "pairs_in_all": len(pairs)}
    at = f"output {where['output']} changes with token {listed(later)}, {where['distance']} later, by "
    at += f"{size(where['size'])} in {length} tokens (shortest input found)"
    among = f"lengths that leak: {listed(where['lengths'])} of {listed(audited.lengths, 16)}"
    many = f"; at {len(row)} tokens {len(pairs)} pairs of an output and one later token" if pairs else ""
    worst = max(leak.size for leak in leaks)
    return Check("causality", "violation", f"{at}; {among}{many}", worst, where, short.to_dict())


def dependencies(audited: Audited, row: tuple[int, ...], other: tuple[int, ...]) -> list[tuple[int, int, float]]:
    """Return `(output, later token, change)`, sorted, for every output that changes with a single later token."""
    T = len(row)
    places = range(1, T) if T <= 4 * MOST_CUTS else cuts(T, audited.sizes)
    changes = [(*row[:t], other[t], *row[t + 1 :]) for t in places]
    size_BT = changed_outputs(audited.probe, row, changes)
    found = [(int(t), places[b], size_BT[b, t].item()) for b, t in (size_BT > audited.band).nonzero().tolist()]
    return sorted(found)


def _other(audited: Audited, row: tuple[int, ...], t_in: int, t_out: int) -> int:
    """Return a token that, put at `t_in`, changes output `t_out`."""
    for step in range(1, min(8, audited.source.vocab_size)):
        token = (row[t_in] + step) % audited.source.vocab_size
        changed = (*row[:t_in], token, *row[t_in + 1 :])
        if changed_outputs(audited.probe, row, [changed])[0, t_out] > audited.band:
            return token
    return (row[t_in] + 1) % audited.source.vocab_size


BF16_BUDGET = 40
"""Most cases tried while shrinking an input that isn't finite in bfloat16."""


def bf16(make: Callable[[], Probe], source: Tokens, tokens: int, most: int | None, narrower: list[int]) -> Check:
    """Check a long input in bfloat16: logits that aren't finite are a violation, an error of the model a finding."""
    if not tokens:
        return Check("bf16", "not checked", "long is 0")
    length = tokens if most is None else min(tokens, most)
    try:
        probe = make()
    except Refused as error:
        return Check("bf16", "finding", f"the model can't be converted to bfloat16: {error}")
    refused = ""
    for n in (length, *reversed(narrower)):  # a model may take certain lengths only
        if n > length:
            continue
        case = Case("finite", (source.row(n),), dtype="bfloat16")
        try:
            found = compare(probe, case)
        except Refused as error:
            refused = refused or str(error)
            continue
        if found.worst == 0:
            return Check("bf16", "pass", f"{n:,} tokens: all logits are finite", None, {"length": n})
        short = shrink(case, lambda smaller: fails(probe, smaller, 0.0), BF16_BUDGET)
        where = {**compare(probe, short).first(0.0), "length": len(short.tokens[0]), "first_length": n}
        what = not_finite(probe, short, where)
        detail = f"output {where['output']} of {where['length']:,} tokens {what}; tried: {n:,} tokens"
        return Check("bf16", "violation", detail, None, where, short.to_dict())
    return Check("bf16", "finding", f"the model does not run in bfloat16: {refused}")
