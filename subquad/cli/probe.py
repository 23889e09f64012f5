"""`subquad probe`: measure a model's recall by length, depth and distance."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jsonargparse import Namespace

from subquad import training
from subquad.bars import READING, counter, waiting
from subquad.cli.arguments import Parser
from subquad.cli.eval import text_of
from subquad.cli.tables import print_table
from subquad.cli.threads import keep_to_idle_cores
from subquad.config import check_at_least
from subquad.data.files import write_json
from subquad.data.tokenizers import tokenizer_hash
from subquad.evaluation import drawing
from subquad.evaluation.probe_report import LABELS, ProbeOptions, Report, Subject, TaskName, measure
from subquad.evaluation.probes import Score
from subquad.program import command

DEPTHS = 5
DEFAULT_LENGTH = 256
"""Length if neither --lengths nor a training configuration gives one."""
TASK_HELP = (
    "passkey: repeat a key hidden in filler or in text. mqar: multi-query associative recall, give the value that was "
    "shown with a key. copy: repeat a string. position: loss of a text by tokens of context. null: the probe that the "
    "runs were trained on."
)
TEXT_HELP = (
    "For position, and passkey in text: anything that `subquad train --data.path` accepts. null: the held-out part of "
    "the first run's training text."
)


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "probe RUN [RUN ...] --task TASK",
        "Measure the recall of trained models. Prints a table; --out adds a JSON file and a picture. Several runs get "
        "the same sequences. `subquad train --recipe probe-mqar` (or probe-passkey, probe-copy) trains a model on one.",
    )
    parser.add_argument("runs", nargs="+", type=str, help="Folders of runs.")
    parser.add_optional("--task", TASK_HELP, TaskName)
    parser.add_optional(
        "--lengths", "Lengths in tokens, such as 128,256,512. null: one, two and four times the training length."
    )
    parser.add_optional(
        "--depths",
        "passkey: number of evenly spaced depths of the key, from 0 (start) to 1 (end), or a list such as 0,0.5,1. "
        f"copy: number of equal parts of the string to score. null: {DEPTHS}.",
    )
    parser.add_argument("--samples", type=int, default=64, help="Sequences per length (for passkey: and per depth).")
    parser.add_argument("--seed", type=int, default=0, help="Random seed of the sequences.")
    parser.add_optional("--digits", "passkey: digits of a key. null: as in training; 5 in text.", int)
    parser.add_optional("--pairs", "mqar: key-value pairs per sequence. null: as in training.", int)
    parser.add_optional("--text", TEXT_HELP)
    parser.add_optional("--out", "Folder to write TASK.json and TASK.png to, created if missing. null: write none.")
    parser.add_argument("--batch_size", type=int, default=8, help="Sequences in a batch.")
    parser.add_optional("--cache", "Folder that keeps tokenized text for reuse. null: as for `subquad eval`.")
    parser.add_device()
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, measure, print and write; return the exit status."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    keep_to_idle_cores(chosen.device)
    with parser.checking():
        options = read_options(chosen)
        with waiting(READING):
            subjects = load_subjects(chosen.runs, options)
        options = _completed(options, subjects)
        for subject in subjects:
            for length in options.lengths:
                subject.check(options, length)
    with counter("sequences") as shown:
        report = measure(subjects, options, progress=shown)
    _print(report)
    if chosen.out is not None:
        _write(report, Path(chosen.out))
    return 0


def read_lengths(text: str | None) -> tuple[int, ...]:
    """Return the distinct numbers of `128,256,512`, ascending. Raises `ValueError` for anything else."""
    if text is None:
        return ()
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ValueError(f"lengths must be numbers of tokens such as 128,256,512, got {text!r}") from error
    check_at_least(1, lengths=lengths[0])
    return tuple(lengths)


def read_depths(text: str | None) -> tuple[float, ...]:
    """Return five evenly spaced depths from 0 to 1 for `5`, 0.5 for `1`, and lists such as `0,0.5,1` as they are."""
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
        raise ValueError(f"depths must be a number of depths or a list such as 0,0.5,1, got {text!r}") from error
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"a depth must be between 0 (start) and 1 (end), got {depth}")
    return tuple(depths)


def read_options(chosen: Namespace) -> ProbeOptions:
    """Return the options, with the checks that need no model."""
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
    """Return the options with the task and lengths of the runs filled in."""
    probe, trained = subjects[0].probe, subjects[0].trained
    if probe is not None:
        options = replace(options, task=probe.name)
    if options.depths_given and options.task in ("mqar", "position"):
        raise ValueError(f"--depths is for --task passkey and copy, but the task is {options.task}; leave it out")
    return replace(options, lengths=options.lengths or (trained, 2 * trained, 4 * trained))


def load_subjects(folders: Sequence[str], options: ProbeOptions) -> list[Subject]:
    """Load the models in `folders`; raise `ValueError` for runs that don't fit the task or each other."""
    paths = [Path(folder) for folder in folders]
    alike = len({path.name for path in paths}) < len(paths) or any(not path.name for path in paths)
    names = [str(path) if alike else path.name for path in paths]
    probes = [not training.runs.is_classifier(path) and training.runs.is_probe(path) for path in paths]
    if all(probes):
        return _probes([training.runs.load_probe(path, options.device) for path in paths], names, options)
    if any(probes):
        text, probe = (names[probes.index(which)] for which in (False, True))
        raise ValueError(f"{probe} was trained on a probe and {text} was not: they can't be compared")
    return _texts([training.runs.load_run(path, options.device) for path in paths], names, options)


