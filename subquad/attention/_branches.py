"""Mechanisms whose output has more than one source: each can be closed, to see or to train what the others carry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import nn

from subquad.config import suggest


class Branched(nn.Module):
    """A mechanism with `branches`, of which `closed` ones have no weight: the open ones' weights sum to one.

    Each branch goes on reading: the state is the same whatever is closed, so a branch may be closed and opened between
    any two tokens.
    """

    name: ClassVar[str]
    branches: ClassVar[tuple[str, ...]] = ()
    """Names of the sources."""
    closed: frozenset[str] = frozenset()
    """Those that have no weight now; `without` sets it."""

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Close these branches within the block, and open those that were open before it.

        Raises `ValueError` for an unknown branch, and where none would stay open.
        """
        for name in names:
            if name not in self.branches:
                raise ValueError(f"attention {self.name!r} has no branch {name!r}; {suggest(name, self.branches)}")
        before, after = self.closed, self.closed | set(names)
        if after >= set(self.branches):
            raise ValueError(f"one branch of attention {self.name!r} must stay open, got {', '.join(sorted(after))}")
        self.closed = after
        try:
            yield
        finally:
            self.closed = before
