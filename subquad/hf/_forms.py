"""Which mechanisms a transformers model can run on its own queries, keys and values: their options and patterns."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from subquad.attention import build, names
from subquad.attention.bigbird import Bigbird
from subquad.attention.blocked import BlockedAttention
from subquad.attention.longformer import Longformer
from subquad.config import suggest
from subquad.ops.patterns import Pattern

PREFIX = "subquad_"

OPTIONS: dict[str, tuple[str, ...]] = {
    "bigbird": ("block", "back", "num_global", "num_random", "seed"),
    "dilated": ("width", "dilation"),
    "full": (),
    "llp": ("segment", "shifted_heads"),
    "longformer": ("width", "num_global"),
    "shifted": ("group",),
    "strided": ("stride", "kind", "columns"),
    "window": ("width",),
}
"""The mechanisms without parameters of their own, and those of their options that ask for none."""

MOST = {"num_random": 1024, "seed": 2**32 - 1}
"""The largest values of options that a file may ask for, where other than 2**31 - 1; each random block is a pattern."""


class Part(NamedTuple):
    """Neighbouring query heads that attend alike: to the union of disjoint `patterns`."""

    heads: int
    patterns: tuple[Pattern, ...]


def check_mechanism(name: str) -> None:
    """Raise `ValueError` where a model's own queries, keys and values do not suffice for the mechanism `name`."""
    if name in OPTIONS:
        return
    if name in names():
        raise ValueError(
            f"attention {name!r} has parameters of its own, which a transformers model has no place for: convert the "
            f"model with `subquad convert`; as an attention implementation there are {', '.join(OPTIONS)}"
        )
    raise ValueError(f"unknown attention {name!r}; {suggest(name, OPTIONS)}")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an option that the implementation `name` does not have."""
    for option in options:
        if option not in OPTIONS[name]:
            raise ValueError(
                f"attention {name!r} has no option {option!r} as an attention implementation; "
                f"valid: {', '.join(OPTIONS[name]) or 'none'}"
            )


def parts_of(name: str, num_heads: int, options: Mapping[str, Any]) -> tuple[Part, ...]:
    """The patterns of `num_heads` query heads, in the order of the heads.

    Raises `ValueError` and `TypeError` for a mechanism, an option or a value that does not fit.
    """
    check_mechanism(name)
    check_options(name, options)
    for option, value in options.items():
        if not isinstance(value, int | str):
            raise TypeError(f"option {option!r} of {name!r} must be a whole number, a bool or a word, got {value!r}")
        most = MOST.get(option, 2**31 - 1)
        if isinstance(value, int) and value > most:
            raise ValueError(f"option {option!r} of {name!r} must be at most {most:,}, got {value:,}")
    # With their types: True is no 1 here.
    return _parts(name, num_heads, tuple((option, value, type(value)) for option, value in options.items()))


@functools.lru_cache(maxsize=64)
def _parts(name: str, num_heads: int, options: tuple[tuple[str, int | str, type], ...]) -> tuple[Part, ...]:
    values: dict[str, Any] = {option: value for option, value, _ in options}
    with torch.device("meta"):  # its projections are not needed
        layer = build(name, dim=2 * num_heads, num_heads=num_heads, **values)
    assert isinstance(layer, BlockedAttention)
    if isinstance(layer, Bigbird):
        return (Part(num_heads, tuple(layer.union(0))),)
    if isinstance(layer, Longformer):
        return (Part(num_heads, (*layer.patterns, layer.far)),)
    heads = layer.heads_of(layer.patterns)
    return tuple(Part(n, (pattern,)) for n, pattern in zip(heads, layer.patterns, strict=True))
