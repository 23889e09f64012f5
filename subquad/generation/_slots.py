"""Where the running sequences of a `BatchDecoder` have their states.

Shape letters: B slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from subquad.generation._generate import as_tensor
from subquad.generation._rows import fit, idle, join, put, row_of, shapes_of, trimmed
from subquad.models import Decoder
from subquad.state import State


class Slots(Protocol):
    """States by slot, and one step of all of them."""

    def insert(self, slot: int, state: State | None) -> None:
        """Begin a sequence in an empty slot; None: before its first token."""

    def clear(self, slot: int) -> None:
        """Empty a slot."""

    def take(self, slot: int) -> State:
        """A copy of the state of one sequence."""

    def step(self, tokens: list[int]) -> Tensor:
        """Read a token in each slot (any in empty ones): the logits of the next ones, `[B, V]`."""

    def bytes_of(self, slot: int) -> int:
        """Bytes of the state of one sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""


def make_slots(model: Decoder, slots: int, capacity: int, *, compile: bool) -> Slots:
    """Fixed slots, or loose ones for a model whose states have no fixed shapes."""
    if model.fixed_shapes:
        return FixedSlots(model, slots, capacity, compile=compile)
    if compile:
        name = model.config.attention
        raise ValueError(f"compile=True needs states of fixed shape, which {name} has not; set compile=False")
    return LooseSlots(model, slots)


class FixedSlots:
    """One state `[B, ...]` whose shapes never change; an empty slot reads token 0 again and again, to no effect.

    A row's numbers depend on the row alone: kernels of a fixed shape treat rows alike. Where a model's state grows, it
    is kept for `capacity` tokens; a sequence may not be longer.
    """

    def __init__(self, model: Decoder, slots: int, capacity: int, *, compile: bool = False) -> None:
        self._model = model
        self._first, blank = _blank(model, 1), _final(model, capacity)
        self._blank = row_of(blank, 0)
        self._shapes = shapes_of(blank)
        self._state = blank.map(lambda x: x.repeat_interleave(slots, 0))
        self._bytes = self._state.nbytes
        self._device = next(model.parameters()).device
        self._active_B = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._full = False
        self._advance: Callable[[Tensor, State], tuple[Tensor, State]] = self._forward
        if compile:
            self._advance = torch.compile(self.compact_forward, dynamic=False, fullgraph=True)

    def insert(self, slot: int, state: State | None) -> None:
        """The slot gets the sequence's state."""
        self._put(slot, self._blank if state is None else state, 1)

    def clear(self, slot: int) -> None:
        """The slot forgets, so that nothing of a sequence is left when it has gone."""
        self._put(slot, self._blank, 0)

    def take(self, slot: int) -> State:
        """A copy without the places that stand before the first token."""
        state = row_of(self._state, slot)
        return fit(state, trimmed(self._shapes, shapes_of(self._first), int(state.seen)))

    def step(self, tokens: list[int]) -> Tensor:
        """One forward pass of all slots."""
        tokens_B1 = torch.tensor(tokens, dtype=torch.long, device=self._device)[:, None]
        logits_BV, self._state = self._advance(tokens_B1, self._state)
        if not self._full:
            self._state = idle(self._state, self._active_B)
        return logits_BV

    def bytes_of(self, slot: int) -> int:
        """Of each slot the same, whoever is in it."""
        return self._bytes // len(self._active_B)

    @property
    def nbytes(self) -> int:
        """Constant."""
        return self._bytes

    def _forward(self, tokens_B1: Tensor, state: State) -> tuple[Tensor, State]:
        h_B1D, state = self._model.hidden(tokens_B1, state)
        return self._model.logits(h_B1D)[:, -1], fit(state, self._shapes)

    def compact_forward(self, tokens_B1: Tensor, state: State) -> tuple[Tensor, State]:
        """A step whose tensors have the same strides as when a sequence joined: another layout would compile anew."""
        logits_BV, state = self._forward(tokens_B1, state)
        return logits_BV, state.map(torch.Tensor.contiguous)

    def _put(self, slot: int, state: State, active: int) -> None:
        self._state = put(self._state, torch.tensor([slot], device=self._device), state)
        self._active_B[slot] = active
        self._full = bool(self._active_B.all())


class LooseSlots:
    """A state for each sequence, joined for every step."""

    def __init__(self, model: Decoder, slots: int) -> None:
        self._model = model
        self._states: dict[int, State | None] = {}
        self._vocab_size, self._dtype = model.config.vocab_size, model.head_weight.dtype
        self._slots = slots

    def insert(self, slot: int, state: State | None) -> None:
        """The slot gets the sequence's state."""
        self._states[slot] = state

    def clear(self, slot: int) -> None:
        """The slot's state goes."""
        self._states.pop(slot, None)

    def take(self, slot: int) -> State:
        """The state."""
        state = self._states[slot]
        assert state is not None
        return state

    def step(self, tokens: list[int]) -> Tensor:
        """One forward pass of the sequences that have read something, one for each of the others."""
        device = next(self._model.parameters()).device
        logits_BV = torch.zeros(self._slots, self._vocab_size, device=device, dtype=self._dtype)
        begun = [slot for slot, state in sorted(self._states.items()) if state is not None]
        for slot in sorted(set(self._states) - set(begun)):
            out_B1V, self._states[slot] = self._model(as_tensor(self._model, [tokens[slot]]))
            logits_BV[slot] = out_B1V[0, -1]
        if begun:
            states = [state for slot in begun if (state := self._states[slot]) is not None]
            tokens_B1 = torch.tensor([[tokens[slot]] for slot in begun], dtype=torch.long, device=device)
            out_B1V, after = self._model(tokens_B1, join(states).to(device))
            logits_BV[begun] = out_B1V[:, -1].to(logits_BV.dtype)
            self._states.update({slot: self._model.trim_state(row_of(after, i)) for i, slot in enumerate(begun)})
        return logits_BV

    def bytes_of(self, slot: int) -> int:
        """Of the sequence in the slot, now."""
        state = self._states.get(slot)
        return 0 if state is None else state.nbytes

    @property
    def nbytes(self) -> int:
        """Of what is there now."""
        return sum(state.nbytes for state in self._states.values() if state is not None)


def _final(model: Decoder, capacity: int) -> State:
    """The state of one row that has read nothing, with the shapes that it will have for good."""
    if model.state_grows:
        return _blank(model, capacity)
    places, state = 2, _blank(model, 1)
    while shapes_of(longer := _blank(model, places)) != shapes_of(state):
        places, state = 2 * places, longer
    return state


@torch.no_grad()
def _blank(model: Decoder, places: int) -> State:
    """What a row of so much padding leaves: padding does not exist, but takes places."""
    tokens_BT = torch.zeros(1, places, dtype=torch.long, device=next(model.parameters()).device)
    return model.hidden(tokens_BT, None, torch.zeros_like(tokens_BT, dtype=torch.bool))[1]
