"""The formulas of the LLP paper's Tables 6 and 8, and the true ones (Mahmood and Huang 2024, arXiv:2412.06106).

Formulas count the score entries of all layers and heads for n tokens, half of them history, over the names n (tokens),
l (layers), H (heads), s (segment) and p (projected rows); ** is a power.
"""

from __future__ import annotations

from typing import NamedTuple


class Formulas(NamedTuple):
    """A mechanism's true counts, and the paper's where it has a row in the tables."""

    name: str
    dense: str
    """Entries that are computed, masked ones included."""
    unmasked: str
    """Entries that the mask leaves."""
    note: str
    """The verdict on the printed number, or what the mechanism is."""
    millions: int | None = None
    """Table 6, truncated to millions, at the paper's setting."""
    percent: int | None = None
    """Table 6, of full attention."""
    table_8: str | None = None
    """The formula that the paper prints."""
    table_6: str | None = None
    """The formula that gives the number that the paper prints."""
    right: bool | None = None
    """Whether the printed number counts the entries that are computed."""


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
        note="The printed number is right: it is the printed formula.",
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
        note="The printed number is right: it is the printed formula (Perceiver AR reads the history in layer 1).",
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
            "The printed number is right: it is the printed formula. But the history has no mask: of the entries that "
            "count, V1 has more than causal full attention."
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
            "The printed number is wrong, and it is not the printed formula: the square stands at the number of "
            "segments instead of their length. (n/2)/s segments of s x s entries are n/2 * s; Table 6 has "
            "((n/2)/s)**2 * s, Table 8 the same of all n tokens."
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
            "The printed number is wrong, and it is not the printed formula: the term of the first layer, n/2 * n, is "
            "counted again in each of the other layers. In the tables' own reading the first layer's latents see the "
            "whole history and the printed formula is right; in section 4.3, which the true counts here follow, "
            "every layer sees the p projected rows."
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
            "The printed number is wrong, and it is not the printed formula: of 2n/s half segments the first sees "
            "itself and the other 2n/s - 1 see s columns each. Table 6 counts 2n/s of these, one too many; "
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
        note="V3 as the tables read it: the latents of the first layer see the whole history.",
    ),
    Formulas(
        "S2",
        dense="(n*s - s**2/4) * l * H",
        unmasked="(n*(s + 1)/2 - s**2/8) * l * H",
        note="LongLoRA's shifted groups of s, the groups of half the heads moved by s/2, nothing wrapped around.",
    ),
    Formulas(
        "S2, wrapped",
        dense="n*s * l * H",
        unmasked="n*(s + 1)/2 * l * H",
        note="The same with the last s/2 tokens in one group with the first: LongLoRA's published form, which leaks.",
    ),
    Formulas(
        "Window",
        dense="n*s * l * H",
        unmasked="(s*(s + 1)/2 + (n - s)*s) * l * H",
        note="An exact sliding window of s tokens: each query and its own s columns.",
    ),
)
