"""Checks for torch's tensor parallelism (`parallelize_module`), where each process has some of the heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def check_divided(layer: Any) -> None:
    """Raise `ValueError` if processes divide the layer's parameters other than by the same whole heads of each."""
    # Runs once per sequence: `layer.parameters()` would take ten times as long as this loop.
    for module in layer._modules.values():
        for parameter in () if module is None else module._parameters.values():
            if parameter is not None and type(parameter) is not nn.Parameter:
                check_plan(layer)
                return


def check_plan(layer: Any) -> None:
    """Raise `ValueError` unless every parameter is divided by heads, if torch's tensor parallelism has divided any.

    `layer.divisible` has the numbers of heads that the processes must share equally.
    """
    # FSDP divides parameters too, but gathers those of a module before its call.
    gathered = tuple(f"{name}." for name, module in layer.named_modules() if name and hasattr(module, "unshard"))
    own = {name: parameter for name, parameter in layer.named_parameters() if not name.startswith(gathered)}
    meshes = [parameter.device_mesh for parameter in own.values() if hasattr(parameter, "placements")]
    if not meshes:
        return
    ranks, heads = meshes[0].size(), layer.divisible
    what = f"heads cannot be divided among {ranks} processes in this {layer.name} layer"
    if not heads:
        raise ValueError(
            f"{what}: with its options they are not all alike, or read each other; leave its projections out of the "
            "plan of parallelize_module"
        )
    if any(number % ranks for number in heads):
        raise ValueError(f"{what}: it has {min(heads)}, which must be a multiple of the processes")
    whole = sorted(name for name, parameter in own.items() if not is_divided(name, parameter))
    if whole:
        raise ValueError(
            f"{what}: {', '.join(whole)} would not be divided by heads. The plan of parallelize_module must give the "
            "output projections (out, *_out) RowwiseParallel and all others ColwiseParallel; weights beside those, "
            "such as norms and sinks, can't be divided: choose options without them"
        )


def is_divided(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is cut by heads, or is a vector (a bias) that torch keeps equal on all processes."""
    placements = getattr(parameter, "placements", ())
    module = name.rpartition(".")[0]
    columns = int(module == "out" or module.endswith("_out"))
    return any(parameter.ndim < 2 or placement.is_shard(columns) for placement in placements)


def check_even(layer: Any, q_BHTK: Tensor, kv_BGTK: Tensor, share: int = 1) -> None:
    """Raise `ValueError` unless a process has `share` query heads for each of its key or value heads."""
    if q_BHTK.shape[1] != kv_BGTK.shape[1] * share:
        raise uneven(layer, q_BHTK.shape[1], kv_BGTK.shape[1])


def uneven(layer: Any, queries: int, keys: int) -> ValueError:
    """Return the error for a process that has other parts of the query heads than of the key heads."""
    return ValueError(
        f"heads cannot be divided for some of the projections: a process has {queries} query heads and {keys} key "
        f"heads of this {layer.name} layer; the plan of parallelize_module must gather all outputs or none"
    )
