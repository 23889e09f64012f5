"""Whether a failing input that was read from a file can be one: its parts fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subquad.evaluation.audit._case import Case

LARGEST = 2**31 - 1
"""Token."""
MOST_COLUMNS = 1 << 20
"""Of a row with its padding; an audit writes some hundreds."""


def check_case(case: Case) -> None:
    """Raise `ValueError` for an input that no audit writes."""
    if not case.tokens or not all(case.tokens):
        raise ValueError(f"tokens must hold sequences of at least one token, got {list(map(list, case.tokens))}")
    for token in (*case.fills, *(token for row in (*case.tokens, *case.changed) for token in row)):
        if not 0 <= token <= LARGEST:
            raise ValueError(f"tokens must lie between 0 and {LARGEST}, got {token}")
    lengths = [len(row) for row in case.tokens]
    if case.kind != "padding" and len(set(lengths)) > 1:
        raise ValueError(f"sequences must have one length, got {lengths}")
    for name in ("keep", "columns"):
        if type(getattr(case, name)) is not int:
            raise ValueError(f"{name} must be a whole number, got {getattr(case, name)!r}")
    for size in case.pieces:
        if size < 1:
            raise ValueError(f"pieces must be at least 1, got {size}")
    if case.kind in _CHECKS:
        _CHECKS[case.kind](case, lengths)


def _causality(case: Case, lengths: list[int]) -> None:
    if [len(row) for row in case.changed] != lengths:
        raise ValueError(
            f"changed must hold sequences of the lengths of tokens, {lengths}, got {[len(row) for row in case.changed]}"
        )


def _truncation(case: Case, lengths: list[int]) -> None:
    if not 0 < case.keep <= lengths[0]:
        raise ValueError(f"keep must lie between 1 and the {lengths[0]} tokens, got {case.keep}")


def _cache(case: Case, lengths: list[int]) -> None:
    if sum(case.pieces) != lengths[0]:
        raise ValueError(f"pieces must add up to the {lengths[0]} tokens, got {list(case.pieces)}")


def _padding(case: Case, lengths: list[int]) -> None:
    after = sum(case.pieces)
    if case.side not in ("left", "right"):
        raise ValueError(f"side must be left or right, got {case.side!r}")
    if not case.fills:
        raise ValueError("fills must hold at least one token, got none")
    if min(lengths) <= after:
        raise ValueError(f"pieces must leave a token of each sequence before them, got {list(case.pieces)}")
    if case.columns > MOST_COLUMNS:
        raise ValueError(f"columns must be at most {MOST_COLUMNS}, got {case.columns}")
    if not max(lengths) - after <= case.columns:
        raise ValueError(
            f"columns must be at least {max(lengths) - after}, the longest sequence to pad, got {case.columns}"
        )


def _batch(case: Case, lengths: list[int]) -> None:
    if case.order and sorted(case.order) != list(range(len(lengths))):
        raise ValueError(f"order must have each of the {len(lengths)} sequences once, got {list(case.order)}")


_CHECKS = {"causality": _causality, "truncation": _truncation, "cache": _cache, "padding": _padding, "batch": _batch}
