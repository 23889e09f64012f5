"""What a family is: how its configuration and its tensors are named, and which of its settings our decoder has.

Shape letters: D model width, H heads, K channels of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from subquad.config import suggest
from subquad.models.config import DecoderConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Move:
    """One tensor of theirs and the tensors of ours that it is cut into."""

    theirs: str
    ours: tuple[str, ...]
    cut: Callable[[Tensor], Sequence[Tensor]]
    """From theirs to ours."""
    join: Callable[[Sequence[Tensor]], Tensor]
    """From ours to theirs."""


@dataclass(frozen=True)
class Family:
    """A family of transformers, in both directions."""

    name: str
    """Transformers' `model_type`."""
    model: str
    """The name of its causal language model's class in transformers."""
    settings: Callable[[Any], dict[str, Any]]
    """Our decoder's settings from its configuration; `ValueError` for what our decoder does not have."""
    config: Callable[[DecoderConfig], dict[str, Any]]
    """Its configuration from our decoder's settings; what does not fit shows in `settings` of it."""
    moves: Callable[[DecoderConfig], list[Move]]
    """All tensors but the head."""
    head: str = "lm_head.weight"
    """Its head's tensor."""


def same(theirs: str, ours: str) -> Move:
    """Take a tensor as it is."""
    return Move(theirs, (ours,), lambda x: (x,), lambda parts: parts[0])


def transposed(theirs: str, ours: str) -> Move:
    """Transpose a matrix that is kept as `[in, out]`, ours as `[out, in]`."""
    return Move(theirs, (ours,), lambda x: (x.T,), lambda parts: parts[0].T)


def stacked(theirs: str, ours: Sequence[str], *, heads: int | None = None, transpose: bool = False) -> Move:
    """Join several matrices or biases in one, one after the other; with `heads` one after the other in each head."""
    count = len(ours)

    def cut(x: Tensor) -> Sequence[Tensor]:
        x = x.T if transpose else x
        if heads is None:
            return x.chunk(count)
        return [part.flatten(0, 1) for part in x.unflatten(0, (heads, count, -1)).unbind(1)]

    def join(parts: Sequence[Tensor]) -> Tensor:
        if heads is None:
            x = torch.cat(list(parts))
        else:
            x = torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)
        return x.T if transpose else x

    return Move(theirs, tuple(ours), cut, join)


def require(config: PreTrainedConfig, **wanted: Any) -> None:
    """Raise `ValueError` for a field of a family's configuration with a value that our decoder does not have.

    A tuple holds the values that it has; a field that is missing has the first of them.
    """
    for name, values in wanted.items():
        values = values if isinstance(values, tuple) else (values,)
        value = getattr(config, name, values[0])
        if value not in values:
            valid = ", ".join(repr(v) for v in values)
            raise ValueError(
                f"{config.model_type} with {name}={value!r} has no place in our decoder; {name} must be {valid}"
            )


def token_ids(config: Any) -> dict[str, Any]:
    """Return the special tokens, named alike in both configurations, without those outside of the vocabulary."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: _known(name, getattr(config, name, None), config.vocab_size) for name in names}


def _known(name: str, value: Any, vocab_size: int) -> Any:
    """Return the numbers that are tokens: some models keep one of another vocabulary, or -1 for none."""
    given = value if isinstance(value, list) else [] if value is None else [value]
    known = [token for token in given if 0 <= token < vocab_size]
    if len(known) == len(given):
        return value
    logger.warning("%s=%s becomes %s: the vocabulary has %s tokens", name, value, known or None, f"{vocab_size:,}")
    return known or None


def activation(config: Any, field: str, kinds: dict[str, str]) -> str:
    """Return our feed-forward network for the activation in `field`."""
    value = getattr(config, field)
    if value not in kinds:
        raise ValueError(
            f"{config.model_type} with {field}={value!r} has no place in our decoder; {suggest(str(value), kinds)}"
        )
    return kinds[value]
