"""The audit: every check in order, on copies of the model."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import nn

from subquad.config import Config, check_at_least
from subquad.evaluation.audit import checks
from subquad.evaluation.audit.adapters import Adapter, adapter_for, device_of
from subquad.evaluation.audit.case import Case, compare, limit
from subquad.evaluation.audit.probe import DTYPES, Probe, Refused, growth, make_probe
from subquad.evaluation.audit.report import CHECKS, AuditReport, Check, Replayed
from subquad.version import __version__


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Config):
    """The inputs of an audit: their lengths, their number, their arithmetic."""

    tokens: int = 64
    """Tokens of the sequences on which outputs are compared; shorter ones are tried too, and longer ones around the
    windows, segments and chunks that the model's configuration names."""
    batch: int = 3
    """Sequences in the batch that is compared with each of them alone."""
    long: int = 2048
    """Tokens of the input in bfloat16, or as many as the model has positions for; 0 leaves the check out."""
    contexts: list[int] = field(default_factory=lambda: [64, 256, 1024])
    """Tokens read before the state, the time and the memory of a token are measured; none leaves these out."""
    repeats: int = 5
    """Times that a token is timed at each context; the median counts."""
    seed: int = 0
    """Seed of the random tokens."""
    vocab_size: int | None = None
    """Tokens are drawn below it; by default the model's vocabulary: its configuration's, or the width of its logits."""
    dtype: Literal["auto", "float64", "float32", "own"] = "auto"
    """Of the weights while outputs are compared. auto: float64 where the model runs in it, or float32, or its own."""

    def __post_init__(self) -> None:
        self.check_least(tokens=4, batch=2, long=0, repeats=1, vocab_size=2)
        for context in self.contexts:
            check_at_least(1, contexts=context)


logger = logging.getLogger(__name__)

LONGEST_OWN = 1024
"""Sequences are made longer than `tokens` for the model's own sizes up to this."""
NOT_FINITE = "logits are not finite (finite), so comparisons mean nothing"
NOT_REPEATABLE = "the same call twice gives other logits (repeatable), so comparisons mean nothing"


