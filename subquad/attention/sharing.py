"""Sequences shared by several processes, as every mechanism sees them (`subquad.parallel`)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.parallel import Sent, active_group
from subquad.state import State


class SharedSequences(nn.Module):
    """Methods for reading one rank's part of a sequence: where it begins, what is refused, what is sent."""

    name: ClassVar[str]
    parallel: ClassVar[bool] = False
    """Whether several processes may share a sequence. A class that defines `mix_tokens` has to set it again: that
    method must then begin at `start` and get the earlier ranks' part from the active group, as the bases do."""
    config: Any
    causal: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "mix_tokens" in vars(cls) and "parallel" not in vars(cls):
            cls.parallel = False

    def start(self, state: State | None, tokens: int) -> int | Tensor:
        """Return the position of the first of `tokens` tokens: after the state's, or where this rank's begin."""
        group = active_group()
        return state.seen if state is not None else 0 if group is None else group.offset(tokens)

    def check_shared(self) -> None:
        """Raise `ValueError` if the layer can't read a shared sequence."""
        if not self.causal:
            raise ValueError(
                f"this {self.name} layer is not causal: it reads whole sequences, which several processes cannot share"
            )
        if not self.parallel:
            raise ValueError(
                f"attention {self.name!r} has no way to read a sequence that several processes share "
                "(its class does not set parallel = True)"
            )

    def check_part(self, state: object, padding: object, doc_ids: object) -> None:
        """Raise `ValueError` for arguments that this layer can't take in an active group."""
        self.check_shared()
        check_whole(state, padding, doc_ids)
        check_dropout(self.config.dropout if self.training else 0.0)

    def whole_state(self, state: State, device: Any) -> State:
        """Return the state after all ranks' tokens, on every rank, from the states of `mix`; without gradients."""
        group = active_group()
        return state if group is None else group.last_state(state, device)

    def communication(self, tokens: int, ranks: int) -> tuple[Sent, ...]:
        """Return the bytes that each of `ranks` processes sends for one sequence of `tokens` tokens, in float32.

        Gradients are sent in the backward pass. Raises `ValueError` if the tokens aren't a multiple of the ranks, and
        for a layer that can't be shared.
        """
        if ranks < 1 or tokens < 0 or tokens % ranks:
            raise ValueError(
                f"the ranks share a sequence equally: tokens must be a multiple of ranks, got {tokens} and {ranks}"
            )
        self.check_shared()
        return tuple(self.sent(tokens // ranks, ranks))

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return what each rank sends, for `tokens` tokens per rank."""
        raise NotImplementedError(f"{type(self).__name__} must define sent (it has parallel = True)")


def check_whole(state: object, padding: object, doc_ids: object) -> None:
    """Raise `ValueError` for a state, padding or documents together with a shared sequence."""
    if state is not None:
        raise ValueError(
            "a sequence that several processes share is read from its first token: it takes no state; "
            "leave `context_parallel` to go on from one"
        )
    if doc_ids is not None:
        raise ValueError(
            "a sequence that several processes share is one document: leave doc_ids out, or leave `context_parallel`"
        )
    if padding is not None:
        raise ValueError(
            "a sequence that several processes share has no padding: positions would depend on other ranks' tokens; "
            "cut off the padding and leave the mask out"
        )


def check_dropout(dropout: float) -> None:
    """Raise `ValueError` if dropout is on."""
    if dropout:
        raise ValueError(
            f"dropout={dropout} draws other numbers on several processes than on one: set it to 0, or leave "
            "`context_parallel`"
        )


def added(*parts: list[Sent]) -> list[Sent]:
    """Return the total that each rank sends."""
    return [Sent(sum(s.forward for s in each), sum(s.backward for s in each)) for each in zip(*parts, strict=True)]
