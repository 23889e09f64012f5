"""What processes that share a sequence send one another, counted without data: `subquad cost --context`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from subquad.cli._costs import meta_layer, meta_model
from subquad.cli.tables import size
from subquad.models import DecoderConfig
from subquad.models.encoder import EncoderConfig
from subquad.parallel import Sent

HEADERS = ("", "tokens", "sent forward", "sent backward")
LEGEND = (
    "Bytes that the process which sends most sends for one sequence in float32, forward and backward; "
    "`not shared` is what several processes cannot share."
)


class Volume(NamedTuple):
    """What one of `ranks` processes sends at most, for `name`; None where they cannot share the sequence."""

    name: str
    tokens: int
    ranks: int
    sent: Sent | None

    def record(self) -> dict[str, Any]:
        """Plain values, for a file."""
        sent = {"sent_forward": None, "sent_backward": None} if self.sent is None else _named(self.sent)
        return {"name": self.name, "tokens": self.tokens, "ranks": self.ranks, **sent}

    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        sent = ("not shared",) * 2 if self.sent is None else tuple(size(number) for number in self.sent)
        return (self.name, f"{self.tokens:,}", *sent)


def _named(sent: Sent) -> dict[str, Any]:
    return {"sent_forward": sent.forward, "sent_backward": sent.backward}


def check_ranks(ranks: int, lengths: Iterable[int]) -> None:
    """Raise `ValueError` unless the processes can share all lengths equally."""
    if ranks < 1:
        raise ValueError(f"--context must be at least 1 process, got {ranks}")
    for tokens in lengths:
        if tokens % ranks:
            raise ValueError(f"--tokens must be multiples of --context {ranks} (equal parts), got {tokens}")


def of_layers(
    attention: Iterable[str],
    lengths: Sequence[int],
    ranks: int,
    *,
    dim: int,
    num_heads: int,
    options: Mapping[str, Mapping[str, Any]],
) -> Iterator[Volume]:
    """One layer of each mechanism, at each length."""
    for name in attention:
        for tokens in lengths:
            layer = meta_layer(name, dim=dim, num_heads=num_heads, tokens=tokens, options=options.get(name, {}))
            yield Volume(name, tokens, ranks, most(layer, tokens, ranks) if layer.causal and layer.parallel else None)


def of_model(config: DecoderConfig, lengths: Sequence[int], ranks: int) -> Iterator[Volume]:
    """One layer of each mechanism of a model, then all its layers and passes."""
    if isinstance(config, EncoderConfig):
        raise ValueError(
            "a classifier reads whole sequences, which several processes cannot share: leave out --context"
        )
    model: Any = meta_model(config)
    layers = {block.attention.name: block.attention for block in model.blocks()}
    for tokens in lengths:
        for name, layer in layers.items():
            yield Volume(f"{name}, a layer", tokens, ranks, most(layer, tokens, ranks))
        yield Volume("in all", tokens, ranks, most(model, tokens, ranks))


def most(owner: Any, tokens: int, ranks: int) -> Sent:
    """What the ranks that send most send, forward and backward."""
    each = owner.communication(tokens, ranks)
    return Sent(max(sent.forward for sent in each), max(sent.backward for sent in each))
