"""Adapters through which an audit calls a model: in one pass, with padding, with a cache.

Shape letters: B batch, T tokens, S tokens including those in the cache, M outputs, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from subquad.models import Decoder

MASK_NAMES = ("attention_mask", "mask")


class Adapter:
    """Call an `nn.Module` from tokens `[B, T]` to logits `[B, T, V]`, in a tuple or an object with `logits` or alone.

    Subclass it for a model with another interface or with a cache. Every method gets the model, since an audit works on
    copies of it. Checks that the adapter can't serve are reported as "not checked", with the reason.
    """

    aligned_at_end: bool = False
    """Whether a row's last output belongs to its last real token, wherever its padding is. For models whose outputs
    cover only the last tokens."""
    positions: bool = True
    """Whether to pass position_ids with padding and with a cache, if the model takes them."""

    def vocab_size(self, model: nn.Module) -> int | None:
        """Return the exclusive upper limit of random tokens; None means the width of the logits."""
        return None

    def max_tokens(self, model: nn.Module) -> int | None:
        """Return the length of the longest sequence that the model takes; None means any."""
        return None

    def sizes(self, model: nn.Module) -> list[int]:
        """Return lengths around which behaviour may change: windows, segments, chunks."""
        return []

    def no_cache(self, model: nn.Module) -> str | None:
        """Return the reason why decoding with a cache can't be checked; None if `step` works."""
        return "decoding with a cache needs an Adapter with `step`"

    def no_padding(self, model: nn.Module) -> str | None:
        """Return the reason why padding can't be checked; None if `full` (and `step`) take a mask."""
        return None if _mask_name(model) else f"its forward has no parameter {' or '.join(MASK_NAMES)}"

    def passed(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the arguments passed with padding; position_ids are passed with a cache too."""
        name = _mask_name(model)
        return (name,) if name else ()

    def full(self, model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Return logits `[B, M, V]` of the last M tokens; the mask is bool, True for a real token."""
        name = _mask_name(model)
        named = {} if mask_BT is None or name is None else {name: mask_BT}
        return logits_of(model(tokens_BT, **named))

    def step(
        self, model: nn.Module, tokens_BT: Tensor, cache: Any | None, mask_BS: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Continue from `cache` (None: empty) with `tokens_BT`; return their logits `[B, T, V]` and the new cache.

        `mask_BS` also covers the tokens in the cache. The given cache may be changed in place.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")


def logits_of(output: Any) -> Tensor:
    """Return `output.logits`, a tuple's first item, or the tensor itself; `TypeError` unless it is `[B, T, V]`."""
    if isinstance(output, dict) and "logits" in output:
        output = output["logits"]
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or output.ndim != 3 or not output.is_floating_point():
        kind = f"{list(output.shape)} of {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(f"a causal language model must return logits [B, T, V], got {kind}")
    return output


def tensors_in(cache: Any) -> list[Tensor]:
    """Return all tensors reachable from a cache through lists, mappings and attributes."""
    found, seen, todo = list[Tensor](), set[int](), [cache]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, nn.Module | str | bytes | type):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple | set):
            todo += item
        elif hasattr(item, "__dict__"):
            todo += vars(item).values()
    return found


def _mask_name(model: nn.Module) -> str | None:
    names = inspect.signature(model.forward).parameters
    return next((name for name in MASK_NAMES if name in names), None)


CACHE_NAMES = ("past_key_values", "cache_params", "state")
SIZE_WORDS = ("window", "segment", "chunk", "group", "block", "width", "stride", "latents")


