"""Errors for the inputs that a layer refuses, whose cause is looked for only then."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subquad.state import check_is_state


def refusal(layer: Any, x: Any, state: Any) -> Exception:
    """Return the error for an `x` that is not `[B, T, D]`, or for a state that this layer did not make."""
    try:
        check_is_state(state)
    except TypeError as error:
        return error
    dim, name = layer.config.dim, f"this {layer.name} layer"
    if not isinstance(x, Tensor):
        return TypeError(
            f"x must be a tensor [B, T, {dim}], got {type(x).__name__}; a layer returns two values: y, state = layer(x)"
        )
    if x.ndim != 3 or x.shape[-1] != dim:
        return ValueError(f"x must have shape [B, T, {dim}], got {tuple(x.shape)}")
    if "seen" in state and not layer.causal:
        return ValueError(f"{name} is not causal: it reads whole sequences and takes no state")
    if "seen" not in state and not layer.takes_handed:
        return ValueError(f"the state of a {layer.name} layer counts its tokens (entry 'seen'), this one does not")
    try:
        state.check(layer.config_hash, name, x.shape[0])
    except ValueError as error:
        return error
    raise AssertionError("the inputs fit")