def audit(
    model: nn.Module,
    /,
    *,
    adapter: Adapter | None = None,
    text: Sequence[int] | None = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> AuditReport:
    """Check that what a causal language model computes for a token depends on the tokens up to it, and on nothing else.

    `model` is any causal language model of transformers, a `subquad.models.Decoder`, or an `nn.Module` from tokens
    `[B, T]` to logits `[B, T, V]`; for another interface give an `adapter` (see `Adapter`). `settings` are the fields
    of `AuditConfig`: `audit(model, tokens=128, seed=1)`. `text` holds tokens to use instead of random ones. `progress`
    is called with the name of each check before it.

    The checks are those of `CHECKS`; `report.passed` says whether none is a violation. Outputs are compared in float64
    where the model runs in it. Logits that differ by more than rounding can explain (`report.arithmetic["band"]`) are a
    violation, and its line has the shortest input that was found, for `replay`. What can't be checked is said to be so.

    Works on copies: the model's weights, buffers, mode and dtype and the random state of torch stay as they are. Raises
    `ValueError` for a setting out of range, for a model that is no causal language model, that can't be copied or that
    takes no sequence or no batch, and `TypeError` for a setting of the wrong type and for outputs that are no logits.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    config = AuditConfig.from_dict(settings)
    adapter = adapter or adapter_for(model)
    tell = progress or (lambda name: logger.info("audit: %s", name))
    with _same_random_state(model):
        audited, arithmetic = _prepare(model, adapter, config, text)
        _compare(audited, tell)
        arithmetic["band"] = audited.band  # of the worst input that was held beside it
        if arithmetic["weights"] == "float64" and config.dtype == "auto":
            alone = _only_in_float64(audited, config)
            if alone:
                logger.info("audit: once more in float32, since in float64 alone fails: %s", ", ".join(alone))
                del audited.probe
                again, _ = _prepare(model, adapter, config.replace(dtype="float32"), text)
                _compare(again, tell)
                audited.checks, taken = _merged(audited.checks, again.checks, alone)
                arithmetic["float32"] = {"band": again.band, "checks": taken, "alone": alone}
                audited.probe = again.probe
                del again
        lengths, source = audited.lengths, audited.source
        del audited.probe  # one copy of the model at a time
        tell("growth")
        audited.checks += growth(Probe(model, adapter, None), source, config.contexts, config.repeats)
        tell("bf16")
        most = adapter.max_tokens(model)
        audited.checks.append(
            checks.bf16(lambda: Probe(model, adapter, torch.bfloat16), source, config.long, most, lengths)
        )
    order = list(CHECKS)
    done = tuple(sorted(audited.checks, key=lambda check: order.index(check.name)))
    named = f"{type(model).__name__} ({sum(p.numel() for p in model.parameters()):,} parameters)"
    versions = {
        "subquad": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }
    return AuditReport(named, config.to_dict(), arithmetic, done, versions)


def replay(model: nn.Module, report: AuditReport, /, *, adapter: Adapter | None = None) -> list[Replayed]:
    """Try the failing inputs of a report again, on this model: whether each still fails, by the report's band.

    Raises `ValueError` for an input that is no case of an audit, or that the model does not take.
    """
    adapter = adapter or adapter_for(model)
    done, probes = list[Replayed](), dict[str, Probe]()
    with _same_random_state(model):
        for check in report.checks:
            if check.failing is None:
                continue
            case = Case.from_dict(check.failing)
            if case.dtype not in DTYPES:
                raise ValueError(f"unknown dtype {case.dtype!r} of a failing input; valid: {', '.join(DTYPES)}")
            try:
                if case.dtype not in probes:
                    probes[case.dtype] = Probe(model, adapter, DTYPES[case.dtype])
                size = compare(probes[case.dtype], case).worst
            except Refused as error:
                raise ValueError(f"the model does not take the failing input of {check.name!r}: {error}") from error
            other = report.arithmetic.get("float32") if case.dtype == "float32" else None
            done.append(Replayed(check.name, size, limit(case.kind, (other or report.arithmetic)["band"])))
    return done


def _prepare(
    model: nn.Module, adapter: Adapter, config: AuditConfig, text: Sequence[int] | None
) -> tuple[checks.Audited, dict[str, Any]]:
    """Return the probe, the lengths that the model takes, the tokens, the band."""
    most = adapter.max_tokens(model)
    own = [size for size in adapter.sizes(model) if 2 * size + 1 <= min(LONGEST_OWN, most or LONGEST_OWN)]
    usual = [n for n in _lengths(config.tokens) if most is None or n <= most]
    longer = [n for size in own for n in (size - 1, size, size + 1, 2 * size, 2 * size + 1)]
    asked = sorted({*usual, *(n for n in longer if n > 1)})
    probe, taken = make_probe(model, adapter, config.dtype, asked)
    source = checks.Tokens(config.vocab_size or adapter.vocab_size(model) or probe.logits_seen, config.seed, text)
    tokens = max((n for n in taken if n <= config.tokens), default=taken[0])
    rows = source.rows(4, tokens)
    try:
        narrowest = probe.narrowest(rows)
        band, scale = probe.band(rows, narrowest, config.seed)
    except Refused as error:
        raise ValueError(f"the model takes no batch of {len(rows)} sequences of {tokens} tokens: {error}") from error
    dtype = str(probe.dtype).removeprefix("torch.")
    arithmetic = {"weights": dtype, "narrowest": str(narrowest).removeprefix("torch."), "scale": scale, "band": band}
    name = dtype if dtype in DTYPES else "own"
    audited = checks.Audited(probe, band, taken, tokens, own, source, config.batch, name, rows)
    audited.checks.append(_taken(asked, taken, probe, most if most is not None and most < config.tokens else None))
    return audited, arithmetic


def _only_in_float64(audited: checks.Audited, config: AuditConfig) -> list[str]:
    """Return the checks that fail with weights in float64 and, though the fault would be seen there, not in float32.

    A model may fail in float64 alone, in which nobody runs it: by a mask with float32's lowest number, for instance.
    """
    failing = [(check.name, Case.from_dict(check.failing)) for check in audited.checks if check.failing]
    if not failing:
        return []
    try:
        probe = Probe(audited.probe.original, audited.probe.adapter, torch.float32)
        band, _ = probe.band(audited.rows, probe.narrowest(audited.rows), config.seed)
    except Refused:  # it runs in float64, and in float32 it doesn't
        return []
    alone = []
    for name, case in failing:
        try:
            seen = compare(audited.probe, case).worst > 10 * band
            if seen and compare(probe, case).worst <= limit(case.kind, band):
                alone.append(name)
        except Refused:
            continue
    return alone


def _merged(wide: Sequence[Check], narrow: Sequence[Check], alone: Sequence[str]) -> tuple[list[Check], list[str]]:
    """Return the checks in float64, and the names of those that are taken from float32 in their place.

    These are the ones that fail in float64 alone, those that were left out for it, and violations of float32 alone.
    """
    again = {check.name: check for check in narrow}
    merged, taken = list[Check](), list[str]()
    for check in wide:
        other = again[check.name]
        left_out = check.verdict != "violation" and any(f"({name})" in check.detail for name in alone)
        worse = other.verdict == "violation" != check.verdict
        if check.name in alone or left_out or worse:
            taken.append(check.name)
            check = other if other.worst is None else replace(other, detail=f"{other.detail}; in float32")
        merged.append(check)
    return merged, taken


def _lengths(tokens: int) -> list[int]:
    """Return lengths up to `tokens`: small ones, those beside powers of two, and the last two."""
    powers = [2**k + d for k in range(1, tokens.bit_length()) for d in (-1, 0, 1)]
    return sorted({n for n in (*powers, 12, 24, 48, tokens - 1, tokens) if 2 <= n <= tokens})


def _taken(asked: Sequence[int], taken: Sequence[int], probe: Probe, most: int | None) -> Check:
    """Return the check of the lengths; `most` is the number of positions where longer inputs were asked for."""
    refused = [n for n in asked if n not in taken]
    short = "" if most is None else f"; nothing longer, since the model has positions for {most:,} tokens"
    if not refused:
        return Check("lengths", "pass", f"takes {checks.listed(taken, 16)}{short}")
    try:
        probe.full([[0] * refused[0]])
        reason = ""
    except Refused as error:
        reason = str(error)
    detail = f"takes {checks.listed(taken)}{short}, refuses {checks.listed(refused)}: {reason}"
    return Check("lengths", "finding", detail, None, {"taken": list(taken), "refused": refused})


def _compare(audited: checks.Audited, tell: Callable[[str], None]) -> None:
    """Run the checks that compare logits, until one of them makes the others meaningless."""
    tell("finite")
    reason = None if checks.finite(audited) else NOT_FINITE
    if reason is None:
        tell("repeatable")
        reason = None if checks.repeatable(audited) else NOT_REPEATABLE
    if reason is not None:
        done = {check.name for check in audited.checks}
        later = ("state growth", "time growth", "memory growth", "bf16")
        for name in CHECKS:
            if name not in done and name not in later:
                audited.skip(name, reason)
        return
    for name, check in (
        ("causality", checks.causality),
        ("truncation", checks.truncation),
        ("batch", checks.batch),
        ("cache", checks.cached),
        ("padding", checks.padding),
    ):
        tell(name)
        check(audited)


@contextmanager
def _same_random_state(model: nn.Module) -> Iterator[None]:
    """Leave torch's random state as it was before the block."""
    device = device_of(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
