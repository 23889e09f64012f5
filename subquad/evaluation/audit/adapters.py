"""How an audit calls a model: in one pass, with padding, with a cache. `Adapter` is for any module; others follow it.

Shape letters: B batch, T tokens, S tokens in the cache and new ones, M outputs, V vocabulary.
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
    """Calls an `nn.Module` from tokens `[B, T]` to logits `[B, T, V]` (or a tuple or an object that holds `logits`).

    Make a class of your own from it for a model with another interface or with a cache. Every method is given the
    model, since an audit works on copies of it. What a model can't do is reported as "not checked" with the reason.
    """

    aligned_at_end: bool = False
    """Whether a row's last output belongs to its last real token, wherever its padding is, also where the model has
    outputs for its last tokens alone."""
    positions: bool = True
    """Whether position_ids are passed with padding and with a cache, where the model takes them."""

    def vocab_size(self, model: nn.Module) -> int | None:
        """Return the number that tokens are drawn below; None: the width of the logits."""
        return None

    def max_tokens(self, model: nn.Module) -> int | None:
        """Return the longest sequence that the model takes; None: any."""
        return None

    def sizes(self, model: nn.Module) -> list[int]:
        """Return lengths around which the model may behave in another way: its windows, segments, chunks."""
        return []

    def no_cache(self, model: nn.Module) -> str | None:
        """Return why decoding with a cache can't be checked; None where it can, by `step`."""
        return "no way to decode with a cache is known for it: give an Adapter with `step`"

    def no_padding(self, model: nn.Module) -> str | None:
        """Return why padding can't be checked; None where `full` (and `step`) take a mask."""
        return None if _mask_name(model) else f"its forward has no parameter {' or '.join(MASK_NAMES)}"

    def passed(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of what goes to the model with padding; of these position_ids with a cache too."""
        name = _mask_name(model)
        return (name,) if name else ()

    def full(self, model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Return logits `[B, M, V]` of the last M tokens; `mask` is bool, True for a real token."""
        name = _mask_name(model)
        named = {} if mask_BT is None or name is None else {name: mask_BT}
        return logits_of(model(tokens_BT, **named))

    def step(
        self, model: nn.Module, tokens_BT: Tensor, cache: Any | None, mask_BS: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return logits `[B, T, V]` of tokens after those in `cache` (None: nothing yet), and the cache after them.

        `mask` `[B, S]` also covers the tokens in the cache. The cache given may be changed in place.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")


def logits_of(output: Any) -> Tensor:
    """Return `output.logits`, the first of a tuple, or the tensor itself; `TypeError` where that is no `[B, T, V]`."""
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
    """Return all tensors that can be reached from a cache by its lists, mappings and attributes."""
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


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer; the CPU where it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _mask_name(model: nn.Module) -> str | None:
    names = inspect.signature(model.forward).parameters
    return next((name for name in MASK_NAMES if name in names), None)


CACHE_NAMES = ("past_key_values", "cache_params", "state")
SIZE_WORDS = ("window", "segment", "chunk", "group", "block", "width", "stride", "latents")


class DecoderAdapter(Adapter):
    """Our own decoders and stacks: `(tokens, state, mask) -> (logits, state)`."""

    def __init__(self, model: Decoder) -> None:
        self.decoder = model
        self.aligned_at_end = model.predicts_last is not None

    def vocab_size(self, model: nn.Module) -> int | None:
        """Return the configuration's vocabulary."""
        return self.decoder.config.vocab_size

    def max_tokens(self, model: nn.Module) -> int | None:
        """Return the rows of a learned table of positions; None where there is none."""
        return self.decoder.most_tokens

    def sizes(self, model: nn.Module) -> list[int]:
        """Return the sizes that the layers' configurations name."""
        return named_sizes(self.decoder.token_settings())

    def no_cache(self, model: nn.Module) -> str | None:
        """Return the reason of a stack whose decoding differs from the full pass."""
        return self.decoder.inexact_decoding

    def no_padding(self, model: nn.Module) -> str | None:
        """Return None: padding is always possible."""
        return None

    def passed(self, model: nn.Module) -> tuple[str, ...]:
        """Return the mask's name."""
        return ("mask",)

    def full(self, model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Read the whole sequence, without a state."""
        return logits_of(model(tokens_BT, mask=mask_BT))

    def step(
        self, model: nn.Module, tokens_BT: Tensor, cache: Any | None, mask_BS: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Read on with the state; the mask is that of the new tokens alone, where any is padding."""
        mask_BT = None if mask_BS is None else mask_BS[:, mask_BS.shape[1] - tokens_BT.shape[1] :]
        logits, state = model(tokens_BT, cache, None if mask_BT is None or bool(mask_BT.all()) else mask_BT)
        return logits, state


class TransformersAdapter(Adapter):
    """A causal language model of transformers: by its forward's own parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.names = frozenset(inspect.signature(model.forward).parameters)
        self.cache_name = next((name for name in CACHE_NAMES if name in self.names), None)
        inner = getattr(model, "model", None)
        self.decoder = inner if isinstance(inner, Decoder) else None
        self.aligned_at_end = self.decoder is not None and self.decoder.predicts_last is not None

    def vocab_size(self, model: nn.Module) -> int | None:
        """Return the configuration's vocabulary."""
        return getattr(_text_config(model), "vocab_size", None)

    def max_tokens(self, model: nn.Module) -> int | None:
        """Return that of our decoders; of others `max_position_embeddings`, unless positions are scaled beyond it."""
        if self.decoder is not None:
            return self.decoder.most_tokens
        most = _own_length(model)
        return None if _dynamic(model) else most

    def sizes(self, model: nn.Module) -> list[int]:
        """Return the sizes that the configuration names."""
        if self.decoder is not None:
            return named_sizes(self.decoder.token_settings())
        named = named_sizes(_text_config(model).to_dict())
        beyond = _own_length(model) if _dynamic(model) else None
        return named if beyond is None else sorted({*named, beyond})

    def no_cache(self, model: nn.Module) -> str | None:
        """Return the reason where forward takes no cache."""
        if self.cache_name is None:
            return f"its forward has no parameter {' or '.join(CACHE_NAMES)}"
        return None if self.decoder is None else self.decoder.inexact_decoding

    def no_padding(self, model: nn.Module) -> str | None:
        """Return the reason where forward takes no mask."""
        return None if "attention_mask" in self.names else "its forward has no parameter attention_mask"

    def passed(self, model: nn.Module) -> tuple[str, ...]:
        """Return attention_mask, and position_ids where forward has it."""
        return tuple(name for name in ("attention_mask", "position_ids") if name in self.names)

    def full(self, model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Read without a cache."""
        named: dict[str, Any] = {"use_cache": False} if "use_cache" in self.names else {}
        if mask_BT is not None:
            named |= {"attention_mask": mask_BT.long(), **self.position_ids(mask_BT, tokens_BT.shape[1])}
        return logits_of(model(input_ids=tokens_BT, **named))

    def step(
        self, model: nn.Module, tokens_BT: Tensor, cache: Any | None, mask_BS: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Read on with the cache by the name that forward has for it; `cache_params` takes a mask only at first.

        What is carried is the model's cache and the tokens in it, since position_ids are passed where forward has them.
        """
        assert self.cache_name is not None  # or no_cache has said so
        before, seen = cache if cache is not None else (self.new_cache(model), 0)
        mask_BT = mask_BS
        if seen and self.cache_name != "past_key_values":
            mask_BT = None  # as transformers' generate: such a state has no places that a mask could hide
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
        """Return the cache that transformers' generate gives to the first call: some models fill it and return none."""
        supported = getattr(model, "_supports_default_dynamic_cache", None)
        if self.cache_name != "past_key_values" or supported is None or not supported():
            return None
        from transformers import DynamicCache

        return DynamicCache(config=_text_config(model))

    def position_ids(self, mask_BS: Tensor, tokens: int) -> dict[str, Tensor]:
        """Return the count of real tokens before each of the last ones, where forward has position_ids."""
        if not self.positions or "position_ids" not in self.names:
            return {}
        return {"position_ids": (mask_BS.long().cumsum(1) - 1).clamp(min=0)[:, mask_BS.shape[1] - tokens :]}


def adapter_for(model: nn.Module) -> Adapter:
    """Return the adapter that fits; `ValueError` for a model that is no causal language model by its own account."""
    if isinstance(model, Decoder):
        return DecoderAdapter(model)
    if getattr(model, "reads_whole_sequences", False):
        raise ValueError(
            f"{type(model).__name__} is no causal language model: it reads whole sequences, so every output depends on "
            "later tokens by design; an audit is for models that predict the next token"
        )
    module: Any = sys.modules.get("transformers.modeling_utils")  # a model of transformers has loaded it
    if module is None or not isinstance(model, module.PreTrainedModel):
        return Adapter()
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder: an audit is for causal language models, from tokens to logits")
    if not model.can_generate():
        raise ValueError(
            f"{name} is no causal language model (transformers can't generate with it): an audit needs logits of "
            "the next token; load it by AutoModelForCausalLM"
        )
    return TransformersAdapter(model)


def _own_length(model: nn.Module) -> int | None:
    most = getattr(_text_config(model), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def _dynamic(model: nn.Module) -> bool:
    """Whether the frequencies of rotary positions change where an input is longer than `max_position_embeddings`."""
    rope = getattr(_text_config(model), "rope_parameters", None)
    return isinstance(rope, dict) and rope.get("rope_type") == "dynamic"


def named_sizes(values: Any) -> list[int]:
    """Return whole numbers in a configuration whose names speak of windows, segments, chunks or the like."""
    found: set[int] = set()
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            found |= set(named_sizes(value))
        elif any(word in str(name) for word in SIZE_WORDS) and isinstance(value, int) and value > 1:
            found.add(value)
    return sorted(found)


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)
