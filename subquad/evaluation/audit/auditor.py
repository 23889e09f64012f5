"""Run all checks of an audit in order, on copies of the model."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from subquad.config import Config, check_at_least
from subquad.evaluation.audit import checks
from subquad.evaluation.audit.adapters import Adapter, adapter_for
from subquad.evaluation.audit.case import Case, compare, limit
from subquad.evaluation.audit.probe import DTYPES, Probe, Refused, growth, make_probe
from subquad.evaluation.audit.report import CHECKS, AuditReport, Check, Replayed
from subquad.evaluation.provenance import version_of
from subquad.inference import device_of
from subquad.version import __version__


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Config):
    """Inputs of an audit: lengths, batch, dtype."""

    tokens: int = 64
    """Length of the compared sequences, in tokens. Shorter ones are tried too, and longer ones around the windows,
    segments and chunks in the model's configuration."""
    batch: int = 3
    """Sequences in a batch, which must give the same logits as each sequence by itself."""
    long: int = 2048
    """Length of the input in bfloat16, in tokens, at most the model's number of positions. 0 skips this check."""
    contexts: list[int] = field(default_factory=lambda: [64, 256, 1024])
    """Context lengths, in tokens, at which state, time and memory are measured. [] skips these checks."""
    repeats: int = 5
    """Timings of a token at each context, of which the median is reported."""
    seed: int = 0
    """Seed of the random tokens."""
    vocab_size: int | None = None
    """Draw random tokens below this number. None: the model's vocabulary size."""
    dtype: Literal["auto", "float64", "float32", "own"] = "auto"
    """Dtype of the weights while logits are compared. auto: float64 if the model runs in it, else float32, else its
    own dtype."""

    def __post_init__(self) -> None:
        self.check_least(tokens=4, batch=2, long=0, repeats=1, vocab_size=2)
        for context in self.contexts:
            check_at_least(1, contexts=context)


logger = logging.getLogger(__name__)

LONGEST_OWN = 1024
"""Longest sequence, in tokens, that is tried for the model's own sizes."""
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
    """Check that each output of a causal language model depends only on the tokens up to it.

    `model` is any causal transformers model, a `subquad.models.Decoder`, or an `nn.Module` from tokens `[B, T]` to
    logits `[B, T, V]`; for another interface pass an `adapter` (see `Adapter`). `settings` are the fields of
    `AuditConfig`: `audit(model, tokens=128, seed=1)`. `text` holds tokens to use instead of random ones. `progress` is
    called with the name of each check before it runs.

    `CHECKS` lists the checks; `report.passed` is True if none found a violation. Logits are compared in float64 if the
    model runs in it. A violation is a difference that rounding can't explain (above `report.arithmetic["band"]`); it
    carries the shortest failing input found, for `replay`. Checks that can't be done are reported as "not checked".

    Works on copies: the model's weights, buffers, mode and dtype and torch's random state don't change. Raises
    `ValueError` for a setting out of range and for a model that isn't a causal language model, can't be copied or takes
    no sequence or no batch; `TypeError` for a setting of the wrong type and for outputs that aren't logits.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    config = AuditConfig.from_dict(settings)
    adapter = adapter or adapter_for(model)
    tell = progress or (lambda name: logger.info("audit: %s", name))
    with _same_random_state(model):
        audited, arithmetic = _prepare(model, adapter, config, text)
        _compare(audited, tell)
        arithmetic["band"] = audited.band  # inputs with more rounding may have raised it
        if arithmetic["weights"] == "float64" and config.dtype == "auto":
            alone = _only_in_float64(audited, config)
            if alone:
                logger.info("audit: repeating in float32 because these fail only in float64: %s", ", ".join(alone))
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
    transformers = version_of("transformers")
    versions = {
        "subquad": __version__,
        "torch": torch.__version__,
        **({"transformers": transformers} if transformers else {}),
        "python": platform.python_version(),
    }
    return AuditReport(named, config.to_dict(), arithmetic, done, versions)


def replay(model: nn.Module, report: AuditReport, /, *, adapter: Adapter | None = None) -> list[Replayed]:
    """Try the failing inputs of a report on this model: does each still exceed the report's band?

    Raises `ValueError` for an input that an audit can't have written or that the model refuses.
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
                raise ValueError(f"the model refuses the failing input of {check.name!r}: {error}") from error
            other = report.arithmetic.get("float32") if case.dtype == "float32" else None
            done.append(Replayed(check.name, size, limit(case.kind, (other or report.arithmetic)["band"])))
    return done


