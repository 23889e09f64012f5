"""The decoder's `State` as a transformers cache, which `generate` passes from call to call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin

from subquad.models.rollback import Rollback
from subquad.state import State, leaf_to_number, number_to_leaf


class SubquadCache(Cache):
    """Holds one `State` for the whole decoder; each forward pass replaces it.

    `SubquadForCausalLM` creates one when asked for a cache. Create one yourself to keep it between calls of `generate`
    (`past_key_values=cache`), which chunked prefilling also needs. After `activate_past_recording()` the last `room`
    tokens can be removed, and those since the last `crop`: `crop(-n)`, as assisted decoding and prompt look-up do
    (`subquad.models.rollback`).
    """

    def __init__(self, room: int = 16) -> None:
        self.slot = _StateSlot(room)
        super().__init__(layers=[self.slot])

    @property
    def state(self) -> State | None:
        """The decoder's state, or None before the first token."""
        return self.slot.state

    def update_state(self, state: State, tokens: int) -> None:
        """Store the state after `tokens` more tokens, padding included."""
        self.slot.state = state
        self.slot.length += tokens
        self.slot.is_initialized = True

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `TypeError`: mechanisms keep their own keys and values."""
        self.slot.update()


class _StateSlot(CacheLayerMixin):
    """The only layer of a `SubquadCache`, since the decoder's state is one tree."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self.state: State | None = None
        self.length = 0
        self.room = room
        self.rollback: Rollback | None = None
        """What the last tokens wrote; None: it is not kept, and no token can be removed."""

    @property
    def record_past(self) -> bool:
        """Whether the last tokens can be removed; setting it to False forgets what they wrote."""
        return self.rollback is not None

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.rollback = (self.rollback or Rollback(self.room)) if value else None

    def activate_past_recording(self) -> None:
        """Keep what the tokens write that are read from now on, so that `crop` can remove the last ones."""
        self.record_past = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first forward pass creates the state."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a SubquadCache holds the state of a subquad model and cannot store another model's keys")

    def get_seq_length(self) -> int:
        """Return the number of tokens read, padding included: where `generate` continues in its input."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the attention mask for `query_length` more tokens."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def reset(self) -> None:
        self.state, self.length, self.is_initialized = None, 0, False
        self._forget()

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # theirs is a constant of the class
        """Whether `crop` can put the state back as it was."""
        return self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: `crop(-n)` removes n.

        Raises `ValueError` for a positive number, for more tokens than are kept, and before
        `activate_past_recording()`.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, as -4, got {tokens_to_remove}")
        if self.rollback is None:
            raise ValueError(
                f"crop({tokens_to_remove}) needs what the last tokens wrote: call activate_past_recording() before "
                "they are read"
            )
        found = self.rollback.back(-tokens_to_remove)
        if tokens_to_remove:
            self.state, self.length = found, self.length + tokens_to_remove

    def _forget(self) -> None:
        """Forget what the last tokens wrote, which no longer belongs to the state's rows."""
        if self.rollback is not None:
            self.rollback = Rollback(self.room)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))
            self._forget()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices` (positions, or a bool for each row)."""
        if self.state is not None:
            self.state = self.state.select(indices)
            self._forget()

    def offload(self) -> None:
        if self.state is not None:
            self.state = self.state.to("cpu")
            self._forget()

    def prefetch(self) -> None:
        """Do nothing: mechanisms read the state on the device where it is."""


def _leaves(cache: SubquadCache) -> tuple[list[Any], None]:
    return [cache.state, number_to_leaf(cache.slot.length)], None


def _named_leaves(cache: SubquadCache) -> tuple[list[tuple[Any, Any]], None]:
    return list(zip(map(pytree.MappingKey, ("state", "length")), _leaves(cache)[0], strict=True)), None


def _from_leaves(leaves: Iterable[Any], _: None) -> SubquadCache:
    cache = SubquadCache()
    cache.slot.state, length = leaves
    cache.slot.length, cache.slot.is_initialized = leaf_to_number(length), cache.state is not None
    return cache


pytree.register_pytree_node(
    SubquadCache,
    _leaves,
    _from_leaves,
    serialized_type_name="subquad.SubquadCache",
    flatten_with_keys_fn=_named_leaves,
)
torch.serialization.add_safe_globals([SubquadCache, _StateSlot])
