"""How much autograd keeps between forward and backward, counted in a run without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call


def activation_bytes(module: nn.Module, make_input: Callable[[], Tensor]) -> int:
    """Bytes of all tensors that `module(make_input())` in training keeps for its backward pass, parameters left out.

    Every storage counts once, whole, as it stays alive whole. Nothing is computed: tensors have shapes only.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # the reference keeps the number from being used again
        return tensor

    with FakeTensorMode():
        own: dict[str, Any] = {name: _shape_of(p).requires_grad_() for name, p in module.named_parameters()}
        own |= {name: _shape_of(b) for name, b in module.named_buffers()}
        x = make_input()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = functional_call(module, own, (x,))
        parameters = {tensor.untyped_storage()._cdata for tensor in own.values()}
        total = sum(storage.nbytes() for number, storage in kept.items() if number not in parameters)
        del result
    return total


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
