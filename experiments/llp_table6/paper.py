"""The attention costs that the LLP paper prints, beside what its mechanisms really cost.

Mahmood and Huang 2024, arXiv:2412.06106: Table 6 has the numbers, Table 8 the formulas. Both count score entries of the
attention of all layers and heads for one sequence, half of it history and half latents (h = m = n / 2).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from experiments.llp_table6.claims import CLAIMS, COMPARISONS, Claim


@dataclass(frozen=True)
class Setting:
    """The sizes that the counts depend on; the defaults are those of the paper's tables."""

    tokens: int = 4096
    """n, of which half is history."""
    layers: int = 48
    """l."""
    heads: int = 24
    """H."""
    segment: int = 256
    """s: of V2's history, of LLP (two halves of c = s / 2), and the group and window of the comparisons."""
    projection: int = 256
    """p: rows of V3's projected history."""

    def __post_init__(self) -> None:
        for name in ("tokens", "layers", "heads", "segment", "projection"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % 2:
            raise ValueError(
                f"heads must be even (S2, a comparison, moves the groups of half of them), got {self.heads}"
            )
        if self.segment % 2:
            raise ValueError(f"segment must be even (LLP halves it), got {self.segment}")
        if self.tokens % (2 * self.segment):
            raise ValueError(
                f"tokens must be a multiple of 2 x segment (V2 cuts the history, half of the tokens, into segments), "
                f"got tokens={self.tokens}, segment={self.segment}"
            )

    def value(self, formula: str) -> int:
        """What a formula over n, l, H, s and p gives."""
        names = {"n": self.tokens, "l": self.layers, "H": self.heads, "s": self.segment, "p": self.projection}
        result = _value(ast.parse(formula, mode="eval").body, names)
        assert result.denominator == 1, formula
        return int(result)


class Row(NamedTuple):
    """One mechanism, evaluated: the printed millions (None where the paper prints none) and counts of entries."""

    name: str
    printed_millions: int | None
    printed_percent: int | None
    table_8: int | None
    table_6: int | None
    dense: int
    dense_percent: float
    unmasked: int
    unmasked_percent: float
    table_8_formula: str | None
    table_6_formula: str | None
    dense_formula: str
    unmasked_formula: str
    right: bool | None
    note: str


def rows(setting: Setting) -> Iterator[Row]:
    """The table's six rows, then the comparisons; percentages are of full attention, dense and unmasked apart."""
    dense, unmasked = (setting.value(formula) for formula in (CLAIMS[0].dense, CLAIMS[0].unmasked))
    printed = setting == Setting()
    for entry in (*CLAIMS, *COMPARISONS):
        claim = entry if isinstance(entry, Claim) else None
        own, own_unmasked = setting.value(entry.dense), setting.value(entry.unmasked)
        yield Row(
            name=entry.name,
            printed_millions=claim.millions if claim and printed else None,
            printed_percent=claim.percent if claim and printed else None,
            table_8=setting.value(claim.table_8) if claim else None,
            table_6=setting.value(claim.table_6) if claim else None,
            dense=own,
            dense_percent=100 * own / dense,
            unmasked=own_unmasked,
            unmasked_percent=100 * own_unmasked / unmasked,
            table_8_formula=claim.table_8 if claim else None,
            table_6_formula=claim.table_6 if claim else None,
            dense_formula=entry.dense,
            unmasked_formula=entry.unmasked,
            right=claim.right if claim else None,
            note=entry.verdict if isinstance(entry, Claim) else entry.note,
        )


HEADERS = (
    "millions of score entries",
    "Table 6",
    "by Table 8",
    "as Table 6 counts",
    "true, computed",
    "of full",
    "true, allowed",
    "of full, allowed",
)


def title(setting: Setting) -> str:
    """The setting in a line."""
    return (
        f"Mahmood and Huang 2024 (arXiv:2412.06106): n = {setting.tokens} tokens, half of them history, "
        f"l = {setting.layers} layers, H = {setting.heads} heads, s = {setting.segment}, p = {setting.projection}"
    )


def cells(row: Row) -> tuple[str, ...]:
    """A row under `HEADERS`."""

    def millions(number: int | None) -> str:
        return "" if number is None else f"{number / 10**6:,.2f}"

    printed = "" if row.printed_millions is None else f"{row.printed_millions:,} ({row.printed_percent}%)"
    return (
        row.name,
        printed,
        millions(row.table_8),
        millions(row.table_6),
        millions(row.dense),
        f"{row.dense_percent:.2f}%",
        millions(row.unmasked),
        f"{row.unmasked_percent:.2f}%",
    )


def notes(row: Row) -> Iterator[str]:
    """The verdict, then the formulas that differ from one another."""
    yield row.note
    if row.table_8_formula is not None and not row.right:
        yield f"  Table 8 prints       {row.table_8_formula}"
        yield f"  Table 6 comes from   {row.table_6_formula}"
    yield f"  computed             {row.dense_formula}"
    yield f"  allowed              {row.unmasked_formula}"


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def _value(node: ast.expr, names: dict[str, int]) -> Fraction:
    """An arithmetic expression, exactly."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.Name):
        return Fraction(names[node.id])
    assert isinstance(node, ast.Constant)
    return Fraction(str(node.value))
