"""Compare the attention costs printed in the LLP paper with the true ones.

Mahmood and Huang 2024, arXiv:2412.06106: Table 6 has the numbers, Table 8 the formulas. Both count score entries over
all layers and heads for one sequence, half history and half latents (h = m = n / 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import sympy

from experiments.llp_table6.formulas import COMPARISONS, PRINTED


@dataclass(frozen=True)
class Setting:
    """The sizes that the counts depend on: n, l, H, s and p. The defaults are those of the paper's tables."""

    tokens: int = 4096
    layers: int = 48
    heads: int = 24
    segment: int = 256
    """s: segments of V2's history and of LLP, and the groups and windows of the comparisons."""
    projection: int = 256
    """p: rows of V3's projected history."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.heads % 2:
            raise ValueError(f"heads must be even (S2 moves the groups of half of them), got {self.heads}")
        if self.segment % 2:
            raise ValueError(f"segment must be even (LLP halves it), got {self.segment}")
        if self.tokens % (2 * self.segment):
            raise ValueError(
                f"tokens must be a multiple of 2 x segment (V2 cuts half of the tokens into segments), "
                f"got tokens={self.tokens}, segment={self.segment}"
            )

    def value(self, formula: str) -> int:
        """Return the exact value of a formula over n, l, H, s and p."""
        names = {"n": self.tokens, "l": self.layers, "H": self.heads, "s": self.segment, "p": self.projection}
        result = sympy.sympify(formula).subs(names)
        assert result.is_integer, formula
        return int(result)


class Row(NamedTuple):
    """Counts of one mechanism, and the paper's printed numbers (None if it prints none)."""

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
    """Yield the table's six rows, then the comparisons; percentages are relative to full attention's same count."""

    def value(formula: str | None) -> int | None:
        return None if formula is None else setting.value(formula)

    printed = setting == Setting()
    dense, unmasked = setting.value(PRINTED[0].dense), setting.value(PRINTED[0].unmasked)
    for of in (*PRINTED, *COMPARISONS):
        own, own_unmasked = setting.value(of.dense), setting.value(of.unmasked)
        yield Row(
            name=of.name,
            printed_millions=of.millions if printed else None,
            printed_percent=of.percent if printed else None,
            table_8=value(of.table_8),
            table_6=value(of.table_6),
            dense=own,
            dense_percent=100 * own / dense,
            unmasked=own_unmasked,
            unmasked_percent=100 * own_unmasked / unmasked,
            table_8_formula=of.table_8,
            table_6_formula=of.table_6,
            dense_formula=of.dense,
            unmasked_formula=of.unmasked,
            right=of.right,
            note=of.note,
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
    """Return the setting as one line."""
    return (
        f"Mahmood and Huang 2024 (arXiv:2412.06106): n = {setting.tokens} tokens, half of them history, "
        f"l = {setting.layers} layers, H = {setting.heads} heads, s = {setting.segment}, p = {setting.projection}"
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row under `HEADERS`."""

    def millions(number: int | None) -> str:
        return "" if number is None else f"{number / 10**6:,.2f}"

    printed = "" if row.printed_millions is None else f"{row.printed_millions:,} ({row.printed_percent}%)"
    counts = (row.table_8, row.table_6, row.dense)
    percents = f"{row.dense_percent:.2f}%", f"{row.unmasked_percent:.2f}%"
    return row.name, printed, *map(millions, counts), percents[0], millions(row.unmasked), percents[1]


def notes(row: Row) -> Iterator[str]:
    """Yield the verdict, then the formulas."""
    yield row.note
    if row.table_8_formula is not None and not row.right:
        yield f"  Table 8 prints       {row.table_8_formula}"
        yield f"  Table 6 comes from   {row.table_6_formula}"
    yield f"  computed             {row.dense_formula}"
    yield f"  allowed              {row.unmasked_formula}"
