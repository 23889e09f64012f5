"""Units of kind train: train for each budget, measure, return rows."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from experiments.harness.measure import held_out, token_nats
from experiments.harness.noise import Row
from experiments.harness.rates import SEED, SHARE, searched, with_choice, with_settings
from experiments.harness.recipe import Held, merged
from experiments.harness.units import ON_A_GPU, Unit, function, held_of
from subquad.data import Corpus
from subquad.models.build import build_model
from subquad.models.config import DecoderConfig
from subquad.models.stacks import options_of
from subquad.training import RunResult, TrainConfig, train
from subquad.training.errors import NonFiniteError
from subquad.training.progress import read_metrics

DECAY = 0.2
"""Last share of a budget's steps in which the learning rate falls, if one trunk serves several budgets."""
QUIET = {"run": {"eval_every": 0, "log_every": 50, "keep": 1}}
"""Run settings of all experiments, which a recipe may override."""
Measure = Callable[[RunResult, Unit], Row | list[Row]]


class InterruptedRunError(RuntimeError):
    """The run was told to stop; starting it again continues it."""


def train_config(unit: Unit, settings: dict[str, Any] | None = None, **run: Any) -> TrainConfig:
    """Return the unit's settings as a training configuration. Raises as `TrainConfig.from_dict` does."""
    given = unit.settings if settings is None else settings
    steps = merged(QUIET, given).get("run", {}).get("steps", 1000)
    own = {
        "seed": unit.seed,
        "folder": str(Path(unit.folder) / "run"),
        "save_every": steps,
        "threads": unit.threads,
        "device": "auto" if unit.scale in ON_A_GPU else "cpu",
    }
    return TrainConfig.from_dict(merged(QUIET, {"run": own}, given, {"run": run}))


def predicted_tokens(config: TrainConfig) -> int:
    """Return the number of tokens that a language model predicts in one step."""
    labels = options_of(config.model).window_labels(config.batch.length)
    return labels * config.batch.size * config.batch.accumulation


def step_flops(config: TrainConfig) -> int:
    """Return the FLOPs of one step, forward and backward, counted on the meta device."""
    windows = config.batch.size * config.batch.accumulation
    return windows * _window_flops(json.dumps(config.model.to_dict()), config.batch.length)


@cache
def _window_flops(model: str, length: int) -> int:
    """Count the FLOPs of one window; cached, because an experiment's arms share a reference."""
    with torch.device("meta"):
        cost = build_model(DecoderConfig.from_dict(json.loads(model))).cost(length)
    return cost.mixing_flops + cost.projection_flops + cost.backward_flops


