"""The dtype of a trained model's weights, and weights of eight bits."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import nn

from subquad.config import suggest
from subquad.layers.attached import attached
from subquad.layers.int8 import Int8Linear

Dtype = Literal["float32", "bfloat16", "float16"]
Quantize = Literal["int8"]
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
QUANTIZED = get_args(Quantize)


def set_precision(model: nn.Module, dtype: str | None = None, quantize: str | None = None) -> None:
    """Convert a trained model in place: its weights to `dtype`, and the weights of its linear layers to `quantize`.

    `dtype` is float32, bfloat16 or float16; states and sums stay float32. `quantize` is int8: each linear layer, the
    head among them, becomes an `Int8Linear`; tables of embeddings, norms and convolutions keep `dtype`, and a tied head
    its own copy. None changes nothing. Raises `ValueError` for another value, and for a model that is in training
    mode, is quantized already, or (with `quantize`) has hooks or adapters.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; {suggest(dtype, DTYPES)}")
    if quantize is not None and quantize not in QUANTIZED:
        raise ValueError(f"unknown quantize {quantize!r}; {suggest(quantize, QUANTIZED)}")
    if dtype is None and quantize is None:
        return
    if model.training:
        raise ValueError("dtype and quantize are for inference, and the model is in training mode: call model.eval()")
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError("the model is quantized already: load it again to get other weights")
    if quantize is not None and (what := attached(model)) is not None:
        raise ValueError(f"quantize needs a model with nothing attached, and {what}: merge or remove it first")
    if dtype is not None:
        model.to(DTYPES[dtype])
    if quantize is not None:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, Int8Linear(child))
