"""Find out which derivatives are taken of a call's tensors, and whether their values can be read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")


def beyond_backward(*tensors: Tensor | None) -> bool:
    """Return whether derivatives are taken forward (`jvp`, `dual_level`) or by `torch.func.grad`.

    Custom operators have a backward pass for `Tensor.backward` alone: a tangent that enters one is lost.
    """
    if torch.compiler.is_dynamo_compiling():
        # It traces without the caller's tangents: inside a level every tensor may have one. `torch.func.grad` of custom
        # operators it refuses itself.
        return forward_ad._current_level >= 0
    if forward_ad._current_level >= 0 and has_tangent(*tensors):
        return True
    return functorch.peek_interpreter_stack() is not None and any(x is not None and _tracked(x) for x in tensors)


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether a tensor carries a forward-mode derivative."""
    return forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def without_tangents(backward: Callable[P, R]) -> Callable[P, R]:
    """Wrap the backward pass of an operator, which would lose a tangent of the incoming gradients: raise instead."""

    @functools.wraps(backward)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if has_tangent(*(x for x in args if isinstance(x, Tensor))):
            raise NotImplementedError(
                "the backward pass of subquad's operators has no forward-mode derivative; call the layer inside "
                "`with subquad.ops.backends.use_backend('reference')`"
            )
        return backward(*args, **kwargs)

    return wrapped


def saves(*tensors: Tensor | None) -> bool:
    """Return whether a call on these tensors may have a backward pass, for which it has to keep what that reads."""
    if not torch.is_grad_enabled():
        return False
    # torch.compile does not say whether it traces a `vmap`, inside which tensors hide what they require.
    if torch.compiler.is_dynamo_compiling() or functorch.peek_interpreter_stack() is not None:
        return True
    return any(x is not None and x.requires_grad for x in tensors)


def recorded(*tensors: Tensor | None) -> bool:
    """Return whether autograd records a call on these tensors."""
    if not torch.is_grad_enabled():
        return False
    # Inside `torch.func.vmap` a tensor does not say that the one which it wraps requires gradients.
    return is_transformed() or any(x is not None and x.requires_grad for x in tensors)


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is active."""
    return not torch.compiler.is_dynamo_compiling() and functorch.peek_interpreter_stack() is not None


def has_values(x: Tensor) -> bool:
    """Return whether Python may read the values of a tensor: not in a compiled, exported, counted or mapped call."""
    return type(x) is Tensor and x.device.type != "meta" and not torch.compiler.is_compiling() and not is_transformed()


def to_numpy(x: Tensor, what: str) -> np.ndarray:
    """Return the values of integers or bools, inside a transform too; `ValueError` if `torch.func.vmap` maps over x."""
    if not is_transformed():
        return x.detach().cpu().numpy()
    x = x.cpu()
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            raise ValueError(f"torch.func.vmap can't map over {what}, whose values decide how rows are laid out")
        x = functorch.get_unwrapped(x)
    return np.array(x.tolist()).reshape(x.shape)  # `x.numpy()` would be transformed itself


def _tracked(x: Tensor) -> bool:
    """Return whether a gradient of `torch.func` is taken of x."""
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False
