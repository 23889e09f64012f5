"""Subquad's attention in any transformers model: `register()` and `set_attention(model, ...)`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from subquad.hf.loading import PREFIX, StrictModel
from subquad.hf.pattern_attention import (
    OPTIONS,
    Part,
    attend_over,
    check_mechanism,
    check_options,
    mask_with_offset,
    parts_of,
    read_layout,
)

logger = logging.getLogger(__name__)

REFUSED = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias", "alibi", "head_mask", "cu_seq_lens_q")
"""Keyword arguments that a model may pass to its attention function and that ours does not compute."""

_BEFORE = "_attention_before_subquad"
"""Attribute of a model with the implementation that `set_attention(model, None)` restores."""


def register() -> list[str]:
    """Make `attn_implementation="subquad_<name>"` valid in every transformers model, and `config.subquad` effective.

    Registers each mechanism that is softmax attention over a pattern without parameters of its own: `subquad_full`,
    `subquad_window`, `subquad_llp`, `subquad_shifted`, `subquad_dilated`, `subquad_strided`, `subquad_longformer`
    (without its extra projections) and `subquad_bigbird`. From then on a configuration with `subquad` (such as
    `{"attention": "llp", "options": {"segment": 256}}`) creates a model with that attention, also by `from_pretrained`,
    unless the caller names another `attn_implementation`; and a model that runs one of them writes `subquad` to its
    config.json. Calling it again has no effect. Returns the registered names.
    """
    for name in OPTIONS:
        AttentionInterface.register(PREFIX + name, functools.partial(_attention, name))
        AttentionMaskInterface.register(PREFIX + name, mask_with_offset)
    if not isinstance(vars(PreTrainedConfig).get("subquad"), _Wanted):
        PreTrainedConfig.subquad = _Wanted()  # type: ignore[attr-defined]
        PreTrainedConfig.to_dict = _with_attention(PreTrainedConfig.to_dict)  # type: ignore[method-assign]
    return [PREFIX + name for name in OPTIONS]


def set_attention(model: PreTrainedModel, name: str | None, **options: Any) -> None:
    """Let `model` use the mechanism `name`, or with None its own attention again; record it in `model.config.subquad`.

    `model` is a causal language model of transformers, whose parameters do not change. `name` is one of those listed in
    `register`, and `options` are its options, such as `segment=256` for `llp`; others keep their defaults.

    Raises `ValueError` for an unknown mechanism, option or value and for an unsupported model, `TypeError` for anything
    but a transformers model. The model is then unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel of transformers, got {type(model).__name__}")
    register()
    config = model.config
    if name is None:
        if options:
            raise ValueError(f"name=None restores the model's own attention and takes no options, got {options}")
        vars(config).pop("subquad", None)
        if _runs(config) is not None:
            before = vars(model).pop(_BEFORE, None)
            model.set_attn_implementation(before or model.get_correct_attn_implementation(None))
        return
    parts_of(name, _heads(config), options)
    _check_model(model)
    if _runs(config) is None:
        vars(model)[_BEFORE] = config._attn_implementation
    model.set_attn_implementation(PREFIX + name)
    config.subquad = {"attention": name, "options": dict(options)}
    check_attention(model)


def check_attention(model: PreTrainedModel) -> None:
    """Raise `ValueError` if `model.config.subquad` names one of our mechanisms and the model runs another.

    It does if it was loaded before `register()`, or with another `attn_implementation`.
    """
    wanted, runs = vars(model.config).get("subquad"), model.config._attn_implementation
    if wanted is not None and runs != PREFIX + wanted_attention(wanted)[0]:
        raise ValueError(
            f"the configuration asks for subquad attention {wanted_attention(wanted)[0]!r}, but the model runs "
            f"{runs!r}: call subquad.hf.register() before from_pretrained, or subquad.hf.set_attention(model, ...)"
        )


def wanted_attention(entry: Any) -> tuple[str, dict[str, Any]]:
    """Return the mechanism and the options in a configuration's `subquad` entry; `ValueError` for a damaged entry."""
    values = dict(entry) if isinstance(entry, Mapping) else {}
    name, options = values.pop("attention", None), values.pop("options", {})
    if values or not isinstance(name, str) or not isinstance(options, Mapping):
        raise ValueError(f'config.subquad must be {{"attention": name, "options": {{...}}}}, got {entry!r}')
    check_mechanism(name)
    check_options(name, options)
    return name, dict(options)


