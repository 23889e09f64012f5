"""The state of sequences that are decoded together: of static shapes, or of shapes that change.

A state's tensors are `[B, ...]`. If sequences have read different numbers of tokens, some dimension may differ (keys
and values within reach). Such tensors are aligned at their ends, as in a padded batch; entries before a row's first
token have negative positions, which no mechanism reads.

Shape letters: B slots, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from subquad.attention.conversions import from_static_cache, to_static_cache
from subquad.generation.recorded import flat, joined, split
from subquad.generation.static_step import StaticStep
from subquad.inference import device_of
from subquad.layers.attached import attached
from subquad.models import Decoder
from subquad.state import State, fitted


class BatchState(ABC):
    """The state of several sequences in slots, and what `next_tokens` asks of it; most forms read no guesses."""

    @abstractmethod
    def insert(self, slot: int, state: State | None) -> None:
        """Begin a sequence in an empty slot, with `state` or (None) before its first token."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Empty the slot."""

    @abstractmethod
    def state_of(self, slot: int) -> State:
        """Return the slot's state."""

    @abstractmethod
    def step(self, tokens: list[int]) -> Tensor:
        """Read one token in each slot (any in empty ones); return the next logits `[B, V]`."""

    @abstractmethod
    def bytes_of(self, slot: int) -> int:
        """Return the bytes of the slot's state."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of all states."""

    def guesses(self, slot: int, text: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow the slot's last one."""
        return []

    def read(self, tokens: list[list[int]]) -> Tensor:
        """Read a token of each slot and the guesses that follow it; return the logits after each, `[B, K, V]`."""
        return self.step([first for (first,) in tokens])[:, None]

    def take_back(self, wrong: Mapping[int, int]) -> None:  # noqa: B027  # nothing to do without guesses
        """Take back the last tokens of each slot that were read, by their number."""


class StaticBatchState(BatchState):
    """One state `[B, ...]` of constant shapes, a row for each slot; an empty slot reads tokens without effect.

    A row depends on itself alone, because kernels of a constant shape treat all rows alike. A state that grows is
    allocated for `capacity` tokens; a sequence may not be longer. With `record` the first step records its operations
    and later steps run them. It is not recorded if a module has a hook, an adapter or the like, which act when the
    module is called (attach them before the first step), or if an operation depends on values. With `compile` the
    recorded operations are compiled.
    """

    def __init__(
        self, model: Decoder, slots: int, capacity: int, *, compile: bool = False, record: bool = True
    ) -> None:
        self._model, self._capacity = model, capacity
        self._first, blank = self._blanks()
        self._shapes = shapes_of(blank)
        self._blank = row_of(blank, 0)
        self._like = State.cat([self._blank] * slots).with_counts_by_row()
        self._tensors = split(self._like)
        self._bytes = self._like.nbytes
        self._device = device_of(model)
        self._active_B = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._refused = partial(attached, model) if record else partial(str, "it is switched off")
        self._step = StaticStep(flat(self._forward, self._like), self._refused, compile=compile)
        self._steps = [self._step]

    def insert(self, slot: int, state: State | None) -> None:
        """Begin a sequence in an empty slot, with `state` or (None) before its first token."""
        self._write_row(slot, self._blank if state is None else self._static(state), 1)

    def clear(self, slot: int) -> None:
        """Empty the slot and overwrite its sequence's state."""
        self._write_row(slot, self._blank, 0)

    def state_of(self, slot: int) -> State:
        """Return a copy of the slot's state without the entries before its first token."""
        return self._usual(row_of(joined(self._like, self._tensors), slot))

    def _usual(self, state: State) -> State:
        """Return the state of a row as the model returns it."""
        state = self._model.change_layers(state, from_static_cache)
        return fit(state, trimmed(self._shapes, self._first, int(state.seen)))

    def step(self, tokens: list[int]) -> Tensor:
        """Read one token in each slot (any in empty ones) in one forward pass; return the next logits, `[B, V]`."""
        return self._read(torch.tensor(tokens, dtype=torch.long, device=self._device)[:, None])

    def step_in_place(self, tokens_B1: Tensor) -> Tensor:
        """Step with tokens `[B, 1]` on the device; the state keeps its tensors, so that a CUDA graph can replay it."""
        tensors = self._tensors
        logits_BV = self._read(tokens_B1)
        _write(tensors, self._tensors)
        self._tensors = tensors
        return logits_BV

    def _read(self, tokens_B1: Tensor) -> Tensor:
        logits_BV, *after = self._step(tokens_B1, self._active_B, self._tensors)
        self._keep(after)
        return logits_BV

    def _keep(self, after: list[Tensor]) -> None:
        """Make `after` the state."""
        if any(step.is_replayed for step in self._steps):
            _write(self._tensors, after)  # a replayed step reads its state from these tensors alone
        else:
            self._tensors = after

    def bytes_of(self, slot: int) -> int:
        """Return the bytes of one slot, the same for all."""
        return self._bytes // len(self._active_B)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slots, which do not change."""
        return self._bytes

    def _forward(self, tokens_B1: Tensor, active_B: Tensor, state: State) -> tuple[Tensor, State]:
        """Return logits and a contiguous state: other strides than those of a new row would compile the step again."""
        logits_B1V, state = self._model(tokens_B1, state)
        return logits_B1V[:, -1], self._static_after(state, active_B)

    def _static_after(self, state: State, active_B: Tensor) -> State:
        # The count of an empty slot stays zero, so that it never reaches a limit of positions.
        return fit(state, self._shapes).map(lambda x: x * active_B if x.ndim == 1 else x.contiguous())

    def _static(self, state: State) -> State:
        return self._model.change_layers(state, partial(to_static_cache, capacity=self._capacity))

    def _write_row(self, slot: int, state: State, active: int) -> None:
        write_row(joined(self._like, self._tensors), slot, state)
        self._active_B[slot] = active

    def _blanks(self) -> tuple[Shapes, State]:
        """Return the shapes of one token's state, and an empty state of one row in its final shapes."""
        tokens, state = 2, self._after_padding(1)
        first = shapes_of(state)
        while shapes_of(longer := self._after_padding(tokens)) != shapes_of(state):
            if self._model.state_grows:
                return first, self._after_padding(self._capacity)
            tokens, state = 2 * tokens, longer
        return first, state

    @torch.no_grad()
    def _after_padding(self, tokens: int) -> State:
        """Return the state after a row of padding alone: no content, in the shapes that `tokens` tokens leave."""
        tokens_BT = torch.zeros(1, tokens, dtype=torch.long, device=device_of(self._model))
        state = self._model.hidden(tokens_BT, None, torch.zeros_like(tokens_BT, dtype=torch.bool))[1]
        return self._static(row_of(state, 0))


def _write(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        if value is not tensor:
            tensor.copy_(value)


class DynamicBatchState(BatchState):
    """A state whose shapes change: one of all sequences, split into one of each where a sequence joins or leaves."""

    def __init__(self, model: Decoder, slots: int) -> None:
        self._model = model
        self._states: dict[int, State | None] = {}
        self._joint: State | None = None
        """State of all sequences, in the order of their slots; None while each has its own."""
        self._vocab_size, self._dtype = model.config.vocab_size, next(model.parameters()).dtype
        self._slots = slots

    def insert(self, slot: int, state: State | None) -> None:
        """Begin a sequence in an empty slot, with `state` or (None) before its first token."""
        self._separate()
        self._states[slot] = state

    def clear(self, slot: int) -> None:
        """Empty the slot."""
        self._separate()
        self._states.pop(slot, None)

    def state_of(self, slot: int) -> State:
        """Return the slot's state."""
        self._separate()
        state = self._states[slot]
        assert state is not None
        return state

    def step(self, tokens: list[int]) -> Tensor:
        """Do as `StaticBatchState.step`, in one pass for all sequences with a state and one for each without."""
        device = device_of(self._model)
        logits_BV = torch.zeros(self._slots, self._vocab_size, device=device, dtype=self._dtype)
        begun = [slot for slot in sorted(self._states) if self._joint is not None or self._states[slot] is not None]
        fresh = sorted(set(self._states) - set(begun))
        if begun:
            tokens_B1 = torch.tensor([[tokens[slot]] for slot in begun], dtype=torch.long, device=device)
            out_B1V, self._joint = self._model(tokens_B1, self._together(begun))
            logits_BV[begun] = out_B1V[:, -1].to(logits_BV.dtype)
        if fresh:
            self._separate()
        for slot in fresh:
            out_B1V, self._states[slot] = self._model(as_tensor(self._model, [tokens[slot]]))
            logits_BV[slot] = out_B1V[0, -1]
        return logits_BV

    def _together(self, slots: list[int]) -> State:
        """Return the joint state of sequences that have one, which takes the place of their own."""
        states = [state for slot in slots if (state := self._states[slot]) is not None]
        joint = self._joint or (states[0] if len(states) == 1 else State.cat(states).to(device_of(self._model)))
        self._states = dict.fromkeys(slots)
        return joint

    def _separate(self) -> None:
        """Give each sequence a state of its own."""
        joint, self._joint = self._joint, None
        if joint is not None and len(self._states) == 1:
            self._states = dict.fromkeys(self._states, joint)
        elif joint is not None:
            self._states = {slot: self._model.trim_state(row_of(joint, i)) for i, slot in enumerate(self._states)}

    def bytes_of(self, slot: int) -> int:
        """Return the bytes of the slot's state now; of a joint state, an equal share."""
        if self._joint is not None:
            return self._joint.nbytes // len(self._states)
        state = self._states.get(slot)
        return 0 if state is None else state.nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states."""
        return sum(state.nbytes for state in (self._joint, *self._states.values()) if state is not None)


def as_tensor(model: Decoder, tokens: list[int]) -> Tensor:
    """Return one row of tokens, `[1, T]`, on the model's device."""
    return torch.tensor([tokens], dtype=torch.long, device=device_of(model))


Shapes = Mapping[str, "tuple[int, ...] | Shapes"]


def shapes_of(state: State) -> Shapes:
    """Return the shapes of a state's tensors without the batch dimension."""
    shapes: dict[str, tuple[int, ...] | Shapes] = {}
    for name, entry in state.entries.items():
        if isinstance(entry, State):
            shapes[name] = shapes_of(entry)
        elif isinstance(entry, Tensor):
            shapes[name] = tuple(entry.shape[1:])
    return shapes


def fit(state: State, shapes: Shapes) -> State:
    """Return `state` with its tensors `fitted` to `shapes`."""
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
    """Return `shapes` with at most `seen` entries in the dimensions that grow.

    Those are the dimensions that differ from `first`, the shapes of one token's state.
    """
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


def write_row(batch: State, row: int, one: State) -> None:
    """Write `one`, a state of one row, into a row of `batch`, whose shapes and dtypes stay; absent entries become 0."""
    for name, entry in batch.entries.items():
        new = one.entries.get(name)
        if isinstance(entry, State):
            write_row(entry, row, new if isinstance(new, State) else State({}))
        elif isinstance(entry, Tensor) and isinstance(new, Tensor):
            entry[row] = fitted(new, tuple(entry.shape[1:]))[0]
        elif isinstance(entry, Tensor):
            entry[row] = new if isinstance(new, int) else 0


def row_of(batch: State, row: int) -> State:
    """Return the state of one row, with its counts as plain integers."""
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
