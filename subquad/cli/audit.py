"""`subquad audit`: check causal language models for leaks from later tokens, wrong caches, padding and batches."""

from __future__ import annotations

import os

# Silence the messages of torch's profiler, which measures memory. It reads these variables when torch is loaded.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from rich.text import Text
from torch import nn

from subquad.attention import mechanism, names
from subquad.bars import READING, waiting
from subquad.cli.arguments import Parser
from subquad.cli.rich_table import console
from subquad.cli.tables import print_table, show_line
from subquad.cli.threads import keep_to_idle_cores
from subquad.config import suggest
from subquad.data import load_tokenizer
from subquad.data.files import write_json
from subquad.data.tokenizers import encode_text
from subquad.evaluation.audit import AuditConfig, AuditReport, audit, replay
from subquad.evaluation.audit.report import shown
from subquad.models import DecoderConfig
from subquad.models.build import build_model
from subquad.models.stacks import STACKS
from subquad.parsing import read_json, read_text

TINY: dict[str, Any] = {"vocab_size": 64, "dim": 32, "num_layers": 2, "num_heads": 2}
"""Size of the models of --attention."""
HEADERS = ("check", "verdict", "worst", "what was seen")
STYLES = {"violation": "bold red", "finding": "yellow", "not checked": "dim", "pass": "green"}


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "audit [MODEL]",
        "Audit a causal language model. Does any output depend on a later token? Do decoding with a cache, padding or "
        "the batch change the logits? How does the state grow? Are long inputs finite in bfloat16? The exit status is "
        "1 if a check finds a violation.",
    )
    parser.add_optional("model", "Folder of a run, or of any model that transformers' AutoModelForCausalLM reads.")
    parser.add_optional(
        "--attention",
        "Instead of MODEL: audit small, untrained models of these mechanisms, such as llp,window; all: every one.",
    )
    parser.add_options("Options of the mechanisms of --attention, such as --options.llp.segment 16.")
    parser.add_config(AuditConfig)
    parser.add_optional("--text", "Text file to take tokens from, by MODEL's tokenizer.json. null: random tokens.")
    parser.add_optional("--json", "Also write the reports to this JSON file.")
    parser.add_optional("--replay", "Instead of an audit: repeat the failing inputs in this file, written by --json.")
    parser.add_device()
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, audit and print; return 1 if there is a violation, else 0."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    keep_to_idle_cores(chosen.device)
    with parser.checking():
        _check(chosen)
        config = AuditConfig(**{name: chosen[name] for name in AuditConfig.__dataclass_fields__})
        report = None if chosen.replay is None else _report(chosen.replay, chosen.model or chosen.attention)
        with waiting(READING):
            models = _models(chosen, config.seed)
        text = None if chosen.text is None else _text(chosen.model, chosen.text)
    if report is not None:
        return _replay(parser, models, report)
    return _audit(parser, models, config, text, chosen.json)


def _check(chosen: Namespace) -> None:
    """Raise `ValueError` for arguments that can't be combined."""
    if (chosen.model is None) == (chosen.attention is None):
        raise ValueError("give either the folder of a model or --attention with mechanisms")
    if chosen.model is not None and chosen.options:
        raise ValueError("--options are for the models of --attention; a model in a folder has its own")
    if chosen.text is not None and chosen.model is None:
        raise ValueError("--text needs the tokenizer of a model's folder; models of --attention have none")
    if chosen.replay is not None and (chosen.json is not None or chosen.text is not None):
        raise ValueError("--replay reads its inputs from a file: leave out --json and --text")
    if chosen.attention is not None and chosen.replay is not None and len(_names(chosen.attention)) > 1:
        raise ValueError(f"--replay is for one model, got --attention {chosen.attention}")
    if chosen.json is not None and (Path(chosen.json).is_dir() or not Path(chosen.json).parent.is_dir()):
        raise ValueError(f"--json must name a file in a folder that exists, got {chosen.json!r}")


def _names(attention: str) -> list[str]:
    """Return the named mechanisms and stacks; `ValueError` for an unknown one or one without a causal form."""
    causal = [name for name in names() if "causal" in mechanism(name).forms]
    causal += [name for name, stack in STACKS.items() if "causal" in stack.forms]
    asked = causal if attention == "all" else attention.split(",")
    for name in asked:
        if name not in causal:
            raise ValueError(f"unknown attention {name!r}, or one without a causal form; {suggest(name, causal)}")
    return asked


