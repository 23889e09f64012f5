"""One comparison of logits that should be equal: the form in which a fault is found, made short, kept and replayed.

Shape letters: B batch, T tokens, M outputs, V vocabulary, N positions compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.evaluation.audit._probe import Probe, Refused, wide
from subquad.evaluation.audit._valid import check_case

Rows = tuple[tuple[int, ...], ...]


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
        """Plain values; what is empty is left out."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """What `to_dict` wrote; `ValueError` for anything else."""
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
            check_case(case)
            return case
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"this is no failing input of an audit: {error}") from error


class Deltas(NamedTuple):
    """The largest difference over the vocabulary at each position that was compared."""

    size_N: Tensor
    """Float64; infinite where either logit is not finite and they are not the same."""
    row_N: Tensor
    position_N: Tensor
    """Of the token after which the output stands, in its row."""

    @property
    def worst(self) -> float:
        """The largest; 0 where nothing was compared."""
        return self.size_N.max().item() if self.size_N.numel() else 0.0

    def first(self, band: float) -> dict[str, Any]:
        """Where the differences beyond the band begin, and the largest of them."""
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
    """The differences in one case; `Refused` where the model does not take an input."""
    return COMPARE[case.kind](probe, case)


def limit(kind: str, band: float) -> float:
    """What a difference of this kind may be: the band; of what is to be finite nothing, since rounding has no part."""
    return 0.0 if kind == "finite" else band


def fails(probe: Probe, case: Case, band: float) -> bool:
    """Whether a difference is beyond the band; a case that the model does not take does not fail."""
    try:
        return not compare(probe, case).worst <= limit(case.kind, band)
    except Refused:
        return False


def delta(a_BMV: Tensor, b_BMV: Tensor) -> Tensor:
    """`[B, M]`: the largest difference over the vocabulary, 0 where all is equal, infinite for NaN."""
    a, b = wide(a_BMV), wide(b_BMV)
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).amax(-1)


def positions(size_BM: Tensor, tokens: int | Sequence[int]) -> Deltas:
    """Deltas of the last M tokens of rows of so many tokens."""
    B, M = size_BM.shape
    lengths = [tokens] * B if isinstance(tokens, int) else list(tokens)
    position_BM = torch.tensor(lengths)[:, None] - M + torch.arange(M)
    return Deltas(size_BM.flatten(), torch.arange(B).repeat_interleave(M), position_BM.flatten())


def join(parts: Sequence[Deltas]) -> Deltas:
    """All of them."""
    return Deltas(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _finite(probe: Probe, case: Case) -> Deltas:
    logits = probe.full(case.tokens)
    bad_BM = (~logits.isfinite()).any(-1).cpu()
    return positions(torch.where(bad_BM, torch.inf, 0.0).double(), len(case.tokens[0]))


def _repeatable(probe: Probe, case: Case) -> Deltas:
    return positions(delta(probe.full(case.tokens), probe.full(case.tokens)), len(case.tokens[0]))


def _causality(probe: Probe, case: Case) -> Deltas:
    found = positions(delta(probe.full(case.tokens), probe.full(case.changed)), len(case.tokens[0]))
    first_B = torch.tensor([first_change(a, b) for a, b in zip(case.tokens, case.changed, strict=True)])
    before = found.position_N < first_B[found.row_N]
    return Deltas(*(values[before] for values in found))


def first_change(row: Sequence[int], other: Sequence[int]) -> int:
    """The first position where two rows differ; their length where none does."""
    return next((t for t, (a, b) in enumerate(zip(row, other, strict=True)) if a != b), len(row))


def _truncation(probe: Probe, case: Case) -> Deltas:
    T = len(case.tokens[0])
    whole = probe.full(case.tokens)
    if whole.shape[1] < T:
        raise Refused(f"of {T} tokens only the last {whole.shape[1]} have outputs")
    part = probe.full([row[: case.keep] for row in case.tokens])
    return positions(delta(whole[:, : part.shape[1]], part), case.keep)


def _cache(probe: Probe, case: Case) -> Deltas:
    """The pieces' outputs against the full pass.

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
    """Tokens and mask `[B, columns]` of the rows, without those in `pieces`, padded with one token."""
    rows, masks = [], []
    after = sum(case.pieces)
    for row in case.tokens:
        real = row[: len(row) - after]
        padding = (fill,) * (case.columns - len(real))
        rows.append(padding + real if case.side == "left" else real + padding)
        hidden = (False,) * len(padding)
        masks.append(hidden + (True,) * len(real) if case.side == "left" else (True,) * len(real) + hidden)
    return torch.tensor(rows), torch.tensor(masks)


def _padding(probe: Probe, case: Case) -> Deltas:
    """Real tokens' outputs with padding against each row alone without any; then those of pieces after it."""
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
        """`[n, V]`, the last of the token before `stop`; n is `stop - start`, or less where there are fewer outputs."""
        if self.whole is not None:
            end = self.whole.shape[0] - (len(self.row) - stop)
            return self.whole[max(0, end - (stop - start)) : end]
        if start == 0:
            return self.probe.full([self.row[:stop]])[0]
        return torch.cat([self.probe.full([self.row[: t + 1]])[0, -1:] for t in range(start, stop)])


def real_outputs(probe: Probe, logits_BMV: Tensor, mask_BT: Tensor, b: int) -> Tensor:
    """Row b's outputs at its real tokens, `[n, V]`."""
    M, real = logits_BMV.shape[1], int(mask_BT[b].sum())
    if probe.adapter.aligned_at_end:
        return logits_BMV[b, M - min(M, real) :]
    return logits_BMV[b][mask_BT[b, -M:].to(logits_BMV.device)]


def _row(b: int, out_MV: Tensor, alone: _Alone, start: int, stop: int) -> Deltas:
    """Row b's outputs of its tokens from `start` to before `stop` against those that it has alone."""
    right_MV = alone.outputs(start, stop)
    n = min(out_MV.shape[0], right_MV.shape[0])
    found = positions(delta(out_MV[None, out_MV.shape[0] - n :], right_MV[None, right_MV.shape[0] - n :]), stop)
    return found._replace(row_N=torch.full_like(found.row_N, b))


def _batch(probe: Probe, case: Case) -> Deltas:
    T, together = len(case.tokens[0]), probe.full(case.tokens)
    if case.order:
        moved = probe.full([case.tokens[b] for b in case.order])
        return positions(delta(together[list(case.order)], moved), T)
    return positions(delta(together, torch.cat([probe.full([row]) for row in case.tokens])), T)


COMPARE = {
    "finite": _finite,
    "repeatable": _repeatable,
    "causality": _causality,
    "truncation": _truncation,
    "cache": _cache,
    "padding": _padding,
    "batch": _batch,
}
"""What each kind of case compares."""
