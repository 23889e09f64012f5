"""Convert a layer's state to another kind: `mix` runs on zero tokens, and each memory maps its own entries."""

from __future__ import annotations

from typing import Any

from subquad.attention.base import Attention
from subquad.attention.past import IN_PLACE, Convert, Converted
from subquad.parallel import active_group
from subquad.state import State


def to_static_cache(layer: Attention, state: State, capacity: int) -> State:
    """Return the state of one row with its keys and values in ring buffers, which decoding writes in place.

    If the state grows, they have room for `capacity` tokens. A layer without a static cache keeps its state as it is.
    """
    if not layer.has_static_cache:
        return state
    made = converted(layer, state, lambda memory, entries: memory.to_static_cache(entries, int(state.seen), capacity))
    made.entries[IN_PLACE] = 1
    return made


def from_static_cache(layer: Attention, state: State) -> State:
    """Undo `to_static_cache`: return the state with the keys and values within reach, in order."""
    if IN_PLACE not in state:
        return state
    return converted(layer, state, lambda memory, cache: memory.from_static_cache(cache, int(state.seen)))


def after_all_ranks(layer: Attention, state: State, device: Any) -> State:
    """Return the state after all ranks' tokens, on every rank, from each rank's own; without gradients."""
    group = active_group()
    if group is None:
        return state
    if not layer.state_grows:
        return group.last_state(state, device)
    whole = converted(layer, state, lambda memory, entries: memory.gathered(entries, group))
    return State({**whole.entries, "seen": state.seen // (group.rank + 1) * group.size}, whole.config_hash)


def converted(layer: Attention, state: State, convert: Convert) -> State:
    """Return the state with each memory's entries mapped by `convert`."""
    # A layer whose weights are all integers has no parameters, and then its state has the dtype of its inputs.
    like = next(x for x in (*layer.parameters(), *state.tensors()) if x.is_floating_point())
    none_B0D = like.new_zeros(state.batch or 1, 0, layer.config.dim)
    past = Converted(none_B0D, state, convert)
    layer.mix(none_B0D, past)
    return State(past.entries, state.config_hash)
