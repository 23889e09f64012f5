"""The two trainings of a conversion: matching of attention outputs, then low-rank adaptation of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from subquad.adaptation.config import ConvertConfig
from subquad.adaptation.text import Batches
from subquad.adaptation.transfer import attention_errors, windows_dropped
from subquad.hf import SubquadForCausalLM, lora
from subquad.models import Decoder
from subquad.training.errors import NonFiniteError
from subquad.training.schedule import ScheduleConfig

Progress = Callable[[str, int, int, float], None]
"""Called as (stage, steps done, steps in all, loss)."""
CLIP = 1.0
SHOWN = 20
"""Points of a curve that the report keeps."""


@dataclass(frozen=True)
class Curve:
    """The mean loss of each of some spans of a training."""

    steps: list[int]
    """The last step of each span."""
    losses: list[float]


def optimise(
    parameters: Sequence[nn.Parameter],
    loss_of: Callable[[int], Tensor],
    *,
    stage: str,
    steps: int,
    lr: float,
    accumulation: int,
    progress: Progress | None,
) -> Curve:
    """AdamW without decay on `loss_of(number)`, the losses of `accumulation` numbers a step, counted from 0.

    The rate warms up over a twentieth of the steps and falls by half a cosine to a tenth. Raises `NonFiniteError` for
    a loss that is not finite, before the step.
    """
    schedule = ScheduleConfig(warmup=steps // 20)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * schedule.factor(step, steps)
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number in range(step * accumulation, (step + 1) * accumulation):
            loss = loss_of(number) / accumulation
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the loss of the stage {stage} is {total} at step {step + 1} of {steps}; nothing of this stage is "
                f"kept: choose a lower {stage}.lr than {lr:g}"
            )
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        losses.append(total)
        if progress:
            progress(stage, step + 1, steps, total)
    return _curve(losses)


def match(
    teacher: Decoder,
    student: Decoder,
    layers: Sequence[int],
    new: Sequence[str],
    batches: Batches,
    config: ConvertConfig,
    progress: Progress | None = None,
) -> Curve:
    """Train the attention of `layers` of the student (or the parameters `new` alone) on `attention_errors`."""
    prefixes = tuple(f"layers.{i}.attention." for i in layers)
    trained = [
        parameter
        for name, parameter in student.named_parameters()
        if (name in new if config.match.train == "new" else name.startswith(prefixes))
    ]
    steps, device = config.match.steps, next(student.parameters()).device
    dropped = config.window_dropout("match")
    generator = torch.Generator().manual_seed(config.seed + 1)

    def loss_of(number: int) -> Tensor:
        tokens_BT = batches(number)[:, :-1].to(device)
        with windows_dropped(student, falling(dropped, number // config.batch.accumulation, steps), generator):
            return torch.stack(attention_errors(teacher, student, layers, tokens_BT)).mean()

    with only(student, trained):
        return optimise(
            trained,
            loss_of,
            stage="match",
            steps=steps,
            lr=config.match.lr,
            accumulation=config.batch.accumulation,
            progress=progress,
        )


def tune(
    model: SubquadForCausalLM,
    new: Sequence[str],
    batches: Batches,
    config: ConvertConfig,
    progress: Progress | None = None,
) -> Curve:
    """Low-rank factors in all linear layers of `model` that the original has, and the parameters `new`, on the loss of
    the next token; the factors end up in the weights."""
    own = {f"model.{name}" for name in new}
    trained = [parameter for name, parameter in model.named_parameters() if name in own]
    wanted = [name for name in lora.targets(model) if f"{name}.weight" not in own]
    adapted = lora.add_adapter(model, rank=config.lora.rank, alpha=config.lora.alpha, wanted=wanted)
    for parameter in trained:
        parameter.requires_grad_(True)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    decoder: Decoder = model.model
    steps, device = config.lora.steps, next(model.parameters()).device
    dropped = config.window_dropout("lora")
    generator = torch.Generator().manual_seed(config.seed + 2)

    def loss_of(number: int) -> Tensor:
        tokens_BT = batches(number).to(device)
        with windows_dropped(decoder, falling(dropped, number // config.batch.accumulation, steps), generator):
            return decoder.loss(tokens_BT[:, :-1], tokens_BT[:, 1:])

    curve = optimise(
        parameters,
        loss_of,
        stage="lora",
        steps=steps,
        lr=config.lora.lr,
        accumulation=config.batch.accumulation,
        progress=progress,
    )
    lora.merge(adapted)
    model.requires_grad_(True)
    return curve


def falling(first: float, step: int, steps: int) -> float:
    """`first` at step 0, 0 at the last of `steps`, linear between them."""
    return first * (1 - step / max(1, steps - 1))


@contextmanager
def only(model: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within the block these parameters of `model` have gradients, and no others."""
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


def _curve(losses: list[float]) -> Curve:
    edges = sorted({round(len(losses) * part / SHOWN) for part in range(SHOWN + 1)})
    spans = list(pairwise(edges))
    return Curve([stop for _, stop in spans], [sum(losses[a:b]) / (b - a) for a, b in spans])
