"""The checks that compare logits: each tries cases, and makes the shortest of one that fails.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from subquad.evaluation.audit._case import Case, Deltas, Rows, compare, fails, limit
from subquad.evaluation.audit._probe import Probe, Refused
from subquad.evaluation.audit._shrink import shrink
from subquad.evaluation.audit.report import Check, Verdict

NO_LEAK = "the outputs depend on later tokens (causality), so this comparison means nothing"
NO_TRUNCATION = "the outputs change where later tokens are left out (truncation), so this comparison means nothing"
NO_BATCH = "the outputs change with the rest of the batch (batch), so this comparison means nothing"


@dataclass
class Audited:
    """What the checks of one audit share."""

    probe: Probe
    band: float
    lengths: list[int]
    """That the model takes, rising."""
    tokens: int
    """The longest of them that is not there for the model's own sizes."""
    sizes: list[int]
    """The model's own windows, segments and chunks."""
    source: Tokens
    batch: int
    dtype: str
    rows: Rows
    """A batch, on which the band was measured."""
    checks: list[Check] = field(default_factory=list)

    def verdict(self, name: str) -> Verdict:
        """Of a check that is done."""
        return next(check.verdict for check in self.checks if check.name == name)

    def skip(self, name: str, reason: str) -> None:
        """Note a check that isn't done."""
        self.checks.append(Check(name, "not checked", reason))

    def meaningless(self) -> str | None:
        """Why lengths and batches can't be compared, where a check has found so."""
        reasons = {"causality": NO_LEAK, "truncation": NO_TRUNCATION, "batch": NO_BATCH}
        return next((why for name, why in reasons.items() if self.verdict(name) == "violation"), None)

    def within(self, case: Case, worst: float) -> bool:
        """Whether rounding explains a difference; what seems too large is held beside the rounding of its own input."""
        if case.kind != "finite" and math.isfinite(worst) and worst > self.band:
            narrowest = self.probe.narrowest(self.rows)
            self.band = max(self.band, *(self.probe.band([row], narrowest, 0)[0] for row in case.tokens))
        return worst <= limit(case.kind, self.band)

    def failing(self, case: Case) -> bool:
        """Whether a case fails."""
        return fails(self.probe, case, self.band)


