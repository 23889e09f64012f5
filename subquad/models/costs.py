"""Costs of layers and models at several lengths, and bytes sent between processes that share a sequence.

Everything is counted on the meta device, without data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple, get_args

import torch

from subquad.attention import Attention, Cost, build, mechanism, names
from subquad.config import suggest, type_hints
from subquad.models import Decoder, DecoderConfig
from subquad.models.build import build_model
from subquad.models.classifier import Classifier
from subquad.models.encoder import EncoderConfig
from subquad.models.stacks import STACKS
from subquad.parallel import Sent

Model = Decoder | Classifier
Options = Mapping[str, Mapping[str, Any]]


class Measured(NamedTuple):
    """The cost of `name`; `kind` is `causal`, `bidirectional` or `model`."""

    name: str
    kind: str
    cost: Cost

    def record(self) -> dict[str, Any]:
        """Return plain values for a file."""
        return {"name": self.name, "kind": self.kind, **asdict(self.cost)}


def chosen(attention: Sequence[str] | None, options: Options) -> tuple[list[str], list[str]]:
    """Return the mechanisms and the stacks to show: all, or those in `attention`. `ValueError` for an unknown name."""
    valid = [*names(), *STACKS]
    for name in (*(attention or ()), *options):
        if name not in valid:
            raise ValueError(f"unknown attention {name!r}; {suggest(name, valid)}")
    asked = valid if attention is None else attention
    return [name for name in asked if name not in STACKS], [name for name in asked if name in STACKS]


def meta_layer(name: str, *, dim: int, num_heads: int, tokens: int, options: Mapping[str, Any]) -> Attention:
    """Build a layer on the meta device; options that bound the length, if not given, become `tokens`."""
    known = {f.name for f in fields(mechanism(name).Config)}
    sized: dict[str, Any] = {option: max(2, tokens) for option in ("max_tokens", "horizon") if option in known}
    with torch.device("meta"):
        return build(name, dim=dim, num_heads=num_heads, **{**sized, **options})


def layer_costs(
    attention: Iterable[str], lengths: Sequence[int], *, dim: int, num_heads: int, options: Options
) -> Iterator[Measured]:
    """Yield the cost of one layer of each mechanism at each length."""
    for name in attention:
        for tokens in lengths:
            layer = meta_layer(name, dim=dim, num_heads=num_heads, tokens=tokens, options=options.get(name, {}))
            yield Measured(name, "causal" if layer.causal else "bidirectional", layer.cost(tokens))


def stack_costs(
    attention: Iterable[str], lengths: Sequence[int], *, dim: int, num_heads: int, num_layers: int, options: Options
) -> Iterator[Measured]:
    """Yield the cost of each stack as a whole model at each length; Perceiver AR with each kind of history unless one
    is set.

    Unless options say otherwise, half of the sequence is latents and half is history.
    """
    for name in attention:
        own = options.get(name, {})
        known = {f.name: f.default for f in fields(STACKS[name].options)}
        for history in _histories(name, own):
            for tokens in lengths:
                chosen = {**history, **own}
                given = {**(_halves(known, tokens, chosen) if "history_tokens" in known else {}), **chosen}
                shape: dict[str, Any] = {"dim": dim, "num_heads": num_heads, "num_layers": num_layers}
                shape |= {"attention": name, "options": {name: given}}
                # A language model if the stack is causal, else a classifier, which adds positions to its inputs.
                causal = "causal" in STACKS[name].forms
                config = DecoderConfig(**shape) if causal else EncoderConfig(**shape, position="sinusoidal")
                yield Measured(" ".join([name, *history.values()]), "model", meta_model(config).cost(tokens))


def _halves(known: Mapping[str, Any], tokens: int, chosen: Mapping[str, Any]) -> dict[str, int]:
    """Return options that make half of the sequence latents and half history, with at most that many projected rows."""
    half = max(1, tokens // 2)
    rows = {"projected": min(half, known["projected"])} if chosen.get("history") == "compressed" else {}
    return {"latents": half, "history_tokens": half, **rows}


def _histories(name: str, options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return an option for each kind of history that the stack has, or no option if one is already chosen."""
    hints = type_hints(STACKS[name].options)
    if "history" in options or "history" not in hints:
        return [{}]
    return [{"history": history} for history in get_args(hints["history"])]


def model_costs(config: DecoderConfig, lengths: Iterable[int]) -> Iterator[Measured]:
    """Yield the cost of one model at each length."""
    model = meta_model(config)
    for tokens in lengths:
        yield Measured(" + ".join(config.mechanisms), "model", model.cost(tokens))


def meta_model(config: DecoderConfig) -> Model:
    """Build the model on the meta device."""
    settings: Any = config
    with torch.device("meta"):
        return Classifier(settings) if config.labels_sequences else build_model(config)


class Volume(NamedTuple):
    """Most bytes that any of `ranks` processes sends, for `name`; None if they cannot share the sequence."""

    name: str
    tokens: int
    ranks: int
    sent: Sent | None

    def record(self) -> dict[str, Any]:
        """Return plain values for a file."""
        forward, backward = (None, None) if self.sent is None else (self.sent.forward, self.sent.backward)
        own = {"name": self.name, "tokens": self.tokens, "ranks": self.ranks}
        return {**own, "sent_forward": forward, "sent_backward": backward}


def layer_volumes(
    attention: Iterable[str], lengths: Sequence[int], ranks: int, *, dim: int, num_heads: int, options: Options
) -> Iterator[Volume]:
    """Yield the bytes sent for one layer of each mechanism at each length."""
    for name in attention:
        for tokens in lengths:
            layer = meta_layer(name, dim=dim, num_heads=num_heads, tokens=tokens, options=options.get(name, {}))
            yield Volume(name, tokens, ranks, most(layer, tokens, ranks) if layer.causal else None)


def model_volumes(config: DecoderConfig, lengths: Iterable[int], ranks: int) -> Iterator[Volume]:
    """Yield the bytes sent for one layer of each mechanism in a model, then for all its layers and passes."""
    if config.labels_sequences:
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
    """Return the most that any rank sends, forward and backward."""
    each = owner.communication(tokens, ranks)
    return Sent(max(sent.forward for sent in each), max(sent.backward for sent in each))
