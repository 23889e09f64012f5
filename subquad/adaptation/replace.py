"""Replace full attention in some layers of a decoder by another mechanism, keeping the weights that fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.attention import mechanism
from subquad.models import Decoder, DecoderConfig


class Replacement(NamedTuple):
    """A decoder with replaced layers."""

    decoder: Decoder
    layers: tuple[int, ...]
    """Layers with the new mechanism, counted from 0."""
    new: tuple[str, ...]
    """Names of the parameters that the original lacks, which hold their initial values."""


def replaced_layers(num_layers: int, keep_every: int) -> tuple[int, ...]:
    """Return each layer i with i + 1 no multiple of `keep_every` (0: all); `ValueError` if none is replaced or kept."""
    if keep_every < 0 or keep_every > num_layers:
        raise ValueError(f"keep_every must be 0 (replace all) or at most {num_layers} (the layers), got {keep_every}")
    found = tuple(i for i in range(num_layers) if not keep_every or (i + 1) % keep_every)
    if not found:
        raise ValueError(f"keep_every={keep_every} keeps full attention in all {num_layers} layers: nothing to replace")
    return found


def replace_attention(
    decoder: Decoder, name: str, /, *, keep_every: int = 4, options: dict[str, Any] | None = None
) -> Replacement:
    """Return a copy of `decoder` with the mechanism `name` in place of full attention in the replaced layers.

    Copies all weights that fit: embeddings, norms, feed-forward networks, head, kept layers, and the query, key, value
    and output projections of replaced layers. If the mechanism has no shared key heads, each shared head is repeated
    for its query heads. New parameters are initialised by their modules, from the current random state. Options come
    from the original, as far as the mechanism has them, then from `options`; `linear` defaults to the learned feature
    map, and rotates queries and keys if the original does.

    Raises `ValueError` for another class or a decoder with loops, for a layer without full attention, for weights
    that don't fit, and as the decoder's configuration.
    """
    if type(decoder) is not Decoder or decoder.config.loops > 1:
        found = f"{type(decoder).__name__} with loops={decoder.config.loops}"
        raise ValueError(f"a conversion takes a plain Decoder with loops=1, got {found}")
    layers = replaced_layers(decoder.config.num_layers, keep_every)
    for i, found in enumerate(decoder.config.layer_mechanisms):
        if found != "full":  # in a kept layer too, which becomes full
            raise ValueError(f"layer {i + 1} has attention {found!r}: only full attention can be replaced")
    new = Decoder(new_config(decoder.config, name, layers, options or {}))
    like = next(decoder.parameters())
    new.to(like.device, like.dtype)
    return Replacement(new.train(decoder.training), layers, tuple(copy_weights(decoder, new, layers)))


def new_config(config: DecoderConfig, name: str, layers: tuple[int, ...], options: dict[str, Any]) -> DecoderConfig:
    """Return `config` with the mechanism `name` in `layers`.

    Raises `ValueError` for options that full attention has too: the copied weights were trained with the original's.
    """
    given = set(mechanism("full").Config.__dataclass_fields__) - {"dropout"}
    if taken := sorted(given & set(options)):
        valid = ", ".join(sorted({"dropout", *mechanism(name).Config.__dataclass_fields__} - given))
        raise ValueError(
            f"option {taken[0]!r} of attention {name!r} must stay as the weights were trained: leave it out; "
            f"valid: {valid}"
        )
    names = [name if i in layers else "full" for i in range(config.num_layers)]
    known = mechanism(name).Config.__dataclass_fields__
    chosen = {key: value for key, value in config.options.get("full", {}).items() if key in known}
    chosen |= mechanism(name).options_after_full(rotary=config.position == "rope")
    kv_heads = config.num_kv_heads
    if kv_heads is not None and "num_kv_heads" not in known and "full" not in names:
        kv_heads = None
    return config.replace(
        attention=names if "full" in names else name,
        options={**config.options, name: {**chosen, **options}},
        num_kv_heads=kv_heads,
    )


@torch.no_grad()
def copy_weights(old: Decoder, new: Decoder, layers: tuple[int, ...]) -> list[str]:
    """Copy the weights of `old` into `new`; return parameters that `old` lacks. `ValueError` for one that can't fit."""
    weights, wanted = old.state_dict(), new.state_dict()
    for i in layers:
        for part in ("key", "value"):
            for kind in ("weight", "bias"):
                name = f"layers.{i}.attention.{part}.{kind}"
                if name in weights and name in wanted and weights[name].shape != wanted[name].shape:
                    weights[name] = shared_out(weights[name], wanted[name], old.blocks()[i].attention.config.num_heads)
    for name, weight in weights.items():
        if name not in wanted or wanted[name].shape != weight.shape:
            place = f"shape {list(wanted[name].shape)}" if name in wanted else "no place"
            raise ValueError(
                f"{name}, of shape {list(weight.shape)}, has {place} in a model with attention={new.config.attention}: "
                "this mechanism cannot replace the model's attention"
            )
    new.load_state_dict({**wanted, **weights})
    prefixes = tuple(f"layers.{i}.attention." for i in layers)
    missing = [name for name in wanted if name not in weights]
    assert all(name.startswith(prefixes) for name in missing), missing
    return missing


def shared_out(weight: Tensor, like: Tensor, heads: int) -> Tensor:
    """Repeat rows of shared key heads, `[G K, ..]`, for each query head, `[H K, ..]`, if the result fits `like`."""
    channels = like.shape[0] // heads
    if weight.shape[1:] != like.shape[1:] or weight.shape[0] % channels or like.shape[0] % weight.shape[0]:
        return weight
    return weight.unflatten(0, (-1, channels)).repeat_interleave(like.shape[0] // weight.shape[0], 0).flatten(0, 1)
