"""Run the two trainings of a conversion.

First attention transfer: replaced layers learn the outputs of the layers that they replace (Zhang et al. 2024, LoLCATs,
arXiv:2410.10254, section 3.2). Then low-rank adaptation of the whole model on the loss of the next token.
Shape letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from subquad.adaptation.config import ConvertConfig
from subquad.attention.branches import Branched
from subquad.hf import SubquadForCausalLM, lora
from subquad.models import Decoder
from subquad.training.errors import NonFiniteError
from subquad.training.schedule import ScheduleConfig


def attention_errors(teacher: Decoder, student: Decoder, layers: Sequence[int], tokens_BT: Tensor, /) -> list[Tensor]:
    """Return `e_i = ||s_i(z_i) - f_i(z_i)||^2 / ||f_i(z_i)||^2` for each of `layers`, with gradients to the student.

    z_i is the input of the teacher's layer i for `tokens`, f_i its attention with the output projection, and s_i the
    student's. One pass of the teacher serves all layers, and no layer sees the errors of those below it. An output of
    zeros has an error of 1.
    """
    seen = teacher_outputs(teacher, layers, tokens_BT)
    errors = []
    for i in layers:
        z_BTD, y_BTD = seen[i]
        mixer: Any = student.layers[i].attention
        own_BTD, _ = mixer(z_BTD)
        errors.append((own_BTD - y_BTD).square().mean() / y_BTD.square().mean())
    return errors


@torch.no_grad()
def teacher_outputs(teacher: Decoder, layers: Sequence[int], tokens_BT: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Map each of `layers` to the input and the output of the teacher's attention there, both `[B, T, D]`."""
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for i in layers:
            block = teacher.blocks()[i]
            stack.enter_context(block.register_forward_pre_hook(partial(_keep_input, inputs, i)))
            for module in _outputs(block.attention):
                stack.enter_context(_keep(module, outputs, i))
        teacher.vectors(tokens_BT)
    return {i: (inputs[i], outputs[i]) for i in layers}


@contextmanager
def silenced(mixers: Sequence[nn.Module]) -> Iterator[None]:
    """Zero the outputs of `mixers` within the block, which leaves the residual stream of their layers."""
    with ExitStack() as stack:
        for mixer in mixers:
            for module in _outputs(mixer):
                zeros = module.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
                stack.enter_context(zeros)
        yield


@contextmanager
def without_branch(model: nn.Module, name: str) -> Iterator[None]:
    """Close the branch `name` of all mechanisms that have it, within the block."""
    with ExitStack() as stack:
        for module in branched(model):
            if name in module.branches:
                stack.enter_context(module.without(name))
        yield


@contextmanager
def windows_dropped(model: nn.Module, probability: float, generator: torch.Generator) -> Iterator[None]:
    """Close each layer's window with `probability`, drawn once from `generator` at the start of the block."""
    with ExitStack() as stack:
        for module in branched(model):
            if float(torch.rand((), generator=generator)) < probability:
                stack.enter_context(module.without("window"))
        yield


def branched(model: nn.Module) -> list[Branched]:
    """Return the mechanisms of `model` that have branches."""
    return [module for module in model.modules() if isinstance(module, Branched)]


def _outputs(mixer: nn.Module) -> list[nn.Module]:
    """Return the output projection of `mixer`, as a list."""
    return [module for name, module in mixer.named_modules() if name == "out"]


def _keep_input(found: dict[int, Tensor], place: int, block: Any, inputs: tuple[Any, ...]) -> None:
    """Store what the mechanism of `block` reads in `found[place]`."""
    found[place] = block.attention_input(inputs[0])


def _keep(module: nn.Module, found: dict[int, Tensor], place: int) -> RemovableHandle:
    """Store each output of `module` in `found[place]` until the returned handle is removed."""

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        found[place] = output

    return module.register_forward_hook(keep)


Progress = Callable[[str, int, int, float], None]
"""Called with (stage, steps done, total steps, loss)."""
CLIP = 1.0
SHOWN = 20
"""Points of a training curve kept in the report."""