def _prepare(
    model: nn.Module, adapter: Adapter, config: AuditConfig, text: Sequence[int] | None
) -> tuple[checks.Audited, dict[str, Any]]:
    """Return what all checks share (probe, lengths, tokens, band) and the arithmetic for the report."""
    most = adapter.max_tokens(model)
    own = [size for size in adapter.sizes(model) if 2 * size + 1 <= min(LONGEST_OWN, most or LONGEST_OWN)]
    usual = [n for n in _lengths(config.tokens) if most is None or n <= most]
    longer = [n for size in own for n in (size - 1, size, size + 1, 2 * size, 2 * size + 1)]
    asked = sorted({*usual, *(n for n in longer if n > 1)})
    if not asked:
        raise ValueError(f"the model must have at least 2 positions to be audited, got {most}")
    probe, taken = make_probe(model, adapter, config.dtype, asked)
    source = checks.Tokens(config.vocab_size or adapter.vocab_size(model) or probe.logits_seen, config.seed, text)
    tokens = max((n for n in taken if n <= config.tokens), default=taken[0])
    rows = source.rows(4, tokens)
    try:
        narrowest = probe.narrowest(rows)
        band, scale = probe.band(rows, narrowest, config.seed)
    except Refused as error:
        raise ValueError(f"the model refuses a batch of {len(rows)} sequences of {tokens} tokens: {error}") from error
    dtype = str(probe.dtype).removeprefix("torch.")
    arithmetic = {"weights": dtype, "narrowest": str(narrowest).removeprefix("torch."), "scale": scale, "band": band}
    name = dtype if dtype in DTYPES else "own"
    audited = checks.Audited(probe, band, taken, tokens, own, source, config.batch, name, rows)
    audited.checks.append(_taken(asked, taken, probe, most if most is not None and most < config.tokens else None))
    return audited, arithmetic


def _only_in_float64(audited: checks.Audited, config: AuditConfig) -> list[str]:
    """Return the names of checks that fail in float64 but not in float32, though float32 could show the fault.

    Models are not used in float64, where one may fail because, say, it masks with float32's lowest number.
    """
    failing = [(check.name, Case.from_dict(check.failing)) for check in audited.checks if check.failing]
    if not failing:
        return []
    try:
        probe = Probe(audited.probe.original, audited.probe.adapter, torch.float32)
        band, _ = probe.band(audited.rows, probe.narrowest(audited.rows), config.seed)
    except Refused:  # the model runs in float64 but not in float32
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
    """Return the float64 checks, some replaced by their float32 results, and the names of those replaced.

    Replaced are checks that fail only in float64, checks skipped because of one, and violations found only in float32.
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
    """Return lengths up to `tokens`: small ones, the neighbours of powers of two, and the last two."""
    powers = [2**k + d for k in range(1, tokens.bit_length()) for d in (-1, 0, 1)]
    return sorted({n for n in (*powers, 12, 24, 48, tokens - 1, tokens) if 2 <= n <= tokens})


def _taken(asked: Sequence[int], taken: Sequence[int], probe: Probe, most: int | None) -> Check:
    """Return the check of lengths; `most` is the model's number of positions if it is below the length asked for."""
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
    """Run the checks that compare logits, unless logits are not finite or not repeatable."""
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
    """Restore torch's random state after the block."""
    device = device_of(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
