"""Count the bytes between ranks on meta tensors: each rank runs alone, and its exchanges only count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from subquad.ops.counting import MakeInput, Run, without_data
from subquad.parallel.group import ContextGroup, Message, Sent, context_parallel


class CountingGroup(ContextGroup):
    """Rank `rank` of `size` by itself: the tensors that it would receive stay as they are."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.sent = rank, size, Sent()

    def exchange(
        self, outgoing: Sequence[Message], incoming: Sequence[Message], *, backward: bool = False
    ) -> Callable[[], None]:
        """Add the bytes of the tensors that are sent."""
        size = sum(x.nbytes for _, x in outgoing)
        self.sent = self.sent.plus(Sent(0, size) if backward else Sent(size, 0))
        return lambda: None


def bytes_sent(
    layer: nn.Module, run: Run, make_input: MakeInput, ranks: int, of: Iterable[int] | None = None
) -> list[Sent]:
    """Return the bytes that ranks send, forward and backward in float32, if each calls `run(make_input())`.

    `of` are the ranks that are counted; None: all.
    """
    groups = [CountingGroup(rank, ranks) for rank in (range(ranks) if of is None else of)]
    with without_data(layer, training=False) as call:
        for group in groups:
            with context_parallel(group):
                y_BTD, _ = call(run, make_input())
            y_BTD.sum().backward()
    return [group.sent for group in groups]
