"""Measure training steps and prefill of whole decoders in one process."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from benchmarks import peers as libraries
from benchmarks.config import ModelConfig
from benchmarks.measuring import OUT_OF_TIME, Running, by_length, check_there, memory_of, over, result_of
from benchmarks.models import BASE, Llama, build_decoder, check_models, label_of, peer_model
from benchmarks.report import Report, Row
from benchmarks.timing import Failure, Run, Timing, attempt, clock_of, interleave
from subquad.models import Decoder


class Subject(NamedTuple):
    """A model to measure."""

    name: str
    label: str
    kind: str
    model: nn.Module | Failure


class Key(NamedTuple):
    """A timed call: the model's name, and `step` or `prefill`."""

    name: str
    which: str


def check_model(config: ModelConfig) -> None:
    """Raise `ValueError` or `TypeError` if this configuration can't be measured here."""
    check_there(config.device)
    check_models(config.mechanisms, config.options, stacks=True)
    libraries.chosen(config.peers, config.device, "model")
    with torch.device("meta"):
        for name in config.mechanisms:
            _build(config, name, config.tokens[0])


def measure_model(config: ModelConfig | None = None, /, **running: Unpack[Running]) -> Report:
    """Measure time and peak memory of training steps (loss and gradients, no optimizer) and prefill of decoders.

    Ratios are relative to the same decoder with causal `scaled_dot_product_attention`, and to transformers' Llama. In
    16 bits, weights stay in float32 under autocast. Prefill reads a whole sequence and returns the last token's logits
    and the state. Other arguments, interleaving and the treatment of failures are as in `measure_ops`.
    """
    config = ModelConfig() if config is None else config
    check_model(config)
    peers = libraries.chosen(config.peers, config.device, "model")
    rows_of = partial(_length, config, [peer.name for peer in peers[0]])
    return by_length("model", config, peers, rows_of, **running)


def _build(config: ModelConfig, name: str, tokens: int) -> Decoder:
    return build_decoder(name, longest=tokens, options=config.options, **config.sizes)


def _subjects(config: ModelConfig, tokens: int, peers: list[str]) -> list[Subject]:
    found = list[Subject]()
    for name in (BASE, *config.mechanisms):
        made: nn.Module | Failure = attempt(_build, config, name, tokens)
        found.append(Subject(name, label_of(name, config.options), "base" if name == BASE else "ours", made))
    for name in peers:
        made = attempt(peer_model, name, longest=tokens, **config.sizes)
        found.append(Subject(name, label_of(name, config.options), "peer", made))
    return [s if isinstance(s.model, Failure) else s._replace(model=attempt(s.model.to, config.device)) for s in found]


def _length(config: ModelConfig, peers: list[str], tokens: int, late: bool) -> list[Row]:
    """Return the rows of one length."""
    if late:
        subjects = [Subject(n, label_of(n, config.options), "ours", OUT_OF_TIME) for n in config.mechanisms]
    else:
        subjects = _subjects(config, tokens, peers)
    batch = config.batch_of(tokens)
    numbers = torch.randint(1, config.vocab, (batch, tokens + 1), generator=torch.Generator().manual_seed(0))
    numbers_BT = numbers.to(config.device)
    runs: dict[Key, Run] = {}
    for subject in subjects:
        if not isinstance(subject.model, Failure):
            runs[Key(subject.name, "step")] = _step(config, subject.model, numbers_BT)
        if isinstance(subject.model, Decoder | Llama):
            runs[Key(subject.name, "prefill")] = _prefill(config, subject.model, numbers_BT[:, :-1])
    times = interleave(
        runs,
        clock=clock_of(config.device),
        repeats=config.repeats,
        seconds=config.seconds,
    )
    rows = list[Row]()
    for subject in subjects:
        for which in ("step", "prefill"):
            key = Key(subject.name, which)
            if key in runs or isinstance(subject.model, Failure):
                result = subject.model if isinstance(subject.model, Failure) else times[key]
                row = _row(config, subject, which, tokens, result, times)
                if row["status"] == "ok":
                    row["peak_bytes"] = memory_of(partial(runs[key].call, None), config.device)
                rows.append(row)
    return rows


def _row(
    config: ModelConfig,
    subject: Subject,
    which: str,
    tokens: int,
    result: object,
    times: dict[Key, Timing | Failure],
) -> Row:
    parameters = None if isinstance(subject.model, Failure) else sum(p.numel() for p in subject.model.parameters())
    row: dict[str, Any] = {
        "name": subject.name,
        "label": subject.label,
        "kind": subject.kind,
        "tokens": tokens,
        "batch": config.batch_of(tokens),
        "pass": which,
        "parameters": parameters,
        **result_of(result),
    }
    if not isinstance(result, Timing):
        return row
    return {
        **row,
        "tokens_per_s": config.batch_of(tokens) * tokens / result.median,
        "times_faster": over(times.get(Key(BASE, which)), result),
        "over_transformers": over(times.get(Key("transformers", which)), result),
    }


def _step(config: ModelConfig, model: Any, numbers_BT: Tensor) -> Run:
    """Return the timed training step: the loss and its gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    inputs_BT, labels_BT = numbers_BT[:, :-1].contiguous(), numbers_BT[:, 1:].contiguous()

    def step(_: object) -> object:
        model.train()
        with autocast(config):
            loss = model.loss(inputs_BT, labels_BT)
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return Run(step)


def _prefill(config: ModelConfig, model: Decoder | Llama, inputs_BT: Tensor) -> Run:
    """Return the timed prefill: the last token's logits and the state."""

    def prefill(_: object) -> object:
        model.eval()
        with torch.no_grad(), autocast(config):
            if isinstance(model, Llama):
                return model.prefill(inputs_BT)
            h_BTD, state = model.hidden(inputs_BT)
            return model.logits(h_BTD[:, -1:]), state

    return Run(prefill)


def autocast(config: ModelConfig) -> torch.autocast:
    """Keep weights in float32 and compute products in the configured dtype."""
    kind = torch.device(config.device).type
    return torch.autocast(kind, getattr(torch, config.dtype), enabled=config.dtype != "float32")