def _probes(loaded: Sequence[training.runs.LoadedProbe], names: Sequence[str], options: ProbeOptions) -> list[Subject]:
    if options.text is not None:
        raise ValueError(f"--text is for language models, but {names[0]} was trained on a probe; leave it out")
    subjects = []
    for run, name in zip(loaded, names, strict=True):
        trained = run.config.probe
        if options.task not in (None, trained.name):
            raise ValueError(
                f"{name} was trained on the probe {trained.name} and can't be asked --task {options.task}; train a "
                f"model that can: {command('train', '--recipe', f'probe-{options.task}')}"
                if options.task != "position"
                else f"--task position is for language models, but {name} was trained on the probe {trained.name}"
            )
        subjects.append(Subject(name, run.decoder, run.config.batch.length, probe=options.changed(trained)))
    first = subjects[0]
    for subject in subjects[1:]:
        if subject.describe()["probe"] != first.describe()["probe"]:
            raise ValueError(
                f"{first.name} and {subject.name} were trained on different probes: {first.describe()['probe']} and "
                f"{subject.describe()['probe']}; compare runs of the same probe"
            )
    return subjects


def _texts(loaded: Sequence[training.runs.LoadedRun], names: Sequence[str], options: ProbeOptions) -> list[Subject]:
    if options.task not in ("passkey", "position"):
        asked = "no --task" if options.task is None else f"--task {options.task}"
        raise ValueError(
            f"{names[0]} is a language model: give --task passkey or position, got {asked}; for mqar and copy train a "
            f"model on that probe, as by: {command('train', '--recipe', 'probe-mqar')}"
        )
    if options.pairs is not None:
        raise ValueError("--pairs is for models trained on the probe mqar; leave it out")
    if options.task == "position" and options.digits is not None:
        raise ValueError("--digits is for --task passkey; leave it out")
    tokenizers = [tokenizer_hash(run.tokenizer) for run in loaded]
    for name, other in zip(names[1:], tokenizers[1:], strict=True):
        if other != tokenizers[0]:
            raise ValueError(f"{names[0]} and {name} have different tokenizers, so they can't be compared")
    text = text_of(loaded[0], options.text, options.cache, "--text").tokens[:]
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


def _print(report: Report) -> None:
    """Print a line for each model and length; ± is one standard error."""
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
    unit = "nats per token" if loss else "per cent"
    title = f"{report.title}\n{unit} ± one standard error, by {LABELS[str(report.options.task)]}"
    names = list(ranges.values())
    spare = [*names[1::2], *names[2::2]]
    print_table(title, headers, lines, spare=spare, elsewhere=" or by --out")


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