def _with_vocabulary(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the vocabulary of a tokenizer that is still to be trained."""
    if config.data.tokenizer not in ("bpe", "unigram"):
        return config
    return config.replace(model=config.model.replace(vocab_size=config.data.vocab_size))


def steps_of(config: TrainConfig) -> int:
    """Return the steps of a configuration. Raises `ValueError` without: a result must not depend on the machine."""
    if config.run.steps is None:
        raise ValueError("run.steps must be given in an experiment, which run.minutes would fit to the machine")
    return config.run.steps


def budget_steps(unit: Unit) -> dict[str, int]:
    """Return the steps of each budget: the reference's steps, or as many as match its predicted tokens or FLOPs."""
    own = train_config(unit)
    if set(unit.budgets) == {"steps"}:
        return {"steps": steps_of(own)}
    own, reference = _with_vocabulary(own), _with_vocabulary(train_config(unit, unit.reference))
    steps = steps_of(reference)
    ratios = {"steps": lambda: 1.0}
    ratios["tokens"] = lambda: predicted_tokens(reference) / predicted_tokens(own)
    ratios["flops"] = lambda: step_flops(reference) / step_flops(own)
    return {name: max(2, round(steps * ratios[name]())) for name in unit.budgets}


def train_unit(unit: Unit) -> list[Row]:
    """Train and measure; return a row for each budget. Raises `InterruptedRunError` if the run was told to stop."""
    unit, told = with_choice(unit)
    return [{**row, **told} for row in _trained_rows(unit)]


def search_unit(unit: Unit) -> list[Row]:
    """Train for a third of the steps with each rate and size; return losses, infinite for a run that failed."""
    own: Callable[[Unit], float] | None = function(Path(unit.experiment), "search")

    def loss(rate: float, size: float | None) -> float:
        settings = with_settings(unit.settings, rate, *([size] if unit.sizes else []))
        if own is not None:
            return own(replace(unit, settings=settings))
        whole = train_config(unit, settings)
        if whole.task not in ("language", "classify"):
            raise ValueError(
                f"rates are for the tasks language and classify, got {whole.task}: it has no part for them"
            )
        steps = max(1, steps_of(whole) // SHARE)
        shorter: dict[str, Any] = {"schedule": {"warmup": whole.schedule.warmup_of(whole.run.steps) // SHARE}}
        if whole.task == "classify" and whole.classify.dataset == "toy":  # its validation part is its test part
            shorter["classify"] = {"seed": SEED}
        place = str(Path(unit.folder) / (f"rate-{rate:g}" + (f"-sines-{size}" if unit.sizes else "")))
        every = 0 if whole.reads_text else steps  # of a text, the run's own evaluation reads all that is held out
        run = {"steps": steps, "save_every": steps, "eval_every": every, "eval_windows": 256, "folder": place}
        try:
            result = trained(train_config(unit, merged(settings, shorter), **run))
        except NonFiniteError:
            return math.inf
        found = _after(result, held_of(unit), unit.chosen_on) if result.config.reads_text else result.best_loss
        return found if found is not None and math.isfinite(found) else math.inf

    return searched(unit.rates, unit.sizes, loss)


def _after(result: RunResult, held: Held, count: int | None) -> float:
    """Return the nats per token of the `count` tokens (None: `held.tokens`) that follow those of the result."""
    assert isinstance(result.corpus, Corpus)
    tokens, own = result.corpus.held_out.tokens, held.tokens
    end = None if own is None else own + (count or own)
    if end is None or len(tokens) < end:
        raise ValueError(
            f"rates are chosen on held-out text after the result's: held.tokens and as many for the choice "
            f"(choose.tokens) must fit into its {len(tokens)} tokens, got {own} and {count}"
        )
    return float(token_nats(result, tokens[own:end], held).mean())


def _trained_rows(unit: Unit) -> list[Row]:
    budgets = budget_steps(unit)
    if len(budgets) == 1:
        ((name, steps),) = budgets.items()
        return _measured(unit, train_config(unit, steps=steps), {name: steps})
    rows: list[Row] = []
    folder = Path(unit.folder)
    done: dict[int, list[Row]] = {}
    for name, steps in sorted(budgets.items(), key=lambda item: item[1]):
        if steps in done:
            rows += [{**row, "budget": name} for row in done[steps]]
            continue
        begin = max(1, steps - round(DECAY * steps))
        trunk, fork = folder / "run", folder / f"run-{steps}"
        constant = merged(unit.settings, {"schedule": {"kind": "constant"}})
        falling = merged(unit.settings, {"schedule": {"kind": "wsd", "decay_fraction": DECAY}})
        if not fork.is_dir():  # otherwise the trunk may already be past this budget
            trained(train_config(unit, constant, steps=begin, save_every=begin))
            _fork(trunk, fork)
        config = train_config(unit, falling, steps=steps, folder=str(fork), save_every=steps)
        done[steps] = _measured(unit, config, {name: steps})
        rows += done[steps]
    return rows


def _fork(trunk: Path, fork: Path) -> None:
    """Copy the run with its checkpoint, so that it can continue with another schedule."""
    draft = fork.with_name(f".{fork.name}")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(trunk, draft)
    draft.rename(fork)


def trained(config: TrainConfig) -> RunResult:
    """Train to the end. Raises `InterruptedRunError` if the run was told to stop."""
    result = train(config)
    if result.interrupted:
        raise InterruptedRunError(f"{config.run.folder} stopped after step {result.steps} of {config.run.steps}")
    return result


def _measured(unit: Unit, config: TrainConfig, budget: dict[str, int]) -> list[Row]:
    """Train for one budget and return its rows."""
    ((name, steps),) = budget.items()
    result = trained(config)
    row: Row = {"steps": steps, "parameters": result.parameters}
    if unit.timed:
        row["step_seconds"] = _step_seconds(result)
    if unit.reference is not None:
        row["budget"] = name
    if result.config.reads_text:
        row["predicted_tokens"] = steps * predicted_tokens(result.config)
        row["flops"] = steps * step_flops(result.config)
    row |= held_out(result, held_of(unit))
    measure: Measure | None = function(Path(unit.experiment), "measure")
    if measure is None:
        return [row]
    more = measure(result, unit)
    return [{**row, **part} for part in (more if isinstance(more, list) else [more])]


def _step_seconds(result: RunResult) -> float:
    """Return the mean seconds per training step of the last process that trained."""
    speeds = [record["tokens_per_s"] for record in read_metrics(result.folder) if record.get("tokens_per_s")]
    speed = result.tokens_per_second or (speeds[-1] if speeds else float("nan"))
    return result.config.step_tokens / speed
