"""How much autograd keeps between forward and backward, counted in a run without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call

from subquad.ops.backends import use_backend


def activation_bytes(module: nn.Module, make_input: Callable[[], Tensor]) -> int:
    """Bytes of all tensors that `module(make_input())` in training keeps for its backward pass, parameters left out.

    Every storage counts once, whole, as it stays alive whole. Nothing is computed: tensors have shapes only. Whatever
    the module's mode, its dtype and device and the context of the call, what counts is the path of the CPU, on the
    backend `torch`, in float32 without autocast; a GPU also keeps the weights of every tile of a masked pattern.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # the reference keeps the number from being used again
        return tensor

    with _in_training(module), FakeTensorMode():
        own: dict[str, Any] = {name: _shape_of(p).requires_grad_() for name, p in module.named_parameters()}
        own |= {name: _shape_of(b) for name, b in module.named_buffers()}
        x = make_input()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = functional_call(module, own, (x,))
        parameters = {tensor.untyped_storage()._cdata for tensor in own.values()}
        total = sum(storage.nbytes() for number, storage in kept.items() if number not in parameters)
        del result
    return total


def has_data(tensor: Tensor) -> bool:
    """Whether it is a tensor of a real run, not one that has a shape only."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


@contextmanager
def _in_training(module: nn.Module) -> Iterator[None]:
    """Training on a CPU in float32, whatever is set outside; every submodule goes back to its own mode."""
    modes = [(part, part.training) for part in module.modules()]
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        for setting in (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
            use_backend("torch"),
        ):
            stack.enter_context(setting)
        try:
            module.train()
            torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(dtype)
            for part, training in modes:
                part.training = training


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
