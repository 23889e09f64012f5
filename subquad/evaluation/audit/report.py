"""The report of an audit: a table, JSON, and failing inputs to replay."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from subquad.parsing import check_keys, read_json

Verdict = Literal["pass", "violation", "finding", "not checked"]
FORMAT = "subquad-audit"
FORMAT_VERSION = 1

_KINDS = {"model": str, "settings": dict, "arithmetic": dict, "versions": dict, "checks": list}

CHECKS: dict[str, str] = {
    "finite": "no logit is NaN or infinite",
    "repeatable": "the same call twice gives the same logits",
    "lengths": "which lengths the model takes",
    "causality": "no output changes with a later token, at the same length",
    "truncation": "leaving out later tokens changes no output",
    "cache, one token": "decoding one token at a time gives the logits of a full pass",
    "cache, several tokens": "decoding several tokens at a time gives the logits of a full pass",
    "padding left": "padding before the tokens, with any pad token, changes no output of a real token",
    "padding right": "padding after the tokens, with any pad token, changes no output of a real token",
    "padding left, then cache": "decoding after left padding gives the logits without padding",
    "batch": "a sequence has the same logits alone and at any place in a batch",
    "state growth": "bytes of the cache by context length",
    "time growth": "time per token by context length",
    "memory growth": "largest tensor of a full pass by its length",
    "bf16": "the logits of a long input are finite in bfloat16",
}
"""Every check and the promise it tests, in the order of the report."""


@dataclass(frozen=True)
class Check:
    """One line of a report."""

    name: str
    """A key of `CHECKS`."""
    verdict: Verdict
    """violation: a fault. finding: worth knowing, not a fault. not checked: `detail` says why."""
    detail: str
    """A sentence on what was done and seen."""
    worst: float | None = None
    """The largest difference between logits that should be equal; None if none were compared."""
    where: dict[str, Any] = field(default_factory=dict)
    """Positions, lengths and sizes, by name."""
    failing: dict[str, Any] | None = None
    """The shortest failing input found, for `replay`; None if nothing failed."""


@dataclass(frozen=True)
class AuditReport:
    """The result of `audit`: `str` gives a table, `to_json` JSON."""

    model: str
    """The model's class and number of parameters."""
    settings: dict[str, Any]
    """The `AuditConfig`."""
    arithmetic: dict[str, Any]
    """`weights` and `narrowest` dtype of the comparisons, `scale` of the logits, and the rounding `band` (a larger
    difference is a fault). `float32` is present if checks fail only in float64: their names (`alone`), the `checks`
    whose float32 results are reported instead, and the `band` of these."""
    checks: tuple[Check, ...]
    """In the order of `CHECKS`."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of packages and of Python."""

    @property
    def passed(self) -> bool:
        return not self.violations

    @property
    def violations(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict == "violation")

    def check(self, name: str) -> Check:
        """Return the check of this name; `ValueError` lists the valid names."""
        for check in self.checks:
            if check.name == name:
                return check
        raise ValueError(f"there is no check {name!r}; valid: {', '.join(CHECKS)}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that aren't finite become strings."""
        return {"format": FORMAT, "version": FORMAT_VERSION, "passed": self.passed, **_plain(asdict(self))}

    def to_json(self) -> str:
        """Return one JSON object, which `load` reads."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AuditReport:
        """Read the output of `to_dict`. `ValueError` for anything else, or for another version of the format."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a report of an audit must be an object, got {type(values).__name__}")
        if values.get("format") != FORMAT:
            raise ValueError(f"not a report of an audit: its format is {values.get('format')!r}, not {FORMAT!r}")
        if values.get("version") != FORMAT_VERSION:
            raise ValueError(f"the report has version {values.get('version')!r}; this release reads {FORMAT_VERSION}")
        check_keys(values, _KINDS, "the report")
        check_keys(values["arithmetic"], {"weights": str, "narrowest": str}, "the report's arithmetic")
        try:
            rest = {name: values[name] for name in ("model", "settings", "arithmetic", "versions")}
            checks = tuple(Check(**{**check, "worst": _number(check["worst"])}) for check in values["checks"])
            rest["arithmetic"] = {**rest["arithmetic"], **{k: float(rest["arithmetic"][k]) for k in ("scale", "band")}}
            if "float32" in rest["arithmetic"]:
                narrow = rest["arithmetic"]["float32"]
                check_keys(narrow, {"checks": list, "alone": list}, "the report's float32")
                texts = {name: [str(word) for word in narrow[name]] for name in ("checks", "alone")}
                rest["arithmetic"]["float32"] = {**narrow, **texts, "band": float(narrow["band"])}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the report is damaged: {error!r}") from error
        for check in checks:
            check_keys(asdict(check), {"name": str, "verdict": str, "detail": str, "where": dict}, "the report")
            if not isinstance(check.failing, dict | None):
                raise ValueError(f"the report is damaged: the failing input of {check.name!r} must be a mapping")
            if check.verdict not in get_args(Verdict):
                raise ValueError(
                    f"the report is damaged: unknown verdict {check.verdict!r}; valid: {', '.join(get_args(Verdict))}"
                )
        return cls(checks=checks, **rest)

    @classmethod
    def load(cls, path: str | Path) -> AuditReport:
        """Read a file that holds the output of `to_json`; raises as `from_dict` does."""
        values = read_json(path)
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold one JSON object, got {type(values).__name__}")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def title(self) -> str:
        """Return a line with the model and the arithmetic of the comparisons."""
        found, other = self.arithmetic, self.arithmetic.get("float32")
        return (
            f"{self.model}: weights in {found['weights']}, narrowest arithmetic {found['narrowest']}, logits up to "
            f"{found['scale']:.3g}, rounding band {found['band']:.2g}"
            + (f" (in float32, band {other['band']:.2g}: {'; '.join(other['checks'])}" if other else "")
            + (f", because these fail only in float64: {'; '.join(other['alone'])})" if other else "")
        )

    def conclusion(self) -> str:
        """Return a line that says whether the audit passed, with the number of findings or the names of violations."""
        if self.passed:
            count = sum(check.verdict == "finding" for check in self.checks)
            noted = f" ({count} finding{'' if count == 1 else 's'}: worth knowing, not a fault)" if count else ""
            return f"passed: no violation{noted}"
        return f"failed: {'; '.join(check.name for check in self.violations)}"

    def __str__(self) -> str:
        lines = [self.title(), ""]
        for check in self.checks:
            head = f"{check.name:<25} {check.verdict:<12} {shown(check.worst):>8}  "
            lines += textwrap.wrap(check.detail, 120, initial_indent=head, subsequent_indent=" " * len(head))
        return "\n".join([*lines, "", self.conclusion()])


@dataclass(frozen=True)
class Replayed:
    """The result of trying a failing input again."""

    name: str
    """Name of the check."""
    size: float
    """The largest difference now; infinite if a logit is not finite."""
    band: float
    """The report's band, beyond which a difference is a fault."""

    @property
    def fails(self) -> bool:
        """Return whether the fault is still there."""
        return not self.size <= self.band


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def shown(worst: float | None) -> str:
    """Format a difference; empty for None."""
    return "" if worst is None else "0" if worst == 0 else f"{worst:.1e}"
