"""Speculative decoding: guess several tokens, read them in one pass, and take back those that the model did not choose.

Each token is chosen from the model's own logits by the text's own sampler, in the order of the text. So a text is the
one without guesses, also for a seed, up to the rounding of one pass over several tokens. Guesses that are right only
save passes (Leviathan et al. 2023, arXiv:2211.17192, section 2, with a draft that is one token).

Shape letters: B rows, K tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Protocol

import torch
from torch import Tensor

from subquad.generation.batch_state import DynamicBatchState, as_tensor
from subquad.inference import device_of
from subquad.models import Decoder
from subquad.models.rollback import Rollback
from subquad.ops.padding import real_slots
from subquad.state import State

GUESSES = 4
"""Most tokens that are guessed at once."""


class Draft(Protocol):
    """Guesses how one text goes on; it is called with the whole text, which only grows."""

    def guess(self, tokens: Sequence[int], most: int, /) -> list[int]:
        """Return up to `most` tokens that may follow."""


MakeDraft = Callable[[], Draft]
"""Makes the draft of one text."""


class NgramDraft:
    """Guesses that a text goes on as it did after the last place where its last 4, 3 or 2 tokens stood before.

    Where that place is so near that the text ends before the guesses do, they begin again: the text has a period.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        """Where each n-gram last ended."""
        self._read = 0

    def guess(self, tokens: Sequence[int], most: int, /) -> list[int]:
        """Return the tokens that followed, none if there is no such place."""
        for end in range(max(2, self._read), len(tokens)):
            for n in range(2, min(4, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._read = len(tokens)
        found = (self._ends.get(tuple(tokens[-n:])) for n in range(min(4, len(tokens)), 1, -1))
        end = next((end for end in found if end is not None), len(tokens))
        period = list(tokens[end:])
        return [period[i % len(period)] for i in range(most)] if period else []


class ModelDraft:
    """Guesses the likeliest tokens of a smaller model with the same vocabulary."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._rollback = Rollback(room=1)
        self._state: State | None = None
        self._read = 0

    def guess(self, tokens: Sequence[int], most: int, /) -> list[int]:
        """Return what the model would add, none where its positions end."""
        limit = self._model.most_tokens
        if most < 1 or (limit is not None and len(tokens) + most > limit):
            return []
        guessed: list[int] = []
        fed = list(tokens[self._read :])
        if len(fed) > 1:  # a Perceiver AR reads its prompt so, and then a token at a time
            self._state = self._model.read(as_tensor(self._model, fed[:-1]), self._state)
        for _ in range(most):
            logits_1KV, self._state = self._rollback.read(
                self._model, as_tensor(self._model, fed[-1:]), self._state, None
            )
            fed = [int(logits_1KV[0, -1].argmax())]
            guessed += fed
        self._state = self._rollback.back(most - 1)
        self._read = len(tokens)
        return guessed


class SlotDrafts:
    """The drafts of the texts in the slots of a batch, and how many guesses were right."""

    def __init__(self, make: MakeDraft) -> None:
        self._make = make
        self._drafts: dict[int, Draft] = {}
        self.guessed = 0
        """Tokens that were guessed."""
        self.accepted = 0
        """Guesses that the model chose too."""

    def begin(self, slot: int) -> None:
        """Make the draft of a text that begins in the slot."""
        self._drafts[slot] = self._make()

    def end(self, slot: int) -> None:
        """Forget the slot's draft."""
        self._drafts.pop(slot, None)

    def guess(self, slot: int, text: Sequence[int], most: int) -> list[int]:
        """Return up to `most` guesses, and count them."""
        guessed = self._drafts[slot].guess(text, min(GUESSES, most))
        self.guessed += len(guessed)
        return guessed


class SpeculativeBatchState(DynamicBatchState):
    """One joint state of several sequences, whose steps read guesses, of which the wrong ones can be taken back."""

    def __init__(self, model: Decoder, slots: int, draft: MakeDraft) -> None:
        super().__init__(model, slots)
        self.drafts = SlotDrafts(draft)
        self._rollback = Rollback(room=1)
        self._fed_B = torch.zeros(0, dtype=torch.long)
        """How many tokens of each sequence the last pass read."""

    def insert(self, slot: int, state: State | None) -> None:
        """Begin a sequence in an empty slot, with `state` or (None) before its first token."""
        super().insert(slot, state)
        self.drafts.begin(slot)

    def clear(self, slot: int) -> None:
        """Empty the slot."""
        super().clear(slot)
        self.drafts.end(slot)
        self._rollback = Rollback(room=1)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all states, and of what can be taken back."""
        return super().nbytes + self._rollback.nbytes

    def state_of(self, slot: int, without: int = 0) -> State:
        """Return the slot's state, of a single sequence without its last tokens."""
        if not without:
            return super().state_of(slot)
        state = deepcopy(self._rollback).back(without)
        assert state is not None
        return state

    def guesses(self, slot: int, text: Sequence[int], most: int) -> list[int]:
        """Return up to `most` guesses; none in a step in which a sequence begins."""
        return [] if self._begins else self.drafts.guess(slot, text, most)

    def read(self, tokens: list[list[int]]) -> Tensor:
        """Read a token of each slot and guesses that follow it; return the logits after each, `[B, K, V]`."""
        slots = sorted(self._states)
        self._fed_B = fed_B = torch.tensor([len(tokens[slot]) for slot in slots])
        if self._begins:
            return super().read(tokens)
        K, device = int(fed_B.max()), device_of(self._model)
        tokens_BK = torch.tensor([tokens[slot] + [0] * (K - len(tokens[slot])) for slot in slots], device=device)
        if K == 1:  # nothing was guessed, and nothing will be taken back
            out_BKV, self._joint = self._model(tokens_BK, self._together(slots))
        else:
            mask_BK = real_slots(fed_B.to(device), K) if bool((fed_B < K).any()) else None
            out_BKV, self._joint = self._rollback.read(self._model, tokens_BK, self._together(slots), mask_BK)
        logits_BKV = out_BKV.new_zeros(self._slots, K, out_BKV.shape[-1])
        logits_BKV[slots] = out_BKV
        return logits_BKV

    def take_back(self, wrong: Mapping[int, int]) -> None:
        """Take back the last tokens that a slot has read, by their number."""
        wrong_B = torch.tensor([wrong.get(slot, 0) for slot in sorted(self._states)])
        self.drafts.accepted += int((self._fed_B - 1 - wrong_B).sum())
        if self._joint is None or not bool(wrong_B.any()):
            self._rollback.back(0)
            return
        places_B = self._fed_B.max() - self._fed_B + wrong_B  # padding behind the guesses takes places too
        alike = bool((places_B == places_B[0]).all())
        self._joint = self._rollback.back(int(places_B[0]) if alike else places_B)

    @property
    def _begins(self) -> bool:
        """Whether a sequence has no state yet."""
        return self._joint is None and None in self._states.values()
