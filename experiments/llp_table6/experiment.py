"""Exact counts for the LLP paper's Tables 6 and 8."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from experiments.harness.noise import FAILS, HOLDS
from experiments.harness.units import Unit
from experiments.llp_table6.paper import Setting, rows

MILLION = 10**6
COUNTS = {
    "printed": "printed (Table 6)",
    "printed_formula": "printed formula (Table 8)",
    "computed": "computed",
    "allowed": "allowed by the mask",
}


def run(unit: Unit) -> list[dict[str, Any]]:
    """Return a row per mechanism with millions of score entries, rounded down as in the paper."""
    return [
        {
            "mechanism": row.name,
            "printed": row.printed_millions,
            "printed_formula": None if row.table_8 is None else row.table_8 // MILLION,
            "computed": row.dense // MILLION,
            "computed_percent": round(row.dense_percent, 2),
            "allowed": row.unmasked // MILLION,
            "allowed_percent": round(row.unmasked_percent, 2),
        }
        for row in rows(Setting())
    ]


def claim_v3_above_v2(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Check that V3 computes more than V2, as printed."""
    count = {row["mechanism"]: row["computed"] for row in rows}
    return HOLDS if count["V3"] > count["V2"] else FAILS, f"{count['V3']:,} against {count['V2']:,} million"


def claim_v1_below_full(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Check that V1 has fewer allowed entries than causal full attention."""
    count = {row["mechanism"]: row["allowed"] for row in rows}
    return HOLDS if count["V1"] < count["Full"] else FAILS, f"{count['V1']:,} against {count['Full']:,} million"


def draw(figure: Figure, rows: list[dict[str, Any]]) -> None:
    """Draw four bars for each mechanism."""
    axis = figure.subplots()
    width = 0.8 / len(COUNTS)
    for number, (name, label) in enumerate(COUNTS.items()):
        places = [place + (number - 1.5) * width for place, row in enumerate(rows) if row[name] is not None]
        axis.bar(places, [row[name] for row in rows if row[name] is not None], width, label=label)
    axis.set_xticks(range(len(rows)), [row["mechanism"] for row in rows], rotation=30, ha="right")
    axis.set(title="n = 4,096, 48 layers, 24 heads, s = p = 256", ylabel="millions of score entries")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(frameon=False, fontsize=8)
