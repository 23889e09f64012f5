"""The decoder's `State` as a transformers cache, which `generate` passes from call to call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin

from subquad.state import State, leaf_to_number, number_to_leaf


class SubquadCache(Cache):
    """Holds one `State` for the whole decoder; each forward pass replaces it.

    `SubquadForCausalLM` creates one when asked for a cache. Create one yourself to keep it between calls of `generate`
    (`past_key_values=cache`), which chunked prefilling also needs. It cannot drop tokens: `crop` raises an error,
    so transformers refuses decoding that rolls back (assisted, prompt look-up, contrastive).
    """

    def __init__(self) -> None:
        self.slot = _StateSlot()
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
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.length = 0

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

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise ValueError(
            f"a SubquadCache cannot be cropped, got crop({tokens_to_remove}): a state of constant size does not keep "
            "earlier states; copy.deepcopy the cache before a step that may have to be undone"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices` (positions, or a bool for each row)."""
        if self.state is not None:
            self.state = self.state.select(indices)

    def offload(self) -> None:
        if self.state is not None:
            self.state = self.state.to("cpu")

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
