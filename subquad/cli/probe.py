"""`subquad probe`: what a model remembers, by length, depth and distance."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jsonargparse import Namespace

from subquad import training
from subquad.cli.arguments import Parser
from subquad.cli.eval import held_out_text
from subquad.cli.tables import counter, print_table, write_json
from subquad.config import check_at_least
from subquad.data.corpus import prepare_shard
from subquad.data.tokenizers import tokenizer_hash
from subquad.evaluation import drawing
from subquad.evaluation.probe_report import LABELS, ProbeOptions, Report, Subject, TaskName, measure
from subquad.evaluation.probes import Score

DEPTHS = 5
DEFAULT_LENGTH = 256
"""Tokens where neither --lengths nor a training configuration says how many."""
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
    """Return the command's options."""
    parser = Parser(
        "probe RUN [RUN ...] --task TASK",
        "Measure what trained models remember: a table, and with --out a JSON file and a picture. Several runs are "
        "asked the same. Train one to be asked by: subquad train --recipe probe-mqar (or probe-passkey, probe-copy).",
    )
    parser.add_argument("runs", nargs="+", type=str, help="Folders of runs.")
    parser.add_optional("--task", TASK_HELP, TaskName)
    parser.add_optional(
        "--lengths",
        "Tokens of the sequences, as 128,256,512 (null: as many as in training, twice and four times that).",
    )
    parser.add_optional(
        "--depths",
        f"passkey: so many depths from 0 (the start) to 1 (the end), or a list as 0,0.5,1; copy: so many equal "
        f"parts of the string (null: {DEPTHS}).",
    )
    parser.add_argument(
        "--samples", type=int, default=64, help="Sequences at each length, and for passkey at each depth."
    )
    parser.add_argument("--seed", type=int, default=0, help="Another number gives other sequences.")
    parser.add_optional("--digits", "Digits of a key (null: as trained; in text 5).", int)
    parser.add_optional("--pairs", "Pairs of mqar (null: as trained).", int)
    parser.add_optional("--text", TEXT_HELP)
    parser.add_optional("--out", "Folder for TASK.json and TASK.png; made where it is not there.")
    parser.add_argument("--batch_size", type=int, default=8, help="Sequences that are read at once.")
    parser.add_optional("--cache", "Folder for prepared text (null: as for `subquad eval`).")
    parser.add_device()
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, measure, print, write, return the exit status."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    with parser.checking():
        options = read_options(chosen)
        subjects = load_subjects(chosen.runs, options)
        options = _completed(options, subjects)
        for subject in subjects:
            for length in options.lengths:
                subject.check(options, length)
    report = measure(subjects, options, progress=counter(" sequences"))
    _print(report)
    if chosen.out is not None:
        _write(report, Path(chosen.out))
    return 0


def read_lengths(text: str | None) -> tuple[int, ...]:
    """Return `128,256,512` as numbers, in order, each once. Raises `ValueError` for anything else."""
    if text is None:
        return ()
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ValueError(f"lengths are numbers of tokens between commas, as 128,256,512, got {text!r}") from error
    check_at_least(1, lengths=lengths[0])
    return tuple(lengths)


def read_depths(text: str | None) -> tuple[float, ...]:
    """Return `5` as five depths from 0 to 1, evenly spaced; `0,0.5,1` or `0.5` as they are; `1` is the middle alone."""
    try:
        if text is None or not set(text) & set(".,"):
            count = DEPTHS if text is None else int(text)
            if count < 1:
                raise ValueError(f"there must be at least 1 depth, got {count}")
            return tuple(i / (count - 1) for i in range(count)) if count > 1 else (0.5,)
        depths = sorted({float(part) for part in text.split(",")})
    except ValueError as error:
        if "could not convert" not in str(error) and "invalid literal" not in str(error):
            raise
        raise ValueError(f"depths are a number of them, or depths between commas, as 0,0.5,1, got {text!r}") from error
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"a depth must lie between 0 (the start) and 1 (the end), got {depth}")
    return tuple(depths)


def read_options(chosen: Namespace) -> ProbeOptions:
    """Return the options, checked as far as they can be without a model."""
    for name, least in (("samples", 1), ("batch_size", 1), ("seed", 0)):
        check_at_least(least, **{name: chosen[name]})
    names = ("task", "samples", "seed", "batch_size", "digits", "pairs", "text", "cache", "device")
    return ProbeOptions(
        lengths=read_lengths(chosen.lengths),
        depths=read_depths(chosen.depths),
        depths_given=chosen.depths is not None,
        **{name: chosen[name] for name in names},
    )


def _completed(options: ProbeOptions, subjects: Sequence[Subject]) -> ProbeOptions:
    """Return the options with what the runs decide."""
    probe, trained = subjects[0].probe, subjects[0].trained
    if probe is not None:
        options = replace(options, task=probe.name)
    if options.depths_given and options.task in ("mqar", "position"):
        raise ValueError(f"--depths is for --task passkey and copy, and the task is {options.task}; leave it out")
    return replace(options, lengths=options.lengths or (trained, 2 * trained, 4 * trained))


