"""`subquad probe`: what a model remembers, by length, depth and distance."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import Namespace

from subquad.cli._probe_options import DEPTHS, ProbeOptions, TaskName, read_depths, read_lengths
from subquad.cli.arguments import Parser

if TYPE_CHECKING:
    from subquad.cli._probe_measure import Report
    from subquad.cli._probe_subjects import Subject

TASK_HELP = (
    "passkey: a key hidden in filler, or in text; mqar: keys whose values came with them before (multi-query "
    "associative recall); copy: a string again; position: the loss of text by tokens of context. (null: what the runs "
    "were trained on.)"
)
TEXT_HELP = (
    "Text for position, or to hide a key in, in the forms of `subquad train --data.path` (null: the held-out part of "
    "the text that the first run was trained on)."
)


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        "probe RUN [RUN ...] --task TASK",
        "Measure what trained models remember: a table, and with --out a JSON file and a picture. Several runs are "
        "asked the same. Train one to be asked by: subquad train --recipe probe-mqar (or probe-passkey, probe-copy).",
    )
    parser.add_argument("runs", nargs="+", type=str, help="Folders of runs.")
    parser.add_argument("--task", type=TaskName | None, default=None, help=TASK_HELP)
    parser.add_argument(
        "--lengths",
        type=str | None,
        default=None,
        help="Tokens of the sequences, as 128,256,512 (null: as many as in training, twice and four times that).",
    )
    parser.add_argument(
        "--depths",
        type=str | None,
        default=None,
        help=f"passkey: so many depths from 0 (the start) to 1 (the end), or a list as 0,0.5,1; copy: so many equal "
        f"parts of the string (null: {DEPTHS}).",
    )
    parser.add_argument(
        "--samples", type=int, default=64, help="Sequences at each length, and for passkey at each depth."
    )
    parser.add_argument("--seed", type=int, default=0, help="Another number gives other sequences.")
    parser.add_argument(
        "--digits", type=int | None, default=None, help="Digits of a key (null: as trained; in text 5)."
    )
    parser.add_argument("--pairs", type=int | None, default=None, help="Pairs of mqar (null: as trained).")
    parser.add_argument("--text", type=str | None, default=None, help=TEXT_HELP)
    parser.add_argument(
        "--out", type=str | None, default=None, help="Folder for TASK.json and TASK.png; made where it is not there."
    )
    parser.add_argument("--batch_size", type=int, default=8, help="Sequences that are read at once.")
    parser.add_argument(
        "--cache", type=str | None, default=None, help="Folder for prepared text (null: as for `subquad eval`)."
    )
    parser.add_argument(
        "--device", type=Literal["auto", "cpu"], default="auto", help="auto: a GPU where PyTorch finds one; cpu: never."
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, measure, print, write, return the exit status."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    with parser.checking():
        options = read_options(chosen)
    from subquad.cli._probe_measure import measure
    from subquad.cli._probe_subjects import load_subjects

    with parser.checking():
        subjects = load_subjects(chosen.runs, options)
        options = _completed(options, subjects)
        for subject in subjects:
            for length in options.lengths:
                subject.check(options, length)
    report = measure(subjects, options, progress=_show_progress if sys.stderr.isatty() else None)
    report.print()
    if chosen.out is not None:
        _write(report, Path(chosen.out))
    return 0


def read_options(chosen: Namespace) -> ProbeOptions:
    """The options, checked as far as they can be without a model."""
    for name, least in (("samples", 1), ("batch_size", 1), ("seed", 0)):
        if chosen[name] < least:
            raise ValueError(f"{name} must be at least {least}, got {chosen[name]}")
    names = ("task", "samples", "seed", "batch_size", "digits", "pairs", "text", "cache", "device")
    return ProbeOptions(
        lengths=read_lengths(chosen.lengths),
        depths=read_depths(chosen.depths),
        depths_given=chosen.depths is not None,
        **{name: chosen[name] for name in names},
    )


def _completed(options: ProbeOptions, subjects: Sequence[Subject]) -> ProbeOptions:
    """The options with what the runs decide."""
    from dataclasses import replace

    probe, trained = subjects[0].probe, subjects[0].trained
    if probe is not None:
        options = replace(options, task=probe.name)
    if options.depths_given and options.task in ("mqar", "position"):
        raise ValueError(f"--depths is for --task passkey and copy, and the task is {options.task}; leave it out")
    return replace(options, lengths=options.lengths or (trained, 2 * trained, 4 * trained))


def _write(report: Report, folder: Path) -> None:
    """TASK.json and TASK.png in `folder`."""
    from subquad.cli.tables import write_json
    from subquad.evaluation import drawing

    folder.mkdir(parents=True, exist_ok=True)
    place = folder / str(report.options.task)
    write_json(f"{place}.json", report.to_dict())
    drawing.save(report.draw(), place.with_suffix(".png"))
    sys.stdout.write(f"{place}.json and {place}.png hold the numbers and the picture.\n")


def _show_progress(what: str, done: int, total: int) -> Any:
    """One line that counts sequences."""
    end = "\n" if done == total else ""
    sys.stderr.write(f"\r{what}: {done:,} of {total:,} sequences{end}")
    sys.stderr.flush()
