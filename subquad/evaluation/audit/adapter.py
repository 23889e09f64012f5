"""How an audit calls a model: in one pass, with padding, with a cache.

Shape letters: B batch, T tokens, S tokens in the cache and new ones, M outputs, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

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
        """Tokens are drawn below it; None: below the width of the logits."""
        return None

    def max_tokens(self, model: nn.Module) -> int | None:
        """The longest sequence that the model takes; None: any."""
        return None

    def sizes(self, model: nn.Module) -> list[int]:
        """Lengths around which the model may behave in another way: its windows, segments, chunks."""
        return []

    def no_cache(self, model: nn.Module) -> str | None:
        """Why decoding with a cache can't be checked; None where it can, by `step`."""
        return "no way to decode with a cache is known for it: give an Adapter with `step`"

    def no_padding(self, model: nn.Module) -> str | None:
        """Why padding can't be checked; None where `full` (and `step`) take a mask."""
        return None if _mask_name(model) else f"its forward has no parameter {' or '.join(MASK_NAMES)}"

    def passed(self, model: nn.Module) -> tuple[str, ...]:
        """The names of what goes to the model with padding; of these position_ids with a cache too."""
        name = _mask_name(model)
        return (name,) if name else ()

    def full(self, model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Logits `[B, M, V]` of the last M tokens; `mask` is bool, True for a real token."""
        name = _mask_name(model)
        named = {} if mask_BT is None or name is None else {name: mask_BT}
        return logits_of(model(tokens_BT, **named))

    def step(
        self, model: nn.Module, tokens_BT: Tensor, cache: Any | None, mask_BS: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Logits `[B, T, V]` of tokens that follow those in `cache` (None: nothing yet), and the cache after them.

        `mask` `[B, S]` also covers the tokens in the cache. The cache given may be changed in place.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")


def logits_of(output: Any) -> Tensor:
    """`output.logits`, the first of a tuple, or the tensor itself; `TypeError` where that is no `[B, T, V]`."""
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
    """All tensors that can be reached from a cache by its lists, mappings and attributes."""
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
    """The device of the model's first parameter or buffer; the CPU where it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _mask_name(model: nn.Module) -> str | None:
    names = inspect.signature(model.forward).parameters
    return next((name for name in MASK_NAMES if name in names), None)