class _Wanted:
    """The attribute `subquad` of configurations; setting it, as loading does, also selects the implementation."""

    def __get__(self, config: PreTrainedConfig | None, owner: type | None = None) -> Any:
        if config is None:
            return self
        if "subquad" not in vars(config):
            raise AttributeError(f"{type(config).__name__!r} object has no attribute 'subquad'")
        return vars(config)["subquad"]

    def __set__(self, config: PreTrainedConfig, entry: Any) -> None:
        name, options = wanted_attention(entry)
        vars(config)["subquad"] = {"attention": name, "options": options}
        runs = config._attn_implementation
        if runs is None:
            config._attn_implementation = PREFIX + name
        elif runs != PREFIX + name:
            logger.warning(
                "config.subquad asks for %r, but the implementation is %r: only "
                "subquad.hf.set_attention(model, ...) or model.set_attn_implementation(%r) changes what a model runs",
                name,
                runs,
                PREFIX + name,
            )

    def __delete__(self, config: PreTrainedConfig) -> None:
        del vars(config)["subquad"]


def _with_attention(to_dict: Any) -> Any:
    """Wrap `to_dict` to write `subquad` if the model runs one of our mechanisms and the entry is missing."""

    @functools.wraps(to_dict)
    def whole(self: PreTrainedConfig) -> dict[str, Any]:
        saved: dict[str, Any] = to_dict(self)
        name = _runs(self)
        if name is not None and "subquad" not in saved:
            saved["subquad"] = {"attention": name, "options": {}}
        return saved

    return whole


def _runs(config: PreTrainedConfig) -> str | None:
    """Return which of our mechanisms a model of this configuration runs, or None."""
    implementation = config._attn_implementation
    ours = isinstance(implementation, str) and implementation.removeprefix(PREFIX) in OPTIONS
    return implementation.removeprefix(PREFIX) if ours and implementation.startswith(PREFIX) else None


def _heads(config: PreTrainedConfig) -> int:
    heads = getattr(config, "num_attention_heads", None)
    if config.get_text_config() is not config or not isinstance(heads, int):
        raise ValueError(
            "subquad attention needs a causal language model with one configuration that has num_attention_heads, "
            f"got {type(config).__name__}"
        )
    return heads


def _check_model(model: PreTrainedModel) -> None:
    """Raise `ValueError` if the model's attention cannot be replaced."""
    config, kind = model.config, type(model).__name__
    if isinstance(model, StrictModel):
        raise ValueError(f"{kind} takes its attention from its own configuration: build or convert one with another")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{kind} does not attend through transformers' AttentionInterface: its attention cannot be set"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(f"subquad attention is for decoders, but {kind} attends to an encoder")
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {name for name in ("sliding_window", "attention_chunk_size") if getattr(config, name, None) is not None}
    others = sorted(kinds - {"full_attention"})
    if others:
        raise ValueError(
            f"subquad attention replaces full attention, but layers of {kind} have {', '.join(others)}: make all "
            "of them full first (layer_types all full_attention, sliding_window=None)"
        )
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        raise ValueError(f"subquad attention does not compute attn_logit_softcapping={softcap} of {kind}")


def _attention(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as the implementation `subquad_<name>`; return `[B, T, H, K]` and no weights."""
    for option in REFUSED:
        if kwargs.get(option) is not None:
            raise ValueError(f"subquad attention does not compute {option}, which {type(module).__name__} asks for")
    across = getattr(module, "is_cross_attention", False)
    if is_causal is False or across or getattr(module, "is_causal", True) is False:
        raise ValueError(f"subquad attention is causal, but {type(module).__name__} is not")
    parts = _parts(name, module, query.shape[1])
    layout = read_layout(attention_mask, query.shape[0], query.shape[2], key.shape[2])
    out_BHTK = attend_over(query, key, value, parts, layout, scaling, float(dropout))
    return out_BHTK.transpose(1, 2).contiguous(), None


def _parts(name: str, module: nn.Module, num_heads: int) -> tuple[Part, ...]:
    entry = vars(module.config).get("subquad") if isinstance(module.config, PreTrainedConfig) else None
    wanted, options = (name, {}) if entry is None else wanted_attention(entry)
    if wanted != name:
        raise ValueError(
            f"the model runs subquad_{name}, but its config.subquad names {wanted!r}: set both by "
            "subquad.hf.set_attention"
        )
    return parts_of(name, num_heads, options)