@dataclass(frozen=True)
class Curve:
    """Training curve: the mean loss over consecutive spans of steps."""

    steps: list[int]
    """Last step of each span."""
    losses: list[float]


def optimise(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    batches: Iterator[Tensor],
    config: ConvertConfig,
    stage: Literal["match", "lora"],
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Curve:
    """Train `parameters` of `model` on `loss_of(batch)` with AdamW without decay, by the settings of `stage`.

    The learning rate warms up over a twentieth of the steps, then falls by half a cosine to a tenth. Windows are closed
    with a probability that falls to 0, drawn from `generator`. Raises `NonFiniteError` before a step whose loss is not
    finite.
    """
    settings, accumulation = getattr(config, stage), config.batch.accumulation
    lr, steps = settings.lr, settings.steps
    schedule = ScheduleConfig(warmup=steps // 20)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    dropped, device = config.window_dropout(stage), parameters[0].device
    losses: list[float] = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * schedule.factor(step, steps)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(accumulation):
            tokens_BT = next(batches).to(device)
            with windows_dropped(model, dropped * (1 - step / max(1, steps - 1)), generator):
                loss = loss_of(tokens_BT) / accumulation
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            at = f"step {step + 1} of {steps} of stage {stage}"
            raise NonFiniteError(f"the loss is {total} at {at}, which is discarded; choose {stage}.lr below {lr:g}")
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        losses.append(total)
        if progress:
            progress(stage, step + 1, steps, total)
    edges = sorted({round(steps * part / SHOWN) for part in range(SHOWN + 1)})
    return Curve(edges[1:], [sum(losses[a:b]) / (b - a) for a, b in pairwise(edges)])


def match(
    teacher: Decoder,
    student: Decoder,
    layers: Sequence[int],
    new: Sequence[str],
    batches: Iterator[Tensor],
    config: ConvertConfig,
    progress: Progress | None = None,
) -> Curve:
    """Train the student's attention in `layers` (or only the parameters `new`) on the mean of `attention_errors`."""
    prefixes = tuple(f"layers.{i}.attention." for i in layers)
    trained = [
        parameter
        for name, parameter in student.named_parameters()
        if (name in new if config.match.train == "new" else name.startswith(prefixes))
    ]

    def loss_of(tokens_BT: Tensor) -> Tensor:
        return torch.stack(attention_errors(teacher, student, layers, tokens_BT[:, :-1])).mean()

    generator = torch.Generator().manual_seed(config.seed + 1)
    with only(student, trained):
        return optimise(student, trained, loss_of, batches, config, "match", generator, progress)


def tune(
    model: SubquadForCausalLM,
    new: Sequence[str],
    batches: Iterator[Tensor],
    config: ConvertConfig,
    progress: Progress | None = None,
) -> Curve:
    """Train low-rank factors in all linear layers that the original has, and the parameters `new`, on the loss of the
    next token, then merge the factors into the weights."""
    own = {f"model.decoder.{name}" for name in new}
    trained = [parameter for name, parameter in model.named_parameters() if name in own]
    wanted = [name for name in lora.targets(model) if f"{name}.weight" not in own]
    adapted = lora.add_adapter(model, rank=config.lora.rank, alpha=config.lora.alpha, wanted=wanted)
    for parameter in trained:
        parameter.requires_grad_(True)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    decoder: Decoder = model.decoder
    config.loss.apply_to(decoder)
    decoder.criterion.train()  # its terms count in training alone; the rest of the model stays without dropout

    def loss_of(tokens_BT: Tensor) -> Tensor:
        return decoder.loss(tokens_BT[:, :-1], tokens_BT[:, 1:])

    generator = torch.Generator().manual_seed(config.seed + 2)
    curve = optimise(decoder, parameters, loss_of, batches, config, "lora", generator, progress)
    lora.merge(adapted)
    model.requires_grad_(True)
    return curve


@contextmanager
def only(model: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[None]:
    """Enable gradients for only the parameters `trained` of `model` within the block."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = {id(parameter) for parameter in trained}
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in chosen)
    try:
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)
            parameter.grad = None
