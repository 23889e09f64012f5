"""A decoder whose sequences several processes share: what it cannot take, and the state after the whole sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from subquad.attention.sharing import added, check_dropout, check_whole
from subquad.models._layers import Block
from subquad.models.config import DecoderConfig
from subquad.models.stacks import stack_of
from subquad.parallel import ContextGroup, Sent, active_group
from subquad.state import State


def check_shared(config: DecoderConfig) -> None:
    """Raise `ValueError` for a stack: its parts read different tokens, which no rank has all of."""
    stack = stack_of(config)
    if stack is not None:
        raise ValueError(
            f"{stack.name} cannot read a sequence that several processes share: its latents stand in the last part "
            "alone and read a history of all parts; take a decoder of mechanisms, or leave `context_parallel`"
        )


def check_part(
    config: DecoderConfig,
    tokens_BT: Tensor,
    state: State | None,
    mask: Tensor | None,
    doc_ids: Tensor | None,
    training: bool,
) -> None:
    """Under an active group, raise `ValueError` for what a decoder cannot take there."""
    group = active_group()
    if group is None:
        return
    check_shared(config)
    check_whole(state, mask, doc_ids)
    check_dropout(config.dropout if training else 0.0)
    group.check_same(tokens_BT.shape[1], tokens_BT.device)


def first_position(tokens_BT: Tensor, state: State | None) -> int | Tensor:
    """The position of the first token: after those in the state, or where this rank's part begins."""
    group = active_group()
    return state.seen if state is not None else 0 if group is None else group.offset(tokens_BT.shape[1])


def whole_states(
    blocks: Iterable[Block], states: Mapping[str, Any], tokens_BT: Tensor, group: ContextGroup
) -> dict[str, Tensor | int | State]:
    """The entries of a decoder's state after all ranks' tokens, the same on every rank, from those of each rank."""
    mixers = {f"layers.{i}": block.attention for i, block in enumerate(blocks)}
    entries: dict[str, Tensor | int | State] = {"seen": group.size * tokens_BT.shape[1]}
    for place, state in states.items():
        mixer = mixers[place[place.index("layers.") :]]
        entries[place] = mixer.whole_state(state, tokens_BT.device)
    return entries


def communication(config: DecoderConfig, blocks: Iterable[Block], tokens: int, ranks: int) -> tuple[Sent, ...]:
    """What each rank sends for one sequence, in all layers and passes."""
    check_shared(config)
    layers = [list(block.attention.communication(tokens, ranks)) for block in blocks]
    return tuple(added(*layers * config.loops))
