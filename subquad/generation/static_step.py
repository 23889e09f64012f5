"""A step over tensors of constant shapes: recorded when it is first called, and replayed later.

Shape letters: B slots, K tokens of a step, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from subquad.generation.recorded import FlatStep, Recorded
from subquad.generation.replayed import Replayed

logger = logging.getLogger(__name__)


class StaticStep:
    """Calls `step(tokens, active, *state)`, which returns logits, the next state and perhaps more tensors.

    The first call records the operations, and later ones run them and write the next state into the tensors of `state`.
    They call `step` if `refused()`, asked by the first call, returns a reason not to record, or if an operation depends
    on values. With `compile` the recorded operations are compiled. There is a recording for autocast, and one without.
    """

    def __init__(self, step: FlatStep, refused: Callable[[], str | None], *, compile: bool = False) -> None:
        self._step, self._refused, self._compile = step, refused, compile
        self.made: dict[bool, Any] = {}
        """What is called, by whether autocast is on."""

    @property
    def is_replayed(self) -> bool:
        """Return whether a later call reads the state from the tensors of an earlier one."""
        return any(isinstance(step, Replayed) for step in self.made.values())

    def __call__(self, tokens_BK: Tensor, active_B: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
        """Return what the step returns; all but the logits may be overwritten by the next call."""
        device = tokens_BK.device.type
        autocast = torch.is_autocast_enabled(device)
        made: Any = self.made.get(autocast)
        if isinstance(made, Recorded) or (isinstance(made, Replayed) and not made.stale):
            # The recorded step has autocast's casts among its operations.
            with torch.autocast(device, enabled=False) if autocast else nullcontext():
                if isinstance(made, Recorded):
                    made = self.made[autocast] = Replayed(made, tokens_BK, active_B, state)
                else:
                    made(tokens_BK)
                return [made.logits_BV.clone(), *state, *made.more]
        if made is None or isinstance(made, Replayed):
            return self._first(autocast, tokens_BK, active_B, state)
        outputs: list[Tensor] = made(tokens_BK, active_B, *state)
        return outputs

    def _first(self, autocast: bool, tokens_BK: Tensor, active_B: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
        """Take a step that calls the modules, and record it."""
        inputs = [tokens_BK, active_B, *state]
        recorded, why = None, self._refused()
        if why is None:
            recorded = Recorded(self._step, inputs)
            outputs, why = recorded.outputs, recorded.refused
        else:
            outputs = self._step(*inputs)
        if recorded is None or why is not None:
            log_not_recorded(why)
            self.made[autocast] = self._step
        elif self._compile:
            self.made[autocast] = torch.compile(recorded.graph(), dynamic=False, fullgraph=True)
        elif all(old.dtype == new.dtype for old, new in zip(state, outputs[1:], strict=False)):
            logger.info("the decoding step is recorded: %d operations", len(recorded.calls))
            self.made[autocast] = recorded
        return outputs


@cache  # once for each reason: a training generates samples again and again
def log_not_recorded(why: str) -> None:
    """Log that decoding calls the model's modules, and why."""
    logger.info("decoding steps call the model's modules and are not recorded: %s", why)
