"""Rotary settings: conversion between transformers' `rope_parameters` and ours."""

from __future__ import annotations

import logging
from typing import Any

from subquad.config import suggest
from subquad.layers.scaling import RopeScaling, rotated_channels
from subquad.models.config import DecoderConfig

logger = logging.getLogger(__name__)

_ORIGINAL = "original_max_position_embeddings"
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
_WORDS = {"rope_type", "type", "mrope_section", "mrope_interleaved"}
"""Parameters that are not numbers. Those of `mrope` tell three axes of an image apart; in text these are the same."""
_ALWAYS = _WORDS | {"rope_theta", "partial_rotary_factor"}


def check(config: Any) -> None:
    """Raise `ValueError` for an unsupported scaling and unknown or non-numeric parameters, before building a model."""
    values = getattr(config, "rope_parameters", None) or {}
    kind = values.get("rope_type", "default")
    if kind not in _KEYS:
        raise ValueError(
            f"our decoder does not support {config.model_type} with rope_type={kind!r}; {suggest(str(kind), _KEYS)}"
        )
    known = _ALWAYS | {key for keys in _KEYS.values() for key in keys}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{config.model_type} has the rope parameter {key!r}; {suggest(key, known)}")
        if key not in _WORDS and not isinstance(value, int | float | None):
            raise ValueError(f"the rope parameter {key!r} of {config.model_type} must be a number, got {value!r}")


def read(config: Any, *, partial: bool = False) -> dict[str, Any]:
    """Return `rope_base`, `rope_fraction`, `rope_scaling`.

    Raises as `check`, for a fraction of the channels unless `partial`, and for an odd number of rotated channels.
    """
    check(config)
    values = dict(config.rope_parameters)
    kind = values.get("rope_type", "default")
    fraction = values.get("partial_rotary_factor", 1.0)
    if fraction != 1 and not partial:
        raise ValueError(
            f"our decoder does not support {config.model_type} with partial_rotary_factor={fraction}; it must be 1"
        )
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = rotated_channels(channels, fraction)
    if rotated % 2 or not rotated:
        raise ValueError(
            f"our decoder does not support {config.model_type} with head_dim={channels} and "
            f"partial_rotary_factor={fraction}; they must rotate an even number of channels, got {rotated}"
        )
    return {
        "rope_base": float(values["rope_theta"]),
        "rope_fraction": float(fraction),
        "rope_scaling": None if kind == "default" else _scaling(config, kind, values),
    }


def _scaling(config: Any, kind: str, values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: values[key] for key in _KEYS[kind] if values.get(key) is not None}
    original = kept.pop(_ORIGINAL, None)
    if kind == "dynamic":
        original = config.max_position_embeddings
        logger.warning(
            "dynamic rope scaling: transformers changes the frequencies with every call longer than %d tokens, our "
            "decoder keeps them fixed; rope_scaling.length sets the length that they are for",
            original,
        )
    if kind == "yarn":
        kept.setdefault("factor", config.max_position_embeddings / original)
        for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
            if not kept.get(name, True):
                del kept[name]  # transformers treats zero as its default
    return RopeScaling.from_dict({"kind": kind, "original": original, **kept}, where="rope_parameters").to_dict()


def write(config: DecoderConfig, *, partial: bool = False) -> dict[str, Any]:
    """Return `rope_parameters` and `max_position_embeddings` for a transformers configuration.

    `partial` names the fraction even if it is 1, for families whose own default is less. Raises `ValueError` for
    `dynamic` scaling with a fixed length.
    """
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    positions, scaling = config.max_positions, config.rope_scaling
    if partial or config.rope_fraction != 1:
        values["partial_rotary_factor"] = config.rope_fraction
    if scaling is not None and scaling.kind == "dynamic" and scaling.length is not None:
        raise ValueError(
            f"transformers uses the length of each call and does not support rope_scaling.length={scaling.length}; "
            "set rope_base to the equivalent base and leave rope_scaling out"
        )
    if scaling is not None:
        values["rope_type"] = scaling.kind
        for key in _KEYS[scaling.kind]:
            value = scaling.original if key == _ORIGINAL else getattr(scaling, key)
            if value is not None:
                values[key] = value
        if scaling.kind == "dynamic":
            positions = scaling.original or positions
    return {"rope_parameters": values, "max_position_embeddings": positions}
