"""Speculative decoding whose passes are recorded: all read one token of each slot, or one and `GUESSES` guesses.

Shape letters: B slots, K tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from subquad.attention.past import Draft, drafting
from subquad.generation.batch_state import StaticBatchState, row_of
from subquad.generation.recorded import flat, joined, split
from subquad.generation.speculative import GUESSES, MakeDraft, SlotDrafts, SpeculativeBatchState
from subquad.generation.static_step import StaticStep
from subquad.models import Decoder
from subquad.models.rollback import fold_drafts
from subquad.state import State

PASS = 1 + GUESSES
"""Tokens that a pass with guesses reads in each slot; where fewer were guessed, the others are taken back."""


class StaticSpeculativeBatchState(StaticBatchState):
    """A static state that reads guesses, of which the wrong ones can be taken back.

    A pass keeps what its tokens wrote, and a copy of the state before them.
    """

    def __init__(self, model: Decoder, slots: int, draft: MakeDraft) -> None:
        super().__init__(model, slots, capacity=1)  # it does not grow
        self.drafts = SlotDrafts(draft)
        self._pass = StaticStep(flat(self._read_pass, self._like), self._refused)
        self._steps.append(self._pass)
        self._before: list[Tensor] | None = None
        """The state before the last pass; None: it read no guesses."""
        self._written: list[Tensor] = []
        """What the tokens of the last pass wrote."""
        self._layers: list[tuple[str, str]] = []
        self._drafted: list[Draft] = []
        self._fed_B = self._kept_B = torch.zeros(slots, dtype=torch.long)
        """How many tokens of each slot the last pass read, and how many of them were kept."""

    def insert(self, slot: int, state: State | None) -> None:
        """Begin a sequence in an empty slot, with `state` or (None) before its first token."""
        super().insert(slot, state)
        self.drafts.begin(slot)

    def clear(self, slot: int) -> None:
        """Empty the slot and overwrite its sequence's state."""
        super().clear(slot)
        self.drafts.end(slot)
        self._before, self._written = None, []

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states, and of what can be taken back."""
        return super().nbytes + sum(x.nbytes for x in [*(self._before or []), *self._written])

    def state_of(self, slot: int, without: int = 0) -> State:
        """Return a copy of the slot's state, without the last tokens of the last pass."""
        if not without:
            return super().state_of(slot)
        return self._usual(row_of(self._folded(self._kept_B - without), slot))

    def guesses(self, slot: int, text: Sequence[int], most: int) -> list[int]:
        """Return up to `most` guesses."""
        return self.drafts.guess(slot, text, most)

    def read(self, tokens: list[list[int]]) -> Tensor:
        """Read a token of each slot and guesses that follow it; return the logits after each, `[B, K, V]`."""
        self._fed_B = torch.tensor([len(fed) for fed in tokens])
        if max(self._fed_B) == 1:
            self._before, self._written = None, []
            return super().read(tokens)
        padded = [fed + [0] * (PASS - len(fed)) for fed in tokens]
        self._before = [x.clone() for x in self._tensors]
        logits_BKV, *after = self._pass(torch.tensor(padded, device=self._device), self._active_B, self._tensors)
        count = len(self._tensors)
        self._keep(after[:count])
        self._written = after[count:]
        return logits_BKV

    def take_back(self, wrong: Mapping[int, int]) -> None:
        """Take back the last tokens that a slot has read, by their number."""
        wrong_B = torch.tensor([wrong.get(slot, 0) for slot in range(len(self._fed_B))])
        self._kept_B = self._fed_B - wrong_B
        self.drafts.accepted += int((self._kept_B - 1).sum())
        if self._before is not None and bool((self._kept_B < PASS).any()):
            self._keep(split(self._folded(self._kept_B)))

    def _static(self, state: State) -> State:
        return state  # a static cache reads one token at a time

    def _read_pass(self, tokens_BK: Tensor, active_B: Tensor, state: State) -> tuple[Tensor | State, ...]:
        with drafting() as drafts:
            logits_BKV, after = self._model(tokens_BK, state)
        self._layers = [(name, x.config_hash) for name, x in after.entries.items() if isinstance(x, State)]
        self._drafted = drafts
        return logits_BKV, self._static_after(after, active_B), *[x for draft in drafts for x in draft.tensors()]

    def _folded(self, kept_B: Tensor) -> State:
        """Return the state after the first tokens of the last pass, `kept` of each slot."""
        assert self._before is not None
        written = iter(self._written)
        drafts = [draft.map(lambda x: next(written)) for draft in self._drafted]
        kept = int(kept_B) if len(kept_B) == 1 else kept_B
        before = joined(self._like, self._before)
        state = fold_drafts(drafts, self._layers, self._like.config_hash, None, kept, before)
        return self._static_after(in_order_of(self._like, state), self._active_B)


def guessing_state(
    model: Decoder, slots: int, draft: MakeDraft, *, record: bool = True
) -> SpeculativeBatchState | StaticSpeculativeBatchState:
    """Return a state that reads guesses: a static one if its size is constant and the model has no last position."""
    if record and model.static_shapes and not model.state_grows and model.most_tokens is None:
        return StaticSpeculativeBatchState(model, slots, draft)
    return SpeculativeBatchState(model, slots, draft)


def in_order_of(like: State, state: State) -> State:
    """Return `state` with its entries in the order of those of `like`."""
    entries = dict[str, Tensor | int | State]()
    for name, entry in like.entries.items():
        found = state.entries[name]
        entries[name] = in_order_of(entry, found) if isinstance(entry, State) and isinstance(found, State) else found
    return State(entries, state.config_hash)
