"""Which keys a query may see: a predicate (`allowed`, the truth) and key ranges that cover it (what makes it cheap).

Positions are absolute and count real tokens only. Shape letters: T queries, S keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """The base of all patterns: a frozen dataclass of whole numbers.

    `key_range` must cover `allowed`. Patterns are equal when their fields are, and `key` names one in a string.
    """

    causal: ClassVar[bool] = True
    """Whether no query sees a later key."""
    registry: ClassVar[dict[str, type[Pattern]]] = {}
    _key: ClassVar[str]

    def __init_subclass__(cls) -> None:
        Pattern.registry[cls.__name__] = cls

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{type(self).__name__}.{field.name} must be an int, got {value!r}")
            if value < self.least(field.name):
                raise ValueError(
                    f"{type(self).__name__}.{field.name} must be at least {self.least(field.name)}, got {value}"
                )
        # Made once, since torch.compile cannot trace a dataclass's repr.
        object.__setattr__(self, "_key", repr(self))

    def least(self, field: str) -> int:
        """The smallest valid value of a field."""
        return 1

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Bool, by broadcasting: may the query at `q_pos` see the key at `k_pos`?"""
        raise NotImplementedError(f"{type(self).__name__} must define allowed (Pattern is abstract)")

    @property
    def reach(self) -> int | None:
        """How far before itself a query may look at most, in tokens; None: without bound."""
        return None

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Half-open range of keys that the queries in `[q_start, q_stop)` may see; None: up to the last key."""
        return (0 if self.reach is None else max(0, q_start - self.reach)), (q_stop if self.causal else None)

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """Where `[q_start, q_stop)` is cut: queries of one tile share a key range."""
        return [q_start]

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
        """The pattern as a string, which `from_key` reads."""
        return self._key

    @staticmethod
    def from_key(key: str) -> Pattern:
        """The pattern that `key` names."""
        name, _, arguments = key.partition("(")
        if name not in Pattern.registry:
            raise ValueError(f"unknown pattern {key!r}; valid: {', '.join(sorted(Pattern.registry))}")
        return Pattern.registry[name](**{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", arguments)})


def _multiples(step: int, start: int, stop: int) -> list[int]:
    return [start, *range((start // step + 1) * step, stop, step)]


@dataclass(frozen=True)
class Full(Pattern):
    """Every key."""

    causal: ClassVar[bool] = False

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """All."""
        return torch.ones_like(q_pos == k_pos)

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Causal(Pattern):
    """The query's own token and every earlier one."""

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`k <= q`."""
        return k_pos <= q_pos

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """Where the keys end before the first query's successor."""
        return k_stop <= q_start + 1

    def is_triangle(self, start: int, stop: int) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Window(Pattern):
    """The last `width` tokens; the query's own counts."""

    width: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`q - width < k <= q`."""
        return (k_pos <= q_pos) & (q_pos - k_pos < self.width)

    @property
    def reach(self) -> int:
        """`width - 1` tokens."""
        return self.width - 1

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """Tiles of at most 128 queries, no smaller than 16: a tile of c queries reads c + width - 1 keys."""
        return _multiples(max(16, min(128, self.width)), q_start, q_stop)

    def is_triangle(self, start: int, stop: int) -> bool:
        """Where the block is no larger than the window."""
        return stop - start <= self.width


@dataclass(frozen=True)
class Segments(Pattern):
    """The query's own segment of `size` tokens, causally, and the `back` segments before it.

    `size` is LLP's half segment c = s / 2 (Mahmood and Huang 2024, arXiv:2412.06106, section 4.4).
    """

    size: int
    back: int = 1

    def least(self, field: str) -> int:
        """A segment has a token; `back` may be zero."""
        return 0 if field == "back" else 1

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`k <= q` and `k // size >= q // size - back`."""
        return (k_pos <= q_pos) & (k_pos // self.size >= q_pos // self.size - self.back)

    @property
    def reach(self) -> int:
        """`(back + 1) size - 1` tokens, from a segment's last query."""
        return (self.back + 1) * self.size - 1

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """From the start of the first query's earliest segment."""
        return max(0, q_start // self.size - self.back) * self.size, q_stop

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """One tile a segment."""
        return _multiples(self.size, q_start, q_stop)

    @property
    def period(self) -> int:
        """One segment."""
        return self.size

    def is_triangle(self, start: int, stop: int) -> bool:
        """Where the last query still sees the first key's segment."""
        return start // self.size >= (stop - 1) // self.size - self.back


@dataclass(frozen=True)
class Prefix(Pattern):
    """The first `length` tokens are seen by all (also by one another, both ways); the rest is causal.

    Perceiver AR's V1 treats its history so (arXiv:2412.06106, section 4.1).
    """

    causal: ClassVar[bool] = False
    length: int

    def least(self, field: str) -> int:
        """An empty prefix is plain causal attention."""
        return 0

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`k <= q` or `k < length`."""
        return (k_pos <= q_pos) | (k_pos < self.length)

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Up to the last query or the prefix's end."""
        return 0, max(q_stop, self.length)

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """The prefix's queries apart from the rest."""
        return [q_start, *([self.length] if q_start < self.length < q_stop else [])]

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """The prefix, or keys before the first query's successor."""
        return k_stop <= max(self.length, q_start + 1)

    def is_triangle(self, start: int, stop: int) -> bool:
        """After the prefix."""
        return start >= self.length


@dataclass(frozen=True)
class Suffix(Pattern):
    """Only queries from position `start` on exist, and they are causal; earlier rows see nothing and give zeros.

    Perceiver AR's first layer, drawn over the whole sequence: latents are the suffix (arXiv:2202.07765, section 3.1).
    """

    start: int

    def least(self, field: str) -> int:
        """A suffix from 0 is plain causal attention."""
        return 0

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`start <= q` and `k <= q`."""
        return (k_pos <= q_pos) & (q_pos >= self.start)

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Nothing for rows before `start`."""
        return 0, 0 if q_stop <= self.start else q_stop

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """The rows before `start` apart from the rest."""
        return [q_start, *([self.start] if q_start < self.start < q_stop else [])]

    def is_triangle(self, start: int, stop: int) -> bool:
        """In the suffix."""
        return start >= self.start
