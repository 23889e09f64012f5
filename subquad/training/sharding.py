"""Sharded models (FSDP2: weights, gradients and optimizer states split over the processes) and their files.

Weights are always saved whole, as `model.safetensors`, which any number of processes reads, sharded or not. Optimizer
states are saved by torch.distributed.checkpoint: each process writes its shards as safetensors in the folder
`optimizer`, and loading redistributes them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from subquad.parsing import read_json
from subquad.training.errors import CheckpointError
from subquad.training.processes import Processes

OPTIMIZER = "optimizer"
"""Folder of the optimizer states in a checkpoint."""
NAMES = "names.json"
"""File in that folder that lists the states."""


def shard(model: Any, processes: Processes, *, bf16: bool) -> None:
    """Shard each block of `model` and the rest over all processes, starting from the weights of process 0.

    With `bf16`, blocks compute in bfloat16 and gradients are summed in float32; shards and optimizer states stay
    float32.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.distributed.broadcast(tensor.detach(), src=0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    mesh = torch.distributed.device_mesh.init_device_mesh(processes.device, (processes.world,))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    # Luna returns its memory as a view, which nothing changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    for block in model.blocks_to_shard():
        fully_shard(block, **options)
    fully_shard(model, **options)


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Gather the weights one by one on the CPU; return nothing without `keep`. All processes must call it."""
    state: dict[str, Tensor] = {}
    for names, part in own_tensors(model):
        complete = part.full_tensor() if isinstance(part, DTensor) else part
        if keep:
            state |= dict.fromkeys(names, complete.cpu())
    return state


def own_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return the tensors of a model's state, each once with all its names: a tied one has several."""
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [(known, tensors[known[0]].detach()) for known in names.values()]


@torch.no_grad()
def load_weights(model: nn.Module, file: Path) -> None:
    """Load this process's shards of the weights. Raises `CheckpointError` if names or shapes differ."""
    state = {names[0]: tensor for names, tensor in own_tensors(model)}
    with safe_open(file, "pt") as saved:
        names = set(saved.keys())
        if names != set(state):
            raise CheckpointError(f"{file} doesn't match the model's weights: {', '.join(sorted(names ^ set(state)))}")
        for name, tensor in state.items():
            fill(tensor, saved.get_tensor(name), name)


@torch.no_grad()
def fill(target: Tensor, value: Tensor, name: str) -> None:
    """Copy `value`, or this process's shard of it, into `target`. Raises `CheckpointError` if the shapes differ."""
    if target.shape != value.shape:
        raise CheckpointError(f"{name} has the shape {list(value.shape)}, but the model needs {list(target.shape)}")
    if isinstance(target, DTensor):
        value = distribute_tensor(
            value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        ).to_local()
        target = target.to_local()
    target.copy_(value)


def save_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path) -> list[str]:
    """Write this process's states to `folder / OPTIMIZER`; return all state names. All processes must call it."""
    states = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    writer = dcp.HuggingFaceStorageWriter(str(folder / OPTIMIZER), save_distributed=True)
    try:
        dcp.save(states, storage_writer=writer)
    except CheckpointException as error:  # derives from BaseException, so handlers of Exception would miss it
        raise OSError(_failures(error)) from error
    return sorted(states)


def list_states(folder: Path, names: list[str]) -> None:
    """Write the list of the states that `save_optimizer` wrote. Only one process may call it."""
    (folder / OPTIMIZER).mkdir(exist_ok=True)  # before the first step there are no states and no folder
    (folder / OPTIMIZER / NAMES).write_text(json.dumps(names))


def load_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Load the shards of `save_optimizer`. All processes must call it. Raises `CheckpointError` if they do not fit."""
    reader = dcp.HuggingFaceStorageReader(str(folder / OPTIMIZER))
    parameters = dict(model.named_parameters())
    saved = reader.read_metadata().state_dict_metadata
    if sorted(saved) != read_json(folder / OPTIMIZER / NAMES):
        raise CheckpointError(f"{folder / OPTIMIZER} does not have the states that its {NAMES} lists")
    states: dict[str, Tensor] = {}
    for key in saved:
        name, entry = key.rpartition(".")[0], saved[key]
        if name not in parameters:
            raise CheckpointError(f"{folder / OPTIMIZER} has a state of {name}, which the model lacks")
        assert isinstance(entry, TensorStorageMetadata)
        dtype = entry.properties.dtype
        mine = entry.size == parameters[name].shape
        if not mine and entry.size.numel() != 1:
            raise CheckpointError(
                f"{folder / OPTIMIZER} has {key} of shape {list(entry.size)}, but the weight has shape "
                f"{list(parameters[name].shape)}"
            )
        states[key] = torch.zeros_like(parameters[name], dtype=dtype) if mine else torch.zeros(entry.size, dtype=dtype)
    if not states:
        return
    with warnings.catch_warnings():  # dcp warns if there is only one process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            dcp.load(states, storage_reader=reader)
        except CheckpointException as error:
            raise CheckpointError(f"{folder / OPTIMIZER} cannot be read: {_failures(error)}") from error
    named = ((key.rpartition("."), value) for key, value in states.items())
    _put(optimizer, ((parameters[name], part, value) for (name, _, part), value in named))


def spread_optimizer(optimizer: Optimizer, file: Path) -> None:
    """Load whole states from an `optimizer.pt` into a sharded model's optimizer. Raises `CheckpointError`."""
    states = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["state"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not states.keys() <= set(range(len(parameters))):
        raise CheckpointError(f"{file} has states of {len(states)} parameters, but the model has {len(parameters)}")
    spread: list[tuple[Tensor, str, Tensor]] = []
    for number, state in states.items():
        parameter = parameters[number]
        for key, value in state.items():
            target = value.clone()
            if value.shape == parameter.shape:
                target = torch.zeros_like(parameter, dtype=value.dtype)
                fill(target, value, f"{key} of parameter {number} in {file}")
            spread.append((parameter, key, target))
    _put(optimizer, spread)


def _put(optimizer: Optimizer, states: Iterable[tuple[Tensor, str, Tensor]]) -> None:
    """Set the states of parameters on the right device: a fused or capturable optimizer counts steps on the GPU."""
    beside: set[int] = set()
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            beside |= {id(parameter) for parameter in group["params"]}
    for parameter, key, value in states:
        device = parameter.device if id(parameter) in beside else value.device
        optimizer.state[parameter][key] = value.detach().to(device)


def _failures(error: CheckpointException) -> str:
    return "; ".join(f"in process {rank}: {_last(failure)}" for rank, failure in error.failures.items())


def _last(failure: Any) -> str:
    """Return the last line of a failure in a `CheckpointException`: an error or a pair of error and trace."""
    error = failure[0] if isinstance(failure, tuple) else failure
    return str(error).strip().splitlines()[-1]
