"""`Family`: how a family names its configuration and its tensors, and which of its settings our decoder supports.

Shape letters: D model width, H heads, K channels of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from subquad.attention import mechanism
from subquad.config import suggest
from subquad.models.blocks import mechanism_options
from subquad.models.config import DecoderConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Move:
    """One of their tensors, and our tensors that it splits into."""

    theirs: str
    ours: tuple[str, ...]
    cut: Callable[[Tensor], Sequence[Tensor]]
    """Split theirs into ours."""
    join: Callable[[Sequence[Tensor]], Tensor]
    """Join ours into theirs."""


@dataclass(frozen=True)
class Family:
    """A family of transformers, in both directions."""

    name: str
    """Transformers' `model_type`."""
    model: str
    """Class name of its causal language model in transformers."""
    settings: Callable[[Any], dict[str, Any]]
    """Return our decoder's settings from its configuration; `ValueError` for what our decoder does not support."""
    config: Callable[[DecoderConfig], dict[str, Any]]
    """Return its configuration from our decoder's settings; `settings` of the result shows what it cannot express."""
    moves: Callable[[DecoderConfig], list[Move]]
    """Return the moves of all tensors but the head."""
    head: str = "lm_head.weight"
    """Name of the head's tensor."""
    mechanisms: tuple[str, ...] = ("full",)
    """Mechanisms that its layers can be; `settings` says which by `attention` and `options`, unless all are full."""
    holder: str | None = None
    """`model_type` of the models for images and text whose language model, with its `text_config`, it is."""
    buffers: tuple[str, ...] = ()
    """Endings of tensors in old checkpoints that are no weights, besides those that transformers leaves out itself."""


NAMES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "attention_dropout": "attention_dropout",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Settings that most families name alike, ours to theirs, for `taken` and `given`."""
RMS_NAMES = NAMES | {"num_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps"}
SWIGLU = {"silu": "swiglu", "swish": "swiglu"}
"""Our feed-forward network by their activation, in families that have a gate."""
ENDS = {"embed_tokens": "embedding.tokens", "norm": "norm"}
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "feedforward_norm"}
QUERY_KEY_VALUE = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
QK_NORMS = {"q_norm": "query_norm", "k_norm": "key_norm"}
OUT = {"o_proj": "out"}
GATE_UP_DOWN = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
"""Llama's names of modules, theirs to ours, which most families share."""
WEIGHT, BOTH = (".weight",), (".weight", ".bias")


def with_bias(bias: bool | None) -> tuple[str, ...]:
    """Return the tensors of a linear layer with a bias, or without one."""
    return BOTH if bias else WEIGHT


def same(theirs: str, ours: str) -> Move:
    """Keep a tensor unchanged."""
    return Move(theirs, (ours,), lambda x: (x,), lambda parts: parts[0])


def renamed(theirs: str, ours: str, names: Mapping[str, str], tensors: Sequence[str] = WEIGHT) -> list[Move]:
    """Keep the `tensors` of modules unchanged; `names` maps theirs, below `theirs`, to ours, below `ours`."""
    return [same(f"{theirs}{a}{tensor}", f"{ours}{b}{tensor}") for a, b in names.items() for tensor in tensors]


def transposed(theirs: str, ours: str) -> Move:
    """Transpose a matrix that they store as `[in, out]` and we as `[out, in]`."""
    return Move(theirs, (ours,), lambda x: (x.T,), lambda parts: parts[0].T)


def stacked(theirs: str, ours: Sequence[str], *, heads: int | None = None, transpose: bool = False) -> Move:
    """Concatenate matrices or biases into one; with `heads`, concatenate them within each head."""
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


def parted(theirs: str, ours: Mapping[str, int], *, heads: int = 1) -> Move:
    """Concatenate matrices or biases of different heights, given by name, into one, within each of `heads`."""
    rows = [height // heads for height in ours.values()]

    def cut(x: Tensor) -> Sequence[Tensor]:
        return [part.flatten(0, 1) for part in x.unflatten(0, (heads, -1)).split(rows, 1)]

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)

    return Move(theirs, tuple(ours), cut, join)


def taken(config: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return settings by our names, from a configuration that has them by theirs; `names` maps ours to theirs.

    Raises `ValueError` for a number that no model of ours has: a size, constant or scale of 0 or less, or a dropout
    outside of [0, 1).
    """
    for name in names.values():
        value, dropout = getattr(config, name), "drop" in name
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and not (0 <= value < 1 if dropout else value > 0):
            raise ValueError(
                f"our decoder does not support {config.model_type} with {name}={value!r}; {name} must be "
                f"{'at least 0 and below 1' if dropout else 'above 0'}"
            )
    return {ours: getattr(config, theirs) for ours, theirs in names.items()}


def given(config: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return settings by their names, from a configuration of ours; `names` maps ours to theirs."""
    return {theirs: getattr(config, ours) for ours, theirs in names.items()}


def mixer(config: DecoderConfig, name: str) -> Any:
    """Return the configuration of the layers of mechanism `name`."""
    return mechanism(name).config_of(dim=config.dim, **mechanism_options(config, name))


def require(config: PreTrainedConfig, **wanted: Any) -> None:
    """Raise `ValueError` unless a field has the supported value, or one of a tuple; a missing field has the first."""
    for name, values in wanted.items():
        values = values if isinstance(values, tuple) else (values,)
        value = getattr(config, name, values[0])
        if value not in values:
            valid = ", ".join(repr(v) for v in values)
            raise ValueError(
                f"our decoder does not support {config.model_type} with {name}={value!r}; {name} must be {valid}"
            )


def token_ids(config: Any) -> dict[str, Any]:
    """Return the special tokens, which both configurations name alike, except those outside the vocabulary."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: _known(name, getattr(config, name, None), config.vocab_size) for name in names}


def _known(name: str, value: Any, vocab_size: int) -> Any:
    """Return the ids within the vocabulary: some models keep ids of another vocabulary, or -1 for none."""
    given = value if isinstance(value, list) else [] if value is None else [value]
    known = [token for token in given if 0 <= token < vocab_size]
    if len(known) == len(given):
        return value
    logger.warning("%s=%s becomes %s: the vocabulary has %s tokens", name, value, known or None, f"{vocab_size:,}")
    return known or None


def layer_kinds(config: Any, kinds: Mapping[str, str]) -> list[str]:
    """Return the mechanism of each layer, by the names in `layer_types`."""
    for kind in config.layer_types:
        if kind not in kinds:
            raise ValueError(
                f"our decoder does not support {config.model_type} with a layer of type {kind!r}; "
                f"layer_types must be {' or '.join(map(repr, kinds))}"
            )
    return [kinds[kind] for kind in config.layer_types]


def activation(config: Any, field: str, kinds: dict[str, str]) -> str:
    """Return the name of our feed-forward network for the activation in `field`."""
    value = getattr(config, field)
    if value not in kinds:
        raise ValueError(
            f"our decoder does not support {config.model_type} with {field}={value!r}; {suggest(str(value), kinds)}"
        )
    return kinds[value]
