"""Take back tokens that a decoder has read, as speculative decoding does with a draft that it refuses.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from subquad.attention.past import Draft, drafting
from subquad.ops.padding import real_slots
from subquad.state import State

LONGEST = 256
"""Tokens beyond `room` that can be taken back at most, since a prompt's projections need much memory."""

Call = Callable[[Tensor, State | None, Tensor | None], tuple[Any, State]]
"""Reads `tokens, state, mask`; returns outputs, a tree of tensors `[B, T, ...]`, and the next state."""


Fold = Callable[["int | Tensor", State | None], State]
"""Returns the state after the first tokens of a pass, a number or one for each row, from the state before them."""


@dataclass
class Pass:
    """Tokens that were read at once, and how many of them have not been taken back."""

    fold: Fold
    drafts: list[Draft]
    kept: Tensor
    """A number without a dimension, or one for each row, `[B]`."""
    begins: bool
    """Whether `before` is kept: else it is folded from an earlier pass."""
    before: State | None
    """The state before these tokens; None: there was none, or it is not kept."""


class Rollback:
    """The last tokens that a decoder has read, and a state before them.

    `read` reads tokens by a call of the model, and `back` returns the state without the last of them: the last `room`
    tokens can be taken back, and those that were read since the last `back`, at most 256. Kept are what twice as many
    tokens wrote, as much as their projections, and two earlier states, a few more if `back` is rarely called.
    Padding counts as tokens do here: a place of each row. A stack whose layers draft nothing (Perceiver AR) reads the
    tokens that stay again.
    """

    def __init__(self, room: int = 16) -> None:
        if room < 1:
            raise ValueError(f"room is a number of tokens that can be taken back, at least 1, got {room}")
        self.room = room
        self._passes: list[Pass] = []
        self._last: State | None = None
        self._new = 0
        """Tokens since the last `back`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Rollback:
        """Return a copy that shares what tokens wrote, which never changes, and the model that may read them again."""
        copy = Rollback(self.room)
        copy._passes, copy._last, copy._new = [*self._passes], deepcopy(self._last, memo), self._new
        return copy

    @property
    def kept(self) -> Tensor:
        """Return how many tokens can be taken back, a number or one for each row."""
        return sum([each.kept for each in self._passes], torch.tensor(0))

    @property
    def nbytes(self) -> int:
        """Return the bytes that are kept: what tokens wrote, and the states before them."""
        kept = [x for each in self._passes for draft in each.drafts for x in draft.tensors()]
        return sum(x.nbytes for x in kept) + sum(each.before.nbytes for each in self._passes if each.before)

    def read(self, call: Call, tokens_BT: Tensor, state: State | None, mask_BT: Tensor | None) -> tuple[Any, State]:
        """Return `call(tokens, state, mask)`, in two parts if only the last tokens can be taken back.

        A state that this object did not return last begins anew.
        """
        if state is not self._last:
            self._passes = []
        parts: list[Any] = []
        apart = tokens_BT.shape[1] - max(LONGEST, self.room)
        if apart > 0:
            mask = None if mask_BT is None else mask_BT[:, :apart]
            outputs, state = call(tokens_BT[:, :apart], state, mask)
            parts, self._passes, tokens_BT = [outputs], [], tokens_BT[:, apart:]
            mask_BT = None if mask_BT is None else mask_BT[:, apart:]
        with drafting() as drafts:
            outputs, after = call(tokens_BT, state, mask_BT)
        layers = [(name, x.config_hash) for name, x in after.entries.items() if isinstance(x, State)]
        if drafts and len(drafts) == len(layers):
            fold: Fold = partial(fold_drafts, drafts, layers, after.config_hash, mask_BT)
        else:
            fold = partial(read_again, call, tokens_BT, mask_BT)
        self._add(Pass(fold, drafts, torch.tensor(tokens_BT.shape[1]), True, state))
        parts, state = [*parts, outputs], after
        self._last = state
        return parts[0] if len(parts) == 1 else pytree.tree_map(lambda *x: torch.cat(x, 1), *parts), state

    def back(self, tokens: int | Tensor) -> State | None:
        """Return the state without the last `tokens`, a number or one for each row; None if that is no state.

        What the other tokens wrote is folded again, without the model. Raises `ValueError` for a negative number, and
        for more tokens than are kept.
        """
        n, total = torch.as_tensor(tokens).cpu(), self.kept
        if bool((n < 0).any()) or bool((n > total).any()):
            raise ValueError(
                f"{total.tolist()} tokens can be taken back, of room={self.room} and those read since the last time, "
                f"at most {LONGEST}, got {n.tolist()}: ask for more room before they are read"
            )
        self._new = 0
        if not bool(n.any()):
            return self._last
        wanted = total - n
        starts = list(accumulate([each.kept for each in self._passes], initial=torch.tensor(0)))
        first = max(i for i, each in enumerate(self._passes) if each.begins and bool((starts[i] <= wanted).all()))
        state, passes = self._passes[first].before, self._passes[first:]
        del self._passes[first:]
        for each, start in zip(passes, starts[first:], strict=False):
            kept = torch.minimum((wanted - start).clamp(min=0), each.kept)
            if bool(kept.any()):
                self._passes.append(replace(each, kept=kept))
                state = each.fold(int(kept) if kept.ndim == 0 else kept, state)
        self._last = state
        return state

    def _add(self, new: Pass) -> None:
        """Keep a pass, and the state before it if the last one kept is far enough back; forget what is not needed."""
        self._new += int(new.kept)
        needed = max(self.room, min(self._new, LONGEST))
        begun = [i for i, each in enumerate(self._passes) if each.begins]
        if begun and not bool((self._since(begun[-1]) >= needed).all()):
            new = replace(new, begins=False, before=None)
        self._passes.append(new)
        begun += [len(self._passes) - 1] if new.begins else []
        enough = [i for i in begun if bool((self._since(i) >= needed).all())]
        del self._passes[: max(enough, default=0)]

    def _since(self, first: int) -> Tensor:
        return sum([each.kept for each in self._passes[first:]], torch.tensor(0))


def fold_drafts(
    drafts: list[Draft],
    layers: list[tuple[str, str]],
    config_hash: str,
    mask_BT: Tensor | None,
    kept: int | Tensor,
    before: State | None,
) -> State:
    """Return the state after the first `kept` tokens from what the layers drafted; nothing is projected again."""
    if mask_BT is not None:
        kept = first_of(mask_BT, kept).sum(1)
    elif isinstance(kept, Tensor):
        kept = kept.to(drafts[0].device)
    entries: dict[str, Any] = {"seen": kept if before is None else before.seen + kept}
    for (name, layer_hash), draft in zip(layers, drafts, strict=True):
        given = None if before is None else before.child(name).entries
        entries[name] = State(draft.entries_after(kept, given), layer_hash)
    return State(entries, config_hash)


def read_again(
    call: Call, tokens_BT: Tensor, mask_BT: Tensor | None, kept: int | Tensor, before: State | None
) -> State:
    """Return the state after the first `kept` tokens of a stack whose layers draft nothing: the model reads again."""
    if mask_BT is not None:
        return call(tokens_BT, before, first_of(mask_BT, kept))[1]
    if isinstance(kept, int):
        return call(tokens_BT[:, :kept], before, None)[1]
    return call(tokens_BT, before, real_slots(kept.to(tokens_BT.device), tokens_BT.shape[1]))[1]


def first_of(mask_BT: Tensor, kept: int | Tensor) -> Tensor:
    """Return the mask without all but the first `kept` places of each row."""
    kept_B = torch.as_tensor(kept, device=mask_BT.device).expand(len(mask_BT))
    return mask_BT & real_slots(kept_B, mask_BT.shape[1])
