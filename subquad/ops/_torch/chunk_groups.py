"""Cut a sequence into groups of several chunks, which the engines compute in one call.

A call costs some microseconds, and torch uses several threads from 32,768 entries on, so that with one chunk per call
one of two cores would be idle. Only the states between chunks are computed one after another.

Shape letters: N batch times heads, T tokens, K channels, P chunks of a `ChunkGroup`, C rows of a chunk, M = P N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops._torch.log_space_sums import power_of_two

ENTRIES = 1 << 16
"""Most entries of a group's tensors, unless one chunk has more: enough for two threads, and few enough for a cache."""
MOST = 16
"""Most chunks of a group, which hold a state each."""


class ChunkGroup(NamedTuple):
    """`chunks` of `size` rows, tokens `start` to `stop`; zeros fill up a last, shorter chunk."""

    start: int
    stop: int
    chunks: int
    size: int
    first: int
    """Chunks before this group."""

    @property
    def places(self) -> slice:
        """Where its chunks are among all chunks."""
        return slice(self.first, self.first + self.chunks)

    def spans(self) -> list[slice]:
        """Return the tokens of each chunk."""
        return [slice(start, start + self.size) for start in range(self.start, self.stop, self.size)]

    def rows(self, x_NTK: Tensor) -> Tensor:
        """Return a view of the rows `[P, N, C, K]`, without any that fill up a chunk."""
        return x_NTK[:, self.start : self.stop].unflatten(1, (self.chunks, -1)).transpose(0, 1)

    def gather(self, x_NTK: Tensor) -> Tensor:
        """Return the rows `[M, C, K]`, all heads of a chunk side by side; a view if the group has one chunk."""
        x = x_NTK[:, self.start : self.stop]
        if self.chunks > 1:
            N, _, K = x.shape
            return x.reshape(N, self.chunks, self.size, K).transpose(0, 1).reshape(-1, self.size, K)
        missing = self.size - x.shape[1]
        return F.pad(x, (0, 0, 0, missing)) if missing else x

    def scatter(self, x_MCK: Tensor, target_NTK: Tensor) -> None:
        """Write the rows into their places, without those that filled up a chunk."""
        target = target_NTK[:, self.start : self.stop]
        if self.chunks > 1:
            N, _, K = target.shape
            target.view(N, self.chunks, self.size, K).copy_(x_MCK.view(self.chunks, N, self.size, K).transpose(0, 1))
        else:
            target.copy_(x_MCK[:, : target.shape[1]])

    def states_of(self, states: Tensor) -> Tensor:
        """Return the states of its chunks `[M, ...]`, from those of all chunks `[chunks, N, ...]`."""
        return states[self.places].flatten(0, 1)

    def states_before(self, end_NKV: Tensor, added_MKV: Tensor, decay: Tensor | None, into: Tensor) -> Tensor:
        """Return the state before each chunk `[M, K, V]`, in `into`; `end` moves from before the group to after it."""
        into[0].copy_(end_NKV)
        propagate([*into.unbind(), end_NKV], added_MKV, decay)
        return into.flatten(0, 1)

    def gradients_after(self, start_NKV: Tensor, added_MKV: Tensor, decay: Tensor | None) -> Tensor:
        """Return the state's gradient after each chunk `[M, K, V]`; `start` moves from after the group to before it."""
        into = added_MKV.new_empty(self.chunks, *start_NKV.shape)
        into[-1].copy_(start_NKV)
        propagate([start_NKV, *into.unbind()][::-1], added_MKV, decay, back=True)
        return into.flatten(0, 1)


def chunk_groups(x_NTK: Tensor, chunk: int, widest: int, *, whole: bool = False) -> list[ChunkGroup]:
    """Cut x into groups of chunks of `chunk` rows, for tensors of at most `widest` channels.

    If tokens are left over for a shorter chunk, it is a group of its own; with `whole` its rows are a power of two.
    """
    N, T = x_NTK.shape[:2]
    most = max(1, min(MOST, ENTRIES // max(1, N * chunk * widest)))
    full, left = divmod(T, chunk)
    groups = [
        ChunkGroup(first * chunk, min(first + most, full) * chunk, min(most, full - first), chunk, first)
        for first in range(0, full, most)
    ]
    if left:
        groups.append(ChunkGroup(full * chunk, T, 1, power_of_two(left) if whole else left, full))
    return groups


def propagate(into: Sequence[Tensor], added_MKV: Tensor, decay_MKV: Tensor | None, *, back: bool = False) -> None:
    """`into[n + 1] = decay[n] into[n] + added[n]`, over the chunks of a group, or their reverse if `back`."""
    step, count = -1 if back else 1, len(into) - 1
    added = added_MKV.view(count, *into[0].shape).unbind()[::step]
    if decay_MKV is None:
        for n, new in enumerate(added):
            torch.add(into[n], new, out=into[n + 1])
    else:
        decays = decay_MKV.view(count, len(into[0]), *decay_MKV.shape[1:]).unbind()[::step]
        for n, (new, decay) in enumerate(zip(added, decays, strict=True)):
            torch.addcmul(new, into[n], decay, out=into[n + 1])
