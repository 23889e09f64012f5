"""Rows of states: one sequence's state put into a batch of others, and taken out again.

A tensor of a state is `[B, ...]`. Where sequences have read different numbers of tokens, some dimension of their
tensors may differ (keys and values still in reach); such tensors are aligned to the end, as a batch that has padding
leaves them, and what stands before the first token of a row is at a negative position, which nothing reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from subquad.state import State

Shapes = Mapping[str, "tuple[int, ...] | Shapes"]


COUNTS = ("seen", "start")
"""Numbers of a state that are of one sequence; the others are of the model."""


def shapes_of(state: State) -> Shapes:
    """The shapes of a state's tensors without the batch."""
    shapes: dict[str, tuple[int, ...] | Shapes] = {}
    for name, entry in state.entries.items():
        if isinstance(entry, State):
            shapes[name] = shapes_of(entry)
        elif isinstance(entry, Tensor):
            shapes[name] = tuple(entry.shape[1:])
    return shapes


def fitted(entry: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`entry` `[B, ...]` with another shape behind B: the last places of each dimension, or zeros before them."""
    for dim, size in enumerate(shape, 1):
        extra = size - entry.shape[dim]
        if extra < 0:
            entry = entry.narrow(dim, -extra, size)
        elif extra > 0:
            zeros = entry.new_zeros((*entry.shape[:dim], extra, *entry.shape[dim + 1 :]))
            entry = torch.cat([zeros, entry], dim)
    return entry


def fit(state: State, shapes: Shapes) -> State:
    """The state with tensors of these shapes."""
    entries: dict[str, Tensor | int | State] = {}
    for name, entry in state.entries.items():
        shape = shapes.get(name)
        if isinstance(entry, State) and isinstance(shape, Mapping):
            entries[name] = fit(entry, shape)
        elif isinstance(entry, Tensor) and isinstance(shape, tuple):
            entries[name] = fitted(entry, shape)
        else:
            entries[name] = entry
    return State(entries, state.config_hash)


def trimmed(shapes: Shapes, first: Shapes, seen: int) -> Shapes:
    """`shapes` with at most `seen` places in the dimensions that have another size after one token (`first`)."""
    found: dict[str, tuple[int, ...] | Shapes] = {}
    for name, shape in shapes.items():
        one = first.get(name)
        if isinstance(shape, tuple):
            sizes = one if isinstance(one, tuple) else shape
            found[name] = tuple(
                size if size == small else min(size, seen) for size, small in zip(shape, sizes, strict=True)
            )
        else:
            found[name] = trimmed(shape, one if isinstance(one, Mapping) else {}, seen)
    return found


def put(batch: State, row: Tensor, one: State) -> State:
    """The batch with the sequence `one` in a row (`[1]`, where the batch is); `batch` keeps its shapes and dtypes.

    What `one` does not hold, since it has read too much to need it, is zero.
    """
    entries: dict[str, Tensor | int | State] = {}
    for name, entry in batch.entries.items():
        new = one.entries.get(name)
        if isinstance(entry, State):
            entries[name] = put(entry, row, new if isinstance(new, State) else State({}))
        elif isinstance(entry, Tensor):
            source = _as_tensor(new, entry)
            entries[name] = entry.index_copy(0, row, fitted(source, tuple(entry.shape[1:])))
        else:
            entries[name] = entry
    return State(entries, batch.config_hash)


def row_of(batch: State, row: int) -> State:
    """The state of one row; its counts are whole numbers again."""
    entries: dict[str, Tensor | int | State] = {}
    for name, entry in batch.entries.items():
        if isinstance(entry, State):
            entries[name] = row_of(entry, row)
        elif isinstance(entry, Tensor):
            # A copy, so that one row does not keep the batch alive.
            entries[name] = int(entry[row]) if entry.ndim == 1 else entry[row : row + 1].clone()
        else:
            entries[name] = entry
    return State(entries, batch.config_hash)


def join(states: Sequence[State]) -> State:
    """A batch of the rows `states`, each of one sequence; where the counts of two differ, all become tensors `[B]`."""
    ragged = any(len({state.entries.get(name) for state in states}) > 1 for name in COUNTS)
    entries: dict[str, Tensor | int | State] = {}
    names = dict.fromkeys(name for state in states for name in state.entries)
    for name in names:
        found = [state.entries.get(name) for state in states]
        like = next(entry for entry in found if entry is not None)
        if isinstance(like, State):
            entries[name] = join(
                [entry if isinstance(entry, State) else State({}, like.config_hash) for entry in found]
            )
        elif isinstance(like, Tensor):
            rows = [_as_tensor(entry, like) for entry in found]
            shape = tuple(max(sizes) for sizes in zip(*(row.shape[1:] for row in rows), strict=True))
            entries[name] = torch.cat([fitted(row, shape) for row in rows])
        else:
            entries[name] = torch.tensor(found) if ragged and name in COUNTS else like
    return State(entries, states[0].config_hash)


def idle(state: State, active_B: Tensor) -> State:
    """The state with the counts `[B]` of rows that nobody uses at zero, so that they run into no limit."""
    return state.map(lambda x: x * active_B if x.ndim == 1 else x)


def _as_tensor(entry: Tensor | int | State | None, like: Tensor) -> Tensor:
    """One row: a tensor as it is, a number as `[1]`, nothing as zeros."""
    if isinstance(entry, Tensor):
        return entry.to(like.device, like.dtype)
    if entry is None:
        return like.new_zeros((1, *like.shape[1:]))
    assert isinstance(entry, int)
    return torch.tensor([entry], dtype=like.dtype, device=like.device)
