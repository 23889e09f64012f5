"""Which keys a query may see: a predicate (`allowed`, the truth) and key ranges that cover it (what makes it cheap).

Positions are absolute and count real tokens only.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """The base of all patterns: a frozen dataclass of whole numbers.

    `key_range` must cover `allowed`. Patterns are equal when their fields are, and `key` names one in a string.
    """

    causal: ClassVar[bool] = True
    """Whether no query sees a later key."""
    anchored: ClassVar[bool] = False
    """Whether the keys stand at fixed places, far from the queries: a tile then reads all that it is given."""
    scattered: ClassVar[bool] = False
    """Whether the ranges of neighbouring tiles lie anywhere: their keys are then gathered."""
    may_be_zero: ClassVar[tuple[str, ...]] = ()
    """Fields whose smallest value is 0; that of the others is 1."""
    registry: ClassVar[dict[str, type[Pattern]]] = {}
    _key: ClassVar[str]

    def __init_subclass__(cls) -> None:
        Pattern.registry[cls.__name__] = cls

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{type(self).__name__}.{field.name} must be an int, got {value!r}")
            least = 0 if field.name in self.may_be_zero else 1
            if value < least:
                raise ValueError(f"{type(self).__name__}.{field.name} must be at least {least}, got {value}")
        # As repr has it, which torch.compile cannot trace.
        values = ", ".join([f"{field.name}={getattr(self, field.name)}" for field in fields(self)])
        object.__setattr__(self, "_key", f"{type(self).__name__}({values})")

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Bool, by broadcasting: may the query at `q_pos` see the key at `k_pos`?"""
        raise NotImplementedError(f"{type(self).__name__} must define allowed (Pattern is abstract)")

    @property
    def reach(self) -> int | None:
        """The farthest that a query may look before itself, in tokens; None: without bound."""
        return None

    @property
    def ahead(self) -> int | None:
        """The farthest that a query may look after itself, in tokens; None: without bound."""
        return 0 if self.causal else None

    @property
    def folded(self) -> tuple[int, Pattern] | None:
        """`(d, inner)` where a query sees keys of its own residue modulo d alone, by `inner` on position // d."""
        return None

    @property
    def columns(self) -> tuple[int, int] | None:
        """`(size, last)`, where only the keys in the last `last` places of each `size` are ever seen (by `Ranks`)."""
        return None

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Half-open range of keys that the queries in `[q_start, q_stop)` may see; None: up to the last key."""
        lo = 0 if self.reach is None else max(0, q_start - self.reach)
        return lo, None if self.ahead is None else q_stop + self.ahead

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """Where `[q_start, q_stop)` is cut: queries of one tile share a key range.

        A tile of c queries reads c + reach + ahead keys: where that is bounded, tiles have 16 to 128 queries.
        """
        if self.reach is None or self.ahead is None:
            return [q_start]
        return multiples(max(16, min(128, self.reach + self.ahead + 1)), q_start, q_stop)

    @property
    def period(self) -> int:
        """Moving queries and keys by this many tokens changes nothing, but for keys before the first."""
        return 1

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """Whether every query of the range surely sees every key of the range: then no mask is needed."""
        return False

    def is_triangle(self, start: int, stop: int) -> bool:
        """Whether the block of queries and keys in `[start, stop)` is surely plainly causal: then no mask is needed."""
        return False

    def key(self) -> str:
        """The pattern as a string, which `from_key` reads: operations of torch take strings, not patterns."""
        return self._key

    @staticmethod
    @functools.lru_cache(maxsize=512)
    def from_key(key: str) -> Pattern:
        """Return the pattern that `key` names, also in a process that has not made it (a compiled graph from a cache).

        Raises `ValueError` for an unknown one.
        """
        name, _, arguments = key.partition("(")
        if name not in Pattern.registry:
            raise ValueError(f"unknown pattern {key!r}; valid: {', '.join(sorted(Pattern.registry))}")
        return Pattern.registry[name](**{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", arguments)})


def multiples(step: int, start: int, stop: int, offset: int = 0) -> list[int]:
    """`start`, then the numbers up to `stop` that are `offset` more than a multiple of `step`."""
    return [start, *range(start + step - (start - offset) % step, stop, step)]
