"""Our attention in any model of transformers, by one line: `register()`, and what a configuration then means."""

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
    parts_of,
    read_standing,
    standing_mask,
)

logger = logging.getLogger(__name__)

REFUSED = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias", "alibi", "head_mask", "cu_seq_lens_q")
"""What a model may ask of its attention function, by keyword, that ours does not compute."""

_BEFORE = "_attention_before_subquad"
"""Where a model keeps the name of the implementation that `set_attention(model, None)` gives back."""


def register() -> list[str]:
    """Make `attn_implementation="subquad_<name>"` valid in every transformers model, and `config.subquad` obeyed.

    Registers with `AttentionInterface` and `AttentionMaskInterface` each mechanism that is softmax attention over a
    pattern and has no parameters of its own: `subquad_full`, `subquad_window`, `subquad_llp`, `subquad_shifted`,
    `subquad_dilated`, `subquad_strided`, `subquad_longformer` (without its extra projections) and `subquad_bigbird`.
    From then on a configuration whose `subquad` is set (`{"attention": "llp", "options": {"segment": 256}}`) makes a
    model with that attention, one loaded by `from_pretrained` too, unless the caller names another
    `attn_implementation`; and a model that runs one of ours writes `subquad` to its config.json. May be called again.

    Returns the registered names.
    """
    for name in OPTIONS:
        AttentionInterface.register(PREFIX + name, functools.partial(_attention, name))
        AttentionMaskInterface.register(PREFIX + name, standing_mask)
    if not isinstance(vars(PreTrainedConfig).get("subquad"), _Wanted):
        PreTrainedConfig.subquad = _Wanted()  # type: ignore[attr-defined]
        PreTrainedConfig.to_dict = _with_attention(PreTrainedConfig.to_dict)  # type: ignore[method-assign]
    return [PREFIX + name for name in OPTIONS]


def set_attention(model: PreTrainedModel, name: str | None, **options: Any) -> None:
    """Let `model` attend as the mechanism `name` does with these options, and store that in `model.config.subquad`.

    Args:
        model: a causal language model of transformers; its parameters stay as they are.
        name: `llp`, `window`, ... (`register` lists them); None gives the model's own attention back.
        options: the mechanism's options, such as `segment=256` for `llp`; the others keep their defaults.

    Raises `ValueError` for a mechanism, an option or a value that does not fit, and for a model that ours cannot run
    in; `TypeError` for anything but a transformers model. The model is then as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel of transformers, got {type(model).__name__}")
    register()
    config = model.config
    if name is None:
        if options:
            raise ValueError(f"name=None gives the model's own attention back and takes no options, got {options}")
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
    """Raise `ValueError` where `model.config.subquad` asks for one of our mechanisms and the model runs another.

    That happens where a model was loaded before `register()`, or with an `attn_implementation` of the caller's.
    """
    wanted, runs = vars(model.config).get("subquad"), model.config._attn_implementation
    if wanted is not None and runs != PREFIX + wanted_attention(wanted)[0]:
        raise ValueError(
            f"the configuration asks for subquad attention {wanted_attention(wanted)[0]!r}, but the model runs "
            f"{runs!r}: call subquad.hf.register() before from_pretrained, or subquad.hf.set_attention(model, ...)"
        )


def wanted_attention(entry: Any) -> tuple[str, dict[str, Any]]:
    """Return mechanism and options of a configuration's entry `subquad`; `ValueError` where it is none."""
    values = dict(entry) if isinstance(entry, Mapping) else {}
    name, options = values.pop("attention", None), values.pop("options", {})
    if values or not isinstance(name, str) or not isinstance(options, Mapping):
        raise ValueError(f'config.subquad must be {{"attention": name, "options": {{...}}}}, got {entry!r}')
    check_mechanism(name)
    check_options(name, options)
    return name, dict(options)


class _Wanted:
    """The attribute `subquad` of configurations: setting it, as loading does, also chooses the implementation."""

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
    """Wrap `to_dict` so that it writes `subquad` where a model runs one of ours and no entry says so."""

    @functools.wraps(to_dict)
    def whole(self: PreTrainedConfig) -> dict[str, Any]:
        saved: dict[str, Any] = to_dict(self)
        name = _runs(self)
        if name is not None and "subquad" not in saved:
            saved["subquad"] = {"attention": name, "options": {}}
        return saved

    return whole


def _runs(config: PreTrainedConfig) -> str | None:
    """Return the mechanism of ours that a model of this configuration runs."""
    implementation = config._attn_implementation
    ours = isinstance(implementation, str) and implementation.removeprefix(PREFIX) in OPTIONS
    return implementation.removeprefix(PREFIX) if ours and implementation.startswith(PREFIX) else None


def _heads(config: PreTrainedConfig) -> int:
    heads = getattr(config, "num_attention_heads", None)
    if config.get_text_config() is not config or not isinstance(heads, int):
        raise ValueError(
            f"subquad attention is for causal language models of one configuration with num_attention_heads, "
            f"got {type(config).__name__}"
        )
    return heads


def _check_model(model: PreTrainedModel) -> None:
    """Raise `ValueError` where the model's attention is not ours to replace."""
    config, kind = model.config, type(model).__name__
    if isinstance(model, StrictModel):
        raise ValueError(f"{kind} has its attention from its own configuration: build or convert one with another")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{kind} does not attend through transformers' AttentionInterface: its attention cannot be set"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(f"subquad attention is for decoders, and {kind} attends to an encoder")
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        kinds = {name for name in ("sliding_window", "attention_chunk_size") if getattr(config, name, None) is not None}
    others = sorted(kinds - {"full_attention"})
    if others:
        raise ValueError(
            f"subquad attention replaces full attention, but layers of {kind} have {', '.join(others)}: make all "
            "of them full first (layer_types of full_attention alone, sliding_window=None)"
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
    """Attend as the implementation `subquad_<name>`: `[B, T, H, K]` and no weights."""
    for option in REFUSED:
        if kwargs.get(option) is not None:
            raise ValueError(f"subquad attention does not compute {option}, which {type(module).__name__} asks for")
    across = getattr(module, "is_cross_attention", False)
    if is_causal is False or across or getattr(module, "is_causal", True) is False:
        raise ValueError(f"subquad attention is causal, and {type(module).__name__} is not")
    parts = _parts(name, module, query.shape[1])
    standing = read_standing(attention_mask, query.shape[0], query.shape[2], key.shape[2])
    out_BHTK = attend_over(query, key, value, parts, standing, scaling, float(dropout))
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