def _models(chosen: Namespace, seed: int) -> list[tuple[str, nn.Module]]:
    """Return each model with its name; `ValueError` or `FileNotFoundError` if it can't be loaded."""
    device = "cuda" if chosen.device == "auto" and torch.cuda.is_available() else "cpu"
    if chosen.model is not None:
        if Path(chosen.model).is_file():
            raise ValueError(f"{chosen.model} is a file; give its folder, {Path(chosen.model).parent}")
        if not Path(chosen.model).is_dir():
            raise FileNotFoundError(
                f"there is no folder {chosen.model}; give the folder of a run, or of a model that transformers' "
                "AutoModelForCausalLM reads"
            )
        from subquad.adaptation.extended import load_causal

        return [(chosen.model, load_causal(chosen.model).to(device))]
    return [(name, model.to(device)) for name, model in _fresh(_names(chosen.attention), chosen.options, seed)]


def _fresh(names: Sequence[str], options: dict[str, dict[str, Any]], seed: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield a small model of each mechanism, with weights drawn from `seed`."""
    for name in names:
        torch.manual_seed(seed)
        yield name, build_model(DecoderConfig(**TINY, attention=name, options=options))


def _text(folder: str, file: str) -> list[int]:
    """Return the file's tokens by the tokenizer in the folder."""
    tokenizer = Path(folder) / "tokenizer.json"
    if not tokenizer.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json for --text; leave --text out for random tokens")
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no file {file}")
    return encode_text(load_tokenizer(folder), read_text(file))


def _report(file: str, model: str) -> AuditReport:
    """Return the report in a file written by --json, or the one of `model` if the file has several."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no file {file}")
    try:
        found = dict(read_json(file)["reports"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} has no reports of `subquad audit --json`: {error!r}") from error
    if not found:
        raise ValueError(f"{file} has no reports")
    if len(found) > 1 and model not in found:
        raise ValueError(f"{file} has no report of {model!r}, only of {', '.join(found)}")
    try:
        return AuditReport.from_dict(found[model] if len(found) > 1 else next(iter(found.values())))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _audit(
    parser: Parser,
    models: Sequence[tuple[str, nn.Module]],
    config: AuditConfig,
    text: Sequence[int] | None,
    file: str | None,
) -> int:
    """Audit and print each model; return the exit status. A model that can't be audited is a wrong argument."""
    reports: dict[str, AuditReport] = {}
    for name, model in models:
        with parser.checking():
            try:
                reports[name] = audit(model, text=text, progress=partial(_show, name), **config.to_dict())
            finally:
                _show()
        _print(name, reports[name])
    if len(reports) > 1:
        failed = [name for name, report in reports.items() if not report.passed]
        sys.stdout.write(f"{len(reports) - len(failed)} of {len(reports)} passed\n")
    if file is not None:
        write_json(file, {"reports": {name: report.to_dict() for name, report in reports.items()}})
    return 0 if all(report.passed for report in reports.values()) else 1


def _show(*names: str) -> None:
    """Show the current model and check in one line of a terminal; without names, clear the line."""
    if sys.stderr.isatty():
        show_line(f"\x1b[K{': '.join(names)}")


def _print(name: str, report: AuditReport) -> None:
    """Print a table on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        sys.stdout.write(f"{name}\n{report}\n\n")
        return
    lines = [
        (check.name, Text(check.verdict, STYLES[check.verdict]), shown(check.worst), check.detail)
        for check in report.checks
    ]
    print_table(f"{name}: {report.title()}", HEADERS, lines, text=HEADERS[-1], justify="left")
    console().print(Text(report.conclusion(), "bold green" if report.passed else "bold red"))


def _replay(parser: Parser, models: Sequence[tuple[str, nn.Module]], report: AuditReport) -> int:
    """Try the failing inputs again; return 1 if one still fails. An input that can't be tried is a wrong argument."""
    status = 0
    for name, model in models:
        with parser.checking():
            tried = replay(model, report)
        for done in tried:
            word = "still fails" if done.fails else "no longer fails"
            sys.stdout.write(f"{name}: {done.name}: {word}: {done.size:.2g} (band {done.band:.2g})\n")
            status = 1 if done.fails else status
    if not any(check.failing for check in report.checks):
        sys.stdout.write("the file has no failing inputs\n")
    return status
