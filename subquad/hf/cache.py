"""What `generate` carries from call to call: the decoder's `State` in the shape of a transformers cache."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from subquad.state import State


class SubquadCache(Cache):
    """Holds one `State` for the whole decoder; a forward pass with it replaces the state.

    `SubquadForCausalLM` makes one when asked for a cache. Make one yourself to keep it between calls of `generate`
    (`past_key_values=cache`), which prefilling in chunks needs too. It cannot forget tokens: `crop` raises, and so
    decoding that rolls back (assisted, prompt look-up, contrastive) is refused by transformers.
    """

    def __init__(self) -> None:
        self.slot = _StateSlot()
        super().__init__(layers=[self.slot])

    @property
    def state(self) -> State | None:
        """The decoder's state; None before the first token."""
        return self.slot.state

    def update_state(self, state: State, tokens: int) -> None:
        """Take the state that follows `tokens` more tokens, padding included."""
        self.slot.state = state
        self.slot.length += tokens
        self.slot.is_initialized = True

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: keys and values are the mechanisms' own business."""
        self.slot.update()


class _StateSlot(CacheLayerMixin):
    """The one layer of a `SubquadCache`, since the decoder's state is one tree."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.length = 0

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: the first forward pass makes the state."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there are no keys and values to add."""
        raise TypeError("a SubquadCache holds the state of a subquad model and takes no keys and values of another one")

    def get_seq_length(self) -> int:
        """Return tokens read, padding included: where `generate` goes on in its input."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the attention mask that belongs to `query_length` more tokens."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: there is no limit."""
        return -1

    def reset(self) -> None:
        """Back to before the first token."""
        self.state, self.length, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refused: a state of constant size cannot forget its last tokens."""
        raise ValueError(
            "a SubquadCache cannot be cropped: a state of constant size does not keep what it was before its last "
            f"tokens (asked for crop({tokens_to_remove})); copy.deepcopy the cache before what may have to be undone"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes the old row `beam_idx[b]`."""
        self._select(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in a row."""
        self._select(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices` names (positions, or a bool per row)."""
        self._select(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._select(lambda tensor: tensor.cpu())

    def prefetch(self) -> None:
        """Nothing to do: the mechanisms read the state where it is."""

    def _select(self, change: Any) -> None:
        if self.state is not None:
            self.state = self.state.map(change)
