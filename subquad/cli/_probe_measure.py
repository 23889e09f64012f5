"""The measuring of `subquad probe`, and its report: a table, plain values and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from subquad.cli import _draw_probe
from subquad.cli._draw_probe import Measured
from subquad.cli._probe_options import ProbeOptions
from subquad.cli._probe_subjects import Subject, seed_of
from subquad.cli.tables import print_table
from subquad.evaluation.probes import (
    Score,
    by_depth,
    by_distance,
    by_place,
    context_loss,
    overall,
    right_answers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[str, int, int], object]
"""Called as (which run at which length, sequences done, sequences in all)."""

TITLES = {
    "passkey": "Passkey: keys found",
    "mqar": "Multi-query associative recall: values found",
    "copy": "Copying: letters right",
    "position": "Loss of text by tokens of context",
}
LABELS = {
    "passkey": "depth of the key (0: the start)",
    "mqar": "tokens from the value to where it is asked for",
    "copy": "place in the string (0: the start)",
    "position": "tokens of context",
}


@dataclass(frozen=True)
class Entry:
    """What was measured of one model at one length."""

    subject: Subject
    length: int
    whole: Score
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Report:
    """All that one call measured."""

    options: ProbeOptions
    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        first = self.entries[0]
        task, probe = str(self.options.task), first.subject.probe
        if task == "position":
            return f"{TITLES[task]}: {first.whole.sequences} windows at each length{self._trained}"
        about = {
            "passkey": f"{first.subject.digits if probe is None else probe.digits} digits",
            "mqar": "" if probe is None else f"{probe.pairs} pairs among {probe.symbols} keys",
            "copy": "" if probe is None else f"{probe.symbols} letters",
        }[task]
        per = " and depth" if task == "passkey" else ""
        chance = f"{100 * first.subject.chance:.3g}%"
        asked = f"{self.options.samples} sequences at each length{per}"
        return f"{TITLES[task]} ({about}; chance {chance}); {asked}{self._trained}"

    @property
    def _trained(self) -> str:
        """The length in training, where it is one for all models."""
        trained = {entry.subject.trained for entry in self.entries}
        return f"; trained on {trained.pop():,} tokens" if len(trained) == 1 else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        options = self.options
        runs: dict[str, dict[str, Any]] = {}
        for entry in self.entries:
            run = runs.setdefault(entry.subject.name, {**entry.subject.describe(), "lengths": []})
            scores = [score.to_dict() for score in entry.scores]
            run["lengths"].append({"length": entry.length, "overall": entry.whole.to_dict(), "scores": scores})
        return {
            "task": options.task,
            "lengths": list(options.lengths),
            "samples": options.samples,
            "seed": options.seed,
            "chance": None if options.task == "position" else self.entries[0].subject.chance,
            "ranges": LABELS[str(options.task)],
            "text": options.text,
            "runs": list(runs.values()),
        }

    def ranges(self) -> dict[tuple[float, float], str]:
        """The ranges of all scores, in order, and how they are written."""
        found = sorted({(score.start, score.stop) for entry in self.entries for score in entry.scores})
        return {(start, stop): self._written(start, stop) for start, stop in found}

    def _written(self, start: float, stop: float) -> str:
        if self.options.task in ("mqar", "position"):
            return f"{start:,}" if start + 1 == stop else f"{start:,} to {stop - 1:,}"
        return f"{start:.2f}" if start == stop else f"{start:.2f} to {stop:.2f}"

    def print(self) -> None:
        """The table: a line for each model and length; ± is one standard error."""
        loss = self.options.task == "position"
        ranges = self.ranges()
        whole = f"last {self.entries[0].whole.asked // self.entries[0].whole.sequences:,}" if loss else "all"
        lines = []
        before = None
        for entry in self.entries:
            known = {(score.start, score.stop): score for score in entry.scores}
            cells = [_cell(known[place], loss=loss) if place in known else "" for place in ranges]
            name = entry.subject.name
            lines.append([name if name != before else "", f"{entry.length:,}", _cell(entry.whole, loss=loss), *cells])
            if not loss:
                lines[-1].append(f"{100 * entry.subject.chance:.3g}")
            before = name
        headers = ["", "tokens", whole, *ranges.values(), *([] if loss else ["chance"])]
        unit = "nats a token" if loss else "per cent"
        title = f"{self.title}\n{unit} ± one standard error, by {LABELS[str(self.options.task)]}"
        print_table(title, headers, lines, markdown=False)

    def draw(self) -> Figure:
        """Heatmaps of passkey and mqar, lines of copy and position."""
        task = str(self.options.task)
        measured = [Measured(entry.subject.name, entry.length, entry.scores) for entry in self.entries]
        if task in ("passkey", "mqar"):
            chance = self.entries[0].subject.chance
            return _draw_probe.draw_heatmaps(
                measured, title=self.title, label=LABELS[task], names=self.ranges(), chance=chance
            )
        loss = task == "position"
        return _draw_probe.draw_lines(
            measured,
            title=self.title,
            x=LABELS[task],
            y="nats a token" if loss else "accuracy",
            chance=None if loss else self.entries[0].subject.chance,
            doubling=loss,
        )


def _cell(score: Score, *, loss: bool) -> str:
    if loss:
        return f"{score.value:.3f} ±{score.error:.3f}"
    return f"{100 * score.value:.1f} ±{100 * score.error:.1f}"


def measure(subjects: Sequence[Subject], options: ProbeOptions, *, progress: Progress | None = None) -> Report:
    """Ask each model at each length."""
    if options.task == "position":
        return Report(options, tuple(entry for subject in subjects for entry in _losses(subject, options, progress)))
    entries = [_answers(subject, options, length, progress) for subject in subjects for length in options.lengths]
    return Report(options, tuple(entries))


def _answers(subject: Subject, options: ProbeOptions, length: int, progress: Progress | None) -> Entry:
    what = f"{subject.name} at {length:,} tokens"

    def ask(number: int, depth: float | None, of: int) -> tuple[Any, Any]:
        rows = subject.rows(length, options.samples, depth=depth, seed=seed_of(options, length, number))
        total = of * options.samples

        def show(done: int, _: int) -> None:
            if progress:
                progress(what, number * options.samples + done, total)

        return rows, right_answers(subject.decoder, rows, batch_size=options.batch_size, progress=show)

    if options.task == "passkey":
        asked = [ask(i, depth, len(options.depths)) for i, depth in enumerate(options.depths)]
        scores = [by_depth(*pair, depth) for pair, depth in zip(asked, options.depths, strict=True)]
        return Entry(subject, length, _joined(scores), tuple(scores))
    rows, right_BT = ask(0, None, 1)
    scores = by_distance(rows, right_BT) if options.task == "mqar" else by_place(rows, right_BT, len(options.depths))
    return Entry(subject, length, overall(rows, right_BT), tuple(scores))


def _joined(scores: Sequence[Score]) -> Score:
    """The mean over depths with equally many keys each; errors of independent means add in squares."""
    value = sum(score.value for score in scores) / len(scores)
    error = sum(score.error**2 for score in scores) ** 0.5 / len(scores)
    count = sum(score.asked for score in scores)
    return Score(scores[0].length, scores[0].start, scores[-1].stop, count, count, value, error)


def _losses(subject: Subject, options: ProbeOptions, progress: Progress | None) -> list[Entry]:
    assert subject.text is not None

    def show(done: int, total: int) -> None:
        if progress:
            progress(subject.name, done, total)

    measured = context_loss(
        subject.decoder,
        subject.text,
        lengths=options.lengths,
        windows=options.samples,
        batch_size=options.batch_size,
        progress=show,
    )
    return [Entry(subject, found.same.length, found.same, found.by_context) for found in measured]
