"""Mechanisms that are sums of branches, which can be closed one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import nn

from subquad.config import suggest


class Branched(nn.Module):
    """A mechanism that sums `branches`; `closed` ones have weight zero, and the weights of the open ones sum to one.

    Closed branches still update their states, so that branches can be closed and opened between any two tokens.
    """

    name: ClassVar[str]
    branches: ClassVar[tuple[str, ...]] = ()
    """Names of the branches."""
    closed: frozenset[str] = frozenset()
    """Branches whose weight is zero now; `without` sets it."""

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Close these branches inside a `with` block; restore the previous ones after it.

        Raises `ValueError` for an unknown branch, and if no branch would stay open.
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