def load_subjects(folders: Sequence[str], options: ProbeOptions) -> list[Subject]:
    """Return the models in `folders`; raise `ValueError` for runs that do not fit the task or each other."""
    paths = [Path(folder) for folder in folders]
    alike = len({path.name for path in paths}) < len(paths) or any(not path.name for path in paths)
    names = [str(path) if alike else path.name for path in paths]
    probes = [not training.runs.is_classifier(path) and training.runs.is_probe(path) for path in paths]
    if all(probes):
        return _probes([training.runs.load_probe(path, options.device) for path in paths], names, options)
    if any(probes):
        text, probe = (names[probes.index(which)] for which in (False, True))
        raise ValueError(f"{probe} was trained on a probe and {text} was not: they cannot be asked the same")
    return _texts([training.runs.load_run(path, options.device) for path in paths], names, options)


def _probes(loaded: Sequence[training.runs.LoadedProbe], names: Sequence[str], options: ProbeOptions) -> list[Subject]:
    if options.text is not None:
        raise ValueError(f"--text is for models of text, and {names[0]} was trained on a probe; leave it out")
    subjects = []
    for run, name in zip(loaded, names, strict=True):
        trained = run.config.probe
        if options.task not in (None, trained.name):
            raise ValueError(
                f"{name} was trained on the probe {trained.name} and knows no other tokens, got --task {options.task}; "
                f"train one by: subquad train --recipe probe-{options.task}"
                if options.task != "position"
                else f"--task position is for models of text, and {name} was trained on the probe {trained.name}"
            )
        subjects.append(Subject(name, run.decoder, run.config.batch.length, probe=options.changed(trained)))
    first = subjects[0]
    for subject in subjects[1:]:
        if subject.describe()["probe"] != first.describe()["probe"]:
            raise ValueError(
                f"{first.name} and {subject.name} were trained on different probes: {first.describe()['probe']} and "
                f"{subject.describe()['probe']}; compare runs of one"
            )
    return subjects


def _texts(loaded: Sequence[training.runs.LoadedRun], names: Sequence[str], options: ProbeOptions) -> list[Subject]:
    if options.task not in ("passkey", "position"):
        asked = "no --task was given" if options.task is None else f"got --task {options.task}"
        raise ValueError(
            f"{names[0]} is a model of text: it can be asked --task passkey or position, {asked}; for mqar and copy "
            "train a model by: subquad train --recipe probe-mqar (or probe-copy)"
        )
    if options.pairs is not None:
        raise ValueError("--pairs is for models that were trained on the probe mqar; leave it out")
    if options.task == "position" and options.digits is not None:
        raise ValueError("--digits is for --task passkey; leave it out")
    tokenizers = [tokenizer_hash(run.tokenizer) for run in loaded]
    for name, other in zip(names[1:], tokenizers[1:], strict=True):
        if other != tokenizers[0]:
            raise ValueError(f"{names[0]} and {name} have different tokenizers: their tokens cannot be compared")
    text = _text(loaded[0], options)
    return [
        Subject(
            name,
            run.decoder,
            run.config.batch.length if run.config else DEFAULT_LENGTH,
            text=text,
            tokenizer=run.tokenizer,
            digits=5 if options.digits is None else options.digits,
        )
        for run, name in zip(loaded, names, strict=True)
    ]


def _text(run: training.runs.LoadedRun, options: ProbeOptions) -> np.ndarray:
    """Return the tokens of --text, or of the held-out part of what the first run was trained on."""
    if options.text is not None:
        return prepare_shard(options.text, run.tokenizer, cache=options.cache).tokens
    return held_out_text(run, options.cache, "--text").tokens[:]


def _print(report: Report) -> None:
    """Print the table: a line for each model and length; ± is one standard error."""
    loss = report.options.task == "position"
    ranges = report.ranges()
    whole = f"last {report.entries[0].whole.asked // report.entries[0].whole.sequences:,}" if loss else "all"
    lines = []
    before = None
    for entry in report.entries:
        known = {(score.start, score.stop): score for score in entry.scores}
        cells = [_cell(known[place], loss=loss) if place in known else "" for place in ranges]
        name = entry.subject.name
        lines.append([name if name != before else "", f"{entry.length:,}", _cell(entry.whole, loss=loss), *cells])
        if not loss:
            lines[-1].append(f"{100 * entry.subject.chance:.3g}")
        before = name
    headers = ["", "tokens", whole, *ranges.values(), *([] if loss else ["chance"])]
    unit = "nats a token" if loss else "per cent"
    title = f"{report.title}\n{unit} ± one standard error, by {LABELS[str(report.options.task)]}"
    print_table(title, headers, lines, markdown=False)


def _cell(score: Score, *, loss: bool) -> str:
    if loss:
        return f"{score.value:.3f} ±{score.error:.3f}"
    return f"{100 * score.value:.1f} ±{100 * score.error:.1f}"


def _write(report: Report, folder: Path) -> None:
    """Write TASK.json and TASK.png in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / str(report.options.task)
    write_json(f"{place}.json", report.to_dict())
    drawing.save(report.draw(), place.with_suffix(".png"))
    sys.stdout.write(f"{place}.json and {place}.png hold the numbers and the picture.\n")
