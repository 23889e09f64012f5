"""The formulas of the LLP paper's Tables 6 and 8, and the correct ones (Mahmood and Huang 2024, arXiv:2412.06106).

A formula counts the score entries of all layers and heads for n tokens, half of them history, with l layers, H heads,
segment s and p projected rows.
"""

from __future__ import annotations

from typing import NamedTuple


class Formulas(NamedTuple):
    """A mechanism's true counts, and the paper's if it is in the tables."""

    name: str
    dense: str
    """Computed entries, including masked ones."""
    unmasked: str
    """Entries that the mask allows."""
    note: str
    """Verdict on the printed number, or a description of the mechanism."""
    millions: int | None = None
    """Number in Table 6: millions at the paper's setting, rounded down."""
    percent: int | None = None
    """Percentage of full attention in Table 6."""
    table_8: str | None = None
    """Formula printed in Table 8."""
    table_6: str | None = None
    """Formula that reproduces the number in Table 6."""
    right: bool | None = None
    """True if the printed number is that of the computed entries."""


PRINTED = (
    Formulas(
        "Full",
        millions=19327,
        percent=100,
        table_8="n**2 * l * H",
        table_6="n**2 * l * H",
        dense="n**2 * l * H",
        unmasked="n*(n + 1)/2 * l * H",
        right=True,
        note="The printed number is right and follows from the printed formula.",
    ),
    Formulas(
        "PAR",
        millions=4932,
        percent=25,
        table_8="(n/2 * n + (n/2)**2 * (l - 1)) * H",
        table_6="(n/2 * n + (n/2)**2 * (l - 1)) * H",
        dense="(n/2 * n + (n/2)**2 * (l - 1)) * H",
        unmasked="((n/2)**2 + n/2*(n/2 + 1)/2 * l) * H",
        right=True,
        note="The printed number is right and follows from the printed formula (the history is read in layer 1).",
    ),
    Formulas(
        "V1",
        millions=14495,
        percent=75,
        table_8="((n/2)**2 + n/2 * n) * l * H",
        table_6="((n/2)**2 + n/2 * n) * l * H",
        dense="((n/2)**2 + n/2 * n) * l * H",
        unmasked="((n/2)**2 + (n/2)**2 + n/2*(n/2 + 1)/2) * l * H",
        right=True,
        note=(
            "The printed number is right and follows from the printed formula. But the history has no mask, so V1 has "
            "more allowed entries than causal full attention."
        ),
    ),
    Formulas(
        "V2",
        millions=9682,
        percent=50,
        table_8="((n/s)**2 * s + n/2 * n) * l * H",
        table_6="(((n/2)/s)**2 * s + n/2 * n) * l * H",
        dense="((n/2)/s * s**2 + n/2 * n) * l * H",
        unmasked="((n/2)/s * s**2 + (n/2)**2 + n/2*(n/2 + 1)/2) * l * H",
        right=False,
        note=(
            "The printed number is wrong, and does not follow from the printed formula: the number of segments is "
            "squared instead of their length. (n/2)/s segments of s x s entries are n/2 * s; Table 6 has "
            "((n/2)/s)**2 * s, Table 8 the same for all n tokens."
        ),
    ),
    Formulas(
        "V3",
        millions=14858,
        percent=77,
        table_8="(n/2 * n + (n/2 * (p + n/2) + p**2) * (l - 1)) * H",
        table_6="(n/2 * n + n/2 * (p + n/2) + p**2) * (l - 1) * H",
        dense="(n/2 * (p + n/2) + p**2) * l * H",
        unmasked="(p**2 + n/2 * p + n/2*(n/2 + 1)/2) * l * H",
        right=False,
        note=(
            "The printed number is wrong, and does not follow from the printed formula: the term of the first layer, "
            "n/2 * n, is counted again in each of the other layers. According to the tables, the first layer's latents "
            "see the whole history, and then the printed formula is right; according to section 4.3, which the true "
            "counts here follow, every layer sees the p projected rows."
        ),
    ),
    Formulas(
        "LLP",
        millions=1226,
        percent=6,
        table_8="((n/s - 1) * s/2 * s + (s/2)**2) * l * H",
        table_6="(2*n/s * s/2 * s + (s/2)**2) * l * H",
        dense="((2*n/s - 1) * s/2 * s + (s/2)**2) * l * H",
        unmasked="((2*n/s - 1) * ((s/2)**2 + s/2*(s/2 + 1)/2) + s/2*(s/2 + 1)/2) * l * H",
        right=False,
        note=(
            "The printed number is wrong, and does not follow from the printed formula: of 2n/s half segments, the "
            "first sees itself and the other 2n/s - 1 see s columns each. Table 6 counts 2n/s of these, one too many; "
            "Table 8 counts n/s - 1, about half."
        ),
    ),
)
"""The six rows of Tables 6 and 8."""


COMPARISONS = (
    Formulas(
        "V3, full first",
        dense="(n/2 * n + (n/2 * (p + n/2) + p**2) * (l - 1)) * H",
        unmasked="((n/2)**2 + (n/2 * p + p**2) * (l - 1) + n/2*(n/2 + 1)/2 * l) * H",
        note="V3 according to the tables: the latents of the first layer see the whole history.",
    ),
    Formulas(
        "S2",
        dense="(n*s - s**2/4) * l * H",
        unmasked="(n*(s + 1)/2 - s**2/8) * l * H",
        note="LongLoRA's shifted groups of s, moved by s/2 for half of the heads, without wrapping around.",
    ),
    Formulas(
        "S2, wrapped",
        dense="n*s * l * H",
        unmasked="n*(s + 1)/2 * l * H",
        note="The same with the first and last s/2 tokens in one group: LongLoRA's published form, which leaks.",
    ),
    Formulas(
        "Window",
        dense="n*s * l * H",
        unmasked="(s*(s + 1)/2 + (n - s)*s) * l * H",
        note="A sliding window of s tokens: each query sees its own s columns.",
    ),
)
