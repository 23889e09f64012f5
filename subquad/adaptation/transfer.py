"""Attention transfer: replaced layers learn the outputs of the layers that they replace (Zhang et al. 2024, LoLCATs,
arXiv:2410.10254, section 3.2).

Shape letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.base import Branched
from subquad.models import Decoder


def attention_errors(teacher: Decoder, student: Decoder, layers: Sequence[int], tokens_BT: Tensor, /) -> list[Tensor]:
    """`e_i = ||s_i(z_i) - f_i(z_i)||^2 / ||f_i(z_i)||^2` for each of `layers`, with gradients to the student.

    z_i is what the teacher's layer i reads of `tokens`, f_i its attention with the output projection and s_i the
    student's. One pass of the teacher serves all layers, and no layer sees the errors of those below it. An error of 1
    is that of zeros.
    """
    seen = teacher_outputs(teacher, layers, tokens_BT)
    errors = []
    for i in layers:
        z_BTD, y_BTD = seen[i]
        mixer: Any = student.layers[i].attention
        own_BTD, _, _ = mixer.mix(z_BTD, None, None)
        errors.append((own_BTD - y_BTD).square().mean() / y_BTD.square().mean())
    return errors


@torch.no_grad()
def teacher_outputs(teacher: Decoder, layers: Sequence[int], tokens_BT: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """What each of `layers` of the teacher reads and gives, both `[B, T, D]`."""
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for i in layers:
            block = teacher.blocks()[i]
            stack.enter_context(_kept(block.attention_norm, inputs, i))
            for module in _outputs(block.attention):
                stack.enter_context(_kept(module, outputs, i))
        teacher.vectors(tokens_BT)
    return {i: (inputs[i], outputs[i]) for i in layers}


@contextmanager
def silenced(mixers: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block these mechanisms give zeros: what is left of their layers is the residual stream."""
    with ExitStack() as stack:
        for mixer in mixers:
            for module in _outputs(mixer):
                handle = module.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
                stack.callback(handle.remove)
        yield


@contextmanager
def without_branch(model: nn.Module, name: str) -> Iterator[None]:
    """Close the branch `name` of all mechanisms that have one."""
    with ExitStack() as stack:
        for module in branched(model):
            if name in module.branches:
                stack.enter_context(module.without(name))
        yield


@contextmanager
def windows_dropped(model: nn.Module, probability: float, generator: torch.Generator) -> Iterator[None]:
    """Close each layer's window with a probability; which ones is drawn at the start of the block."""
    with ExitStack() as stack:
        for module in branched(model):
            if float(torch.rand((), generator=generator)) < probability:
                stack.enter_context(module.without("window"))
        yield


def branched(model: nn.Module) -> list[Branched]:
    """The mechanisms that have branches."""
    return [module for module in model.modules() if isinstance(module, Branched)]


def _outputs(mixer: nn.Module) -> list[nn.Module]:
    """The linear layer whose result is the mechanism's."""
    return [module for name, module in mixer.named_modules() if name == "out"]


@contextmanager
def _kept(module: nn.Module, found: dict[int, Tensor], place: int) -> Iterator[None]:
    """Keep the module's output."""

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        found[place] = output

    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
