"""Tokens that can be taken back, as speculative decoding needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.attention.base import Attention
from subquad.attention.conversions import from_static_cache
from subquad.attention.past import Draft
from subquad.state import State


class DraftedTokens:
    """Tokens that a layer has read after `state`, and may take back: `after` makes the state of the first of them.

    `y_BTD` are their outputs. What they wrote is kept until this object is gone: as much as their projections.
    """

    def __init__(self, layer: Attention, x_BTD: Tensor, state: State | None = None) -> None:
        """Read `x`; raise `ValueError` for a bidirectional layer and as `layer(x, state)` does."""
        if not layer.causal:
            raise ValueError(f"this {layer.name} layer is not causal: it reads whole sequences and drafts no tokens")
        if state is not None:
            state.check(layer.config_hash, f"this {layer.name} layer", x_BTD.shape[0])
            state = from_static_cache(layer, state)
        self._hash = layer.config_hash
        self._draft = Draft(x_BTD, state)
        self._given = self._draft.given
        self.y_BTD = layer.outputs(x_BTD, self._draft)

    def after(self, lengths: int | Tensor) -> State:
        """Return the state after the first `lengths` of the tokens, the same number or one for each row, `[B]`.

        Raises `ValueError` for numbers that are negative or more than the tokens.
        """
        B, T, _ = self.y_BTD.shape
        lengths_B = torch.as_tensor(lengths, device=self.y_BTD.device).expand(B)
        if bool(((lengths_B < 0) | (lengths_B > T)).any()):
            raise ValueError(f"of {T} drafted tokens 0 to {T} can be kept, got {lengths_B.tolist()}")
        return State(self._draft.entries_after(lengths_B, self._given), self._hash)