class DecoderAdapter(Adapter):
    """Adapter for a `Decoder`: `(tokens, state, mask) -> (logits, state)`."""

    def __init__(self, model: Decoder) -> None:
        self.decoder = model
        self.aligned_at_end = model.predicts_last is not None

    def vocab_size(self, model: nn.Module) -> int | None:
        return self.decoder.config.vocab_size

    def max_tokens(self, model: nn.Module) -> int | None:
        return self.decoder.most_tokens

    def sizes(self, model: nn.Module) -> list[int]:
        return named_sizes(self.decoder.token_settings())

    def no_cache(self, model: nn.Module) -> str | None:
        """Return the reason of a stack that by design decodes differently from a full pass."""
        return self.decoder.inexact_decoding

    def step(
        self, model: nn.Module, tokens_BT: Tensor, cache: Any | None, mask_BS: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Continue from the state; a mask of the new tokens is passed only if some are padding."""
        mask_BT = None if mask_BS is None else mask_BS[:, mask_BS.shape[1] - tokens_BT.shape[1] :]
        logits, state = model(tokens_BT, cache, None if mask_BT is None or bool(mask_BT.all()) else mask_BT)
        return logits, state


class TransformersAdapter(Adapter):
    """Adapter for a causal transformers model, by the parameters of its forward."""

    def __init__(self, model: nn.Module) -> None:
        self.names = frozenset(inspect.signature(model.forward).parameters)
        self.cache_name = next((name for name in CACHE_NAMES if name in self.names), None)
        inner = getattr(model, "decoder", None)
        self.decoder = inner if isinstance(inner, Decoder) else None
        self.aligned_at_end = self.decoder is not None and self.decoder.predicts_last is not None

    def vocab_size(self, model: nn.Module) -> int | None:
        return getattr(_text_config(model), "vocab_size", None)

    def max_tokens(self, model: nn.Module) -> int | None:
        """Return a decoder's limit, else `max_position_embeddings` unless longer inputs rescale positions."""
        if self.decoder is not None:
            return self.decoder.most_tokens
        most = _own_length(model)
        return None if _dynamic(model) else most

    def sizes(self, model: nn.Module) -> list[int]:
        """Return the sizes in the configuration."""
        if self.decoder is not None:
            return named_sizes(self.decoder.token_settings())
        named = named_sizes(_text_config(model).to_dict())
        beyond = _own_length(model) if _dynamic(model) else None
        return named if beyond is None else sorted({*named, beyond})

    def no_cache(self, model: nn.Module) -> str | None:
        """Return the reason if forward takes no cache or the model by design decodes differently."""
        if self.cache_name is None:
            return f"its forward has no parameter {' or '.join(CACHE_NAMES)}"
        return None if self.decoder is None else self.decoder.inexact_decoding

    def no_padding(self, model: nn.Module) -> str | None:
        return None if "attention_mask" in self.names else "its forward has no parameter attention_mask"

    def passed(self, model: nn.Module) -> tuple[str, ...]:
        """Return attention_mask and position_ids, as far as forward has them."""
        return tuple(name for name in ("attention_mask", "position_ids") if name in self.names)

    def full(self, model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Read whole sequences without a cache."""
        named: dict[str, Any] = {"use_cache": False} if "use_cache" in self.names else {}
        if mask_BT is not None:
            named |= {"attention_mask": mask_BT.long(), **self.position_ids(mask_BT, tokens_BT.shape[1])}
        return logits_of(model(input_ids=tokens_BT, **named))

    def step(
        self, model: nn.Module, tokens_BT: Tensor, cache: Any | None, mask_BS: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Continue from the cache, passed by the name that forward has for it.

        The cache carried is a pair: the model's own cache and its number of tokens, which position_ids need.
        """
        assert self.cache_name is not None  # no_cache gives the reason otherwise
        before, seen = cache if cache is not None else (self.new_cache(model), 0)
        mask_BT = mask_BS
        if seen and self.cache_name != "past_key_values":
            mask_BT = None  # as in transformers' generate: a recurrent state has no positions to mask
        tokens = tokens_BT.shape[1]
        named = {} if before is None else {self.cache_name: before}
        if mask_BT is not None:
            named["attention_mask"] = mask_BT.long()
        if mask_BS is None:
            mask_BS = torch.ones(tokens_BT.shape[0], seen + tokens, device=tokens_BT.device)
        output = model(input_ids=tokens_BT, use_cache=True, **named, **self.position_ids(mask_BS, tokens))
        after = getattr(output, self.cache_name, None)
        after = before if after is None else after
        if not tensors_in(after):
            raise ValueError(f"the model returned no {self.cache_name}")
        return logits_of(output), (after, seen + tokens)

    def new_cache(self, model: Any) -> Any | None:
        """Return the cache that transformers' generate passes first: some models fill it without returning it."""
        supported = getattr(model, "_supports_default_dynamic_cache", None)
        if self.cache_name != "past_key_values" or supported is None or not supported():
            return None
        from transformers import DynamicCache

        return DynamicCache(config=_text_config(model))

    def position_ids(self, mask_BS: Tensor, tokens: int) -> dict[str, Tensor]:
        """Return position_ids of the last `tokens` tokens, counting real tokens only; empty if forward has none."""
        if not self.positions or "position_ids" not in self.names:
            return {}
        return {"position_ids": (mask_BS.long().cumsum(1) - 1).clamp(min=0)[:, mask_BS.shape[1] - tokens :]}


def adapter_for(model: nn.Module) -> Adapter:
    """Return the adapter that fits the model; `ValueError` if it says that it isn't a causal language model."""
    if isinstance(model, Decoder):
        return DecoderAdapter(model)
    if getattr(model, "reads_whole_sequences", False):
        raise ValueError(
            f"{type(model).__name__} is not a causal language model: it reads whole sequences, so every output depends "
            "on later tokens by design; an audit is for models that predict the next token"
        )
    module: Any = sys.modules.get("transformers.modeling_utils")  # loaded if the model is a transformers model
    if module is None or not isinstance(model, module.PreTrainedModel):
        return Adapter()
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder: an audit is for causal language models, from tokens to logits")
    if not model.can_generate():
        raise ValueError(
            f"{name} is not a causal language model (transformers can't generate with it): an audit needs logits of "
            "the next token; load it with AutoModelForCausalLM"
        )
    return TransformersAdapter(model)


def _own_length(model: nn.Module) -> int | None:
    most = getattr(_text_config(model), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def _dynamic(model: nn.Module) -> bool:
    """Return whether inputs beyond `max_position_embeddings` change the rotary frequencies."""
    rope = getattr(_text_config(model), "rope_parameters", None)
    return isinstance(rope, dict) and rope.get("rope_type") == "dynamic"


def named_sizes(values: Any) -> list[int]:
    """Return whole numbers in a configuration whose names contain one of `SIZE_WORDS`."""
    found: set[int] = set()
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            found |= set(named_sizes(value))
        elif any(word in str(name) for word in SIZE_WORDS) and isinstance(value, int) and value > 1:
            found.add(value)
    return sorted(found)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)