class Tokens:
    """Random tokens, or pieces of a text."""

    def __init__(self, vocab_size: int, seed: int, text: Sequence[int] | None) -> None:
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(seed)
        self.text = None if text is None else [int(token) for token in text]
        if self.text is not None and not self.text:
            raise ValueError("text must hold at least one token, got none; leave it out for random tokens")
        if self.text is not None and not all(0 <= token < vocab_size for token in self.text):
            raise ValueError(
                f"text must hold tokens between 0 and {vocab_size - 1}, got {min(self.text)} to {max(self.text)}"
            )

    def row(self, length: int) -> tuple[int, ...]:
        """One sequence; of a text from a random place on, and from its beginning again after its end."""
        if self.text is not None:
            start = int(torch.randint(len(self.text), (), generator=self.generator))
            return tuple(self.text[(start + i) % len(self.text)] for i in range(length))
        return tuple(torch.randint(self.vocab_size, (length,), generator=self.generator).tolist())

    def rows(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        """Several."""
        return tuple(self.row(length) for _ in range(batch))

    def other(self, row: Sequence[int]) -> tuple[int, ...]:
        """A different token in each place."""
        steps = torch.randint(1, self.vocab_size, (len(row),), generator=self.generator).tolist()
        return tuple((token + step) % self.vocab_size for token, step in zip(row, steps, strict=True))


def finite(audited: Audited) -> bool:
    """Logits at every length and of a batch; False where any is not finite, and then nothing else is checked."""
    cases = [Case("finite", (audited.source.row(T),), dtype=audited.dtype) for T in audited.lengths]
    cases.append(Case("finite", audited.rows, dtype=audited.dtype))
    done = f"lengths {listed(audited.lengths)}; a batch of {len(audited.rows)}"
    return judge(audited, "finite", cases, done) != "violation"


def repeatable(audited: Audited) -> bool:
    """The same call twice; False where they differ by more than rounding."""
    case = Case("repeatable", audited.source.rows(2, audited.tokens), dtype=audited.dtype)
    verdict = judge(audited, "repeatable", [case], f"{audited.tokens} tokens, twice", bits="bits differ between calls")
    return verdict != "violation"


def judge(
    audited: Audited, name: str, cases: Iterable[Case], done: str, *, bits: str | None = None, places: str = ""
) -> Verdict:
    """Try all cases and note the check; returns its verdict.

    `done` says what was tried, `places` what positions are. With `bits`, logits that are not the same bits although
    within the band make a finding.
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
        audited.skip(name, refused[0] if refused else "there is no length to try it on")
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
    """The line of a fault: where it begins, how large it is, and its shortest input."""
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
    """In words which logits of an output are not finite."""
    logits_BMV = probe.full(case.tokens)
    logits_V = logits_BMV[where["row"], where["output"] - len(case.tokens[0])]
    tokens = (~logits_V.isfinite()).nonzero().flatten().tolist()
    values = " or ".join(sorted({str(logits_V[token].item()) for token in tokens}))
    among = f" in a batch of {len(case.tokens)}" if len(case.tokens) > 1 else ""
    return f"is not finite{among}: {values} for {len(tokens)} of {len(logits_V)} tokens ({listed(tokens)})"


def _how(case: Case) -> str:
    """In words what a short case does."""
    if case.kind == "cache":
        return f" when they come in pieces of {listed(case.pieces, 12)}"
    if case.kind == "padding":
        after = f", then pieces of {listed(case.pieces, 12)}" if case.pieces else ""
        return f" with {case.columns - len(case.tokens[0]) + sum(case.pieces)} of padding on the {case.side}{after}"
    if case.kind == "truncation":
        return f" where only {case.keep} stay"
    if case.kind == "batch":
        return f" in a batch of {len(case.tokens)}"
    return ""


def truncation(audited: Audited) -> None:
    """f(x[:n]) against f(x)[:n] for every length that the model takes."""
    if audited.verdict("causality") == "violation":
        audited.skip("truncation", NO_LEAK)
        return
    # A model may have outputs for its last tokens alone: then up to the longest sequence where all have one.
    whole = [T for T in audited.lengths if audited.probe.full([[0] * T]).shape[1] == T]
    cases = []
    usual = [T for T in whole if audited.tokens >= T]
    for T in {*usual[-1:], *whole[-1:]}:
        row = audited.source.row(T)
        shorter = {n for n in (*audited.lengths, 1, T // 2, T - 1) if 0 < n < T}
        cases += [Case("truncation", (row,), keep=n, dtype=audited.dtype) for n in sorted(shorter)]
    done = f"{len(cases)} cuts of up to {whole[-1] if whole else 0} tokens"
    if len(whole) < len(audited.lengths):
        done += "; of longer sequences only the last tokens have outputs"
    judge(audited, "truncation", cases, done)


def cached(audited: Audited) -> None:
    """Decoding token by token, then in pieces of several."""
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
    for s in audited.sizes:  # across the borders of the model's own segments
        singles.append((max(1, s - 2), 1, 1, 1, 1))
        several += [(max(1, s - 3), 5, 4), (s, 2), (s + 1, s, 3), (max(1, s - 1), 2, 2 * s)]
    for name, patterns in zip(names, (singles, several), strict=True):
        fitting = [pieces for pieces in patterns if most is None or sum(pieces) <= most]
        cases = [Case("cache", audited.source.rows(2, sum(p)), pieces=p, dtype=audited.dtype) for p in fitting]
        end = max((sum(pieces) for pieces in fitting), default=0)
        done = f"{len(cases)} ways to cut up to {end} tokens" + _without_positions(audited, cases[:1])
        judge(audited, name, cases, done)


def padding(audited: Audited) -> None:
    """Left and right, with two tokens in the padding; then on with the cache after left padding."""
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
    """What a model that takes position_ids does without them, as text; nothing where it does the same."""
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
    """Rows of a batch against the rows alone, and in another order."""
    rows = audited.source.rows(audited.batch, audited.tokens)
    alone = Case("batch", rows, dtype=audited.dtype)
    cases = [alone, replace(alone, order=tuple(range(audited.batch))[::-1])]
    judge(audited, "batch", cases, f"{audited.batch} sequences of {audited.tokens} tokens: each alone, and reversed")


def listed(numbers: Sequence[Any], most: int = 8) -> str:
    """`1, 2, 3`; long lists with their middle left out."""
    words = [str(number) for number in numbers]
    if len(words) > most:
        words = [*words[: most - 2], "...", words[-1]]
    return ", ".join(words)


def size(number: float) -> str:
    """A difference in words."""
    return f"{number:.2g}" if number < float("inf") else "infinity or NaN"
