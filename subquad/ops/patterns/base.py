"""Base of patterns: a predicate (`allowed`, the definition) and key ranges that cover it (for speed).

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
    """Base of all patterns: a frozen dataclass of integers.

    `key_range` must cover `allowed`. Patterns are equal if their fields are; `key` writes one as a string.
    """

    causal: ClassVar[bool] = True
    """True if no query sees a later key."""
    anchored: ClassVar[bool] = False
    """True if the keys are at fixed positions for all queries: a tile then reads all keys that it is given."""
    scattered: ClassVar[bool] = False
    """True if the key ranges of neighbouring tiles are not adjacent: their keys are then gathered."""
    may_be_zero: ClassVar[tuple[str, ...]] = ()
    """Fields whose smallest value is 0; for the others it is 1."""
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
        # The same as repr, which torch.compile cannot trace.
        values = ", ".join([f"{field.name}={getattr(self, field.name)}" for field in fields(self)])
        object.__setattr__(self, "_key", f"{type(self).__name__}({values})")

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return bool, by broadcasting: the query at `q_pos` may see the key at `k_pos`."""
        raise NotImplementedError(f"{type(self).__name__} must define allowed (Pattern is abstract)")

    @property
    def reach(self) -> int | None:
        """Tokens that a query may look back at most; None: unbounded."""
        return None

    @property
    def nearest(self) -> int:
        """Tokens that a query looks back at least: with fewer keys at hand it sees none."""
        return 0

    @property
    def ahead(self) -> int | None:
        """Tokens that a query may look ahead at most; None: unbounded."""
        return 0 if self.causal else None

    @property
    def folded(self) -> tuple[int, Pattern] | None:
        """`(d, inner)` if queries see only keys of their residue modulo d, by `inner` on position // d; else None."""
        return None

    @property
    def columns(self) -> tuple[int, int] | None:
        """`(size, last)` if only the last `last` keys of each `size` are ever seen (by `Ranks`); else None."""
        return None

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Return the range `[lo, hi)` of keys that queries in `[q_start, q_stop)` may see; hi None: to the last key."""
        reach, ahead = self.reach, self.ahead
        return 0 if reach is None else max(0, q_start - reach), None if ahead is None else q_stop + ahead

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """Return the starts of the tiles of `[q_start, q_stop)`; queries of one tile share a key range.

        A tile of c queries reads c + reach + ahead keys: if that is bounded, tiles have 16 to 128 queries.
        """
        if self.reach is None or self.ahead is None:
            return [q_start]
        return multiples(max(16, min(128, self.reach + self.ahead + 1)), q_start, q_stop)

    @property
    def period(self) -> int:
        """Number of tokens by which queries and keys can be shifted together without changing the pattern."""
        return 1

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """Return True only if every query of the range sees every key of the range: then no mask is needed."""
        return False

    def is_triangle(self, start: int, stop: int) -> bool:
        """Return True only if the queries and keys in `[start, stop)` see one another causally: no mask is needed."""
        return False

    def key(self) -> str:
        """Return the pattern as a string for `from_key`: torch operators take strings, not patterns."""
        return self._key

    @staticmethod
    @functools.lru_cache(maxsize=512)
    def from_key(key: str) -> Pattern:
        """Return the pattern of `key`, even in a process that never made it; `ValueError` for an unknown pattern."""
        name, _, arguments = key.partition("(")
        if name not in Pattern.registry:
            raise ValueError(f"unknown pattern {key!r}; valid: {', '.join(sorted(Pattern.registry))}")
        return Pattern.registry[name](**{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", arguments)})


def multiples(step: int, start: int, stop: int, offset: int = 0) -> list[int]:
    """Return `start`, then the numbers below `stop` that are `offset` more than a multiple of `step`."""
    return [start, *range(start + step - (start - offset) % step, stop, step)]
