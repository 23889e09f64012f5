"""Compare several models on a probe: passkey, recall, copying or loss by context; scores and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from subquad.data.config import ProbeConfig
from subquad.data.probes import MEASURE, ProbeRows, probe_rows, text_passkey
from subquad.evaluation import drawing
from subquad.evaluation.probes import (
    Score,
    by_depth,
    by_distance,
    by_place,
    check_reach,
    check_rows,
    check_windows,
    context_loss,
    overall,
    right_answers,
)
from subquad.models import Decoder

TaskName = Literal["passkey", "mqar", "copy", "position"]
Progress = Callable[[str, int, int], object]
"""Called as (run and length as text, sequences done, total sequences)."""

TITLES = {
    "passkey": "Passkey: keys found",
    "mqar": "Multi-query associative recall: values found",
    "copy": "Copying: letters right",
    "position": "Loss of text by tokens of context",
}
LABELS = {
    "passkey": "depth of the key (0: start, 1: end)",
    "mqar": "tokens from value to query",
    "copy": "place in the string (0: start, 1: end)",
    "position": "tokens of context",
}
CELL = 0.62
"""Width of a heatmap cell, in inches."""
COLUMNS = 3
"""Heatmaps per row."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """The options of `subquad probe`."""

    task: TaskName | None
    """None: the task that the runs were trained on."""
    lengths: tuple[int, ...]
    """Empty: one, two and four times the training length."""
    depths: tuple[float, ...]
    depths_given: bool
    samples: int
    seed: int
    batch_size: int
    digits: int | None
    pairs: int | None
    text: str | None
    cache: str | None
    device: str

    def changed(self, probe: ProbeConfig) -> ProbeConfig:
        """Return a run's probe with --digits, --pairs and the longest copies; `ValueError` for an option of another."""
        for name, where in (("digits", "passkey"), ("pairs", "mqar")):
            value = getattr(self, name)
            if value is not None and probe.name != where:
                raise ValueError(f"--{name} is for the probe {where}, but the run's is {probe.name}; leave it out")
            if value is not None:
                probe = probe.replace(**{name: value})
        return probe.replace(shortest=None)


@dataclass(frozen=True)
class Subject:
    """A model and its questions: a probe in its own vocabulary, or a text."""

    name: str
    decoder: Decoder
    trained: int
    """Training length in tokens."""
    probe: ProbeConfig | None = None
    """The probe it was trained on, with the command's changes; None for a language model."""
    text: np.ndarray | None = None
    """Tokens of the text, for a language model."""
    tokenizer: Tokenizer | None = None
    digits: int = 0
    """Digits of a key hidden in text."""

    @property
    def chance(self) -> float:
        """Return the accuracy of guessing."""
        return 10.0**-self.digits if self.probe is None else self.probe.chance

    def rows(self, length: int, rows: int, *, depth: float | None = None, seed: Sequence[int]) -> ProbeRows:
        """Return `rows` sequences of `length` tokens, the same for all models of one probe or one tokenizer."""
        if self.probe is not None:
            return probe_rows(self.probe, length, rows, depth=depth, seed=seed)
        assert self.tokenizer is not None
        assert self.text is not None
        return text_passkey(self.tokenizer, self.text, length, rows, digits=self.digits, depth=depth, seed=seed)

    def check(self, options: ProbeOptions, length: int) -> None:
        """Raise `ValueError` if sequences of `length` tokens can't be made or the model can't answer them."""
        if options.task == "position":
            assert self.text is not None
            check_windows(self.decoder, len(self.text), [length])
        elif self.probe is not None:
            check_reach(self.decoder, length, self.probe.first_asked(length))
        else:
            for depth in options.depths:
                check_rows(self.decoder, self.rows(length, 1, depth=depth, seed=seed_of(options, length)))

    def describe(self) -> dict[str, Any]:
        """Return the run, the model's shape and its probe as plain values, for JSON."""
        model = self.decoder.config.to_dict()
        shown = ("attention", "options", "num_layers", "num_heads", "dim", "position")
        probe = None if self.probe is None else self.probe.to_dict()
        return {
            "run": self.name,
            "model": {name: model[name] for name in shown},
            "parameters": self.decoder.num_parameters(),
            "trained_length": self.trained,
            "probe": probe and {name: probe[name] for name in ("name", "digits", "pairs", "symbols")},
        }


def seed_of(options: ProbeOptions, length: int, depth: int = 0) -> tuple[int, ...]:
    """Return the seed for one length and the number of a depth; training draws from another stream."""
    return (options.seed, MEASURE, length, depth)


@dataclass(frozen=True)
class Entry:
    """The scores of one model at one length."""

    subject: Subject
    length: int
    whole: Score
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Report:
    """The scores of all models at all lengths."""

    options: ProbeOptions
    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        """Return a line with the task, its size, chance and the number of sequences."""
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
        """Return the training length as text, or an empty string if the models differ in it."""
        trained = {entry.subject.trained for entry in self.entries}
        return f"; trained on {trained.pop():,} tokens" if len(trained) == 1 else ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
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
        """Return the ranges of all scores in order, each with its label."""
        found = sorted({(score.start, score.stop) for entry in self.entries for score in entry.scores})
        if self.options.task in ("mqar", "position"):
            return {(a, b): f"{a:,}" if a + 1 == b else f"{a:,} to {b - 1:,}" for a, b in found}
        return {(a, b): f"{a:.2f}" if a == b else f"{a:.2f} to {b:.2f}" for a, b in found}

    def draw(self) -> drawing.Figure:
        """Draw heatmaps for passkey and mqar, lines for copy and position."""
        task = str(self.options.task)
        if task in ("passkey", "mqar"):
            chance = self.entries[0].subject.chance
            return draw_heatmaps(self.entries, title=self.title, label=LABELS[task], names=self.ranges(), chance=chance)
        loss = task == "position"
        return draw_lines(
            self.entries,
            title=self.title,
            x=LABELS[task],
            y="loss (nats per token)" if loss else "accuracy (share of letters)",
            chance=None if loss else self.entries[0].subject.chance,
            doubling=loss,
        )


def measure(subjects: Sequence[Subject], options: ProbeOptions, *, progress: Progress | None = None) -> Report:
    """Measure each model at each length."""
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
    """Return the mean over depths with equally many keys; the squared errors of the independent means add up."""
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


def draw_heatmaps(
    measured: Sequence[Entry], *, title: str, label: str, names: Mapping[tuple[float, float], str], chance: float
) -> drawing.Figure:
    """Draw a panel per model: columns are lengths, rows the ranges in `names`; white cells had no questions."""
    models = list(dict.fromkeys(entry.subject.name for entry in measured))
    lengths = sorted({entry.length for entry in measured})
    grid = drawing.in_rows(models, COLUMNS)
    width = max(1.9, CELL * len(lengths)) * len(grid[0]) + 2.2
    figure = drawing.new_figure(max(width, 5.0), (CELL * 0.6 * len(names) + 0.75) * len(grid) + 0.8)
    _title(figure, title)
    images = []
    for axis, model, left, bottom in drawing.places(figure, grid):
        own = [entry for entry in measured if entry.subject.name == model]
        images.append(_heatmap(axis, own, lengths, list(names)))
        axis.set_title(model if len(models) > 1 else "", fontsize=10)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axis.set_yticks(range(len(names)), list(names.values()) if left else [""] * len(names), fontsize=8)
        axis.tick_params(length=0)
        if bottom:
            axis.set_xlabel("sequence length (tokens)", fontsize=9)
    figure.supylabel(label, fontsize=9)
    bar = figure.colorbar(images[0], ax=figure.axes, fraction=0.04, aspect=25, pad=0.02)
    bar.set_label("accuracy (orange: chance, white: not asked)", fontsize=9)
    bar.ax.axhline(chance, color="#d55e00", linewidth=2)
    return figure


def _heatmap(
    axis: drawing.Axes, measured: Sequence[Entry], lengths: Sequence[int], ranges: Sequence[tuple[float, float]]
) -> drawing.AxesImage:
    """Draw one model's panel, with each cell's accuracy in per cent."""
    from matplotlib.colors import Normalize

    values_RL = np.full((len(ranges), len(lengths)), np.nan)
    for entry in measured:
        for score in entry.scores:
            values_RL[ranges.index((score.start, score.stop)), lengths.index(entry.length)] = score.value
    colours = drawing.palette().with_extremes(bad=drawing.OUT_OF_REACH)
    for (row, column), value in np.ndenumerate(values_RL):
        if not np.isnan(value):  # dark text on bright cells, bright text on dark ones
            colour = "black" if value > 0.5 else "white"
            axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=8)
    return axis.imshow(values_RL, cmap=colours, norm=Normalize(0, 1), aspect="auto", interpolation="nearest")


def _title(figure: drawing.Figure, title: str) -> None:
    """Write the title, wrapped to the width of the figure."""
    letters = int(14 * figure.get_size_inches()[0])
    figure.suptitle(textwrap.fill(title, letters), fontsize=10)


def draw_lines(
    measured: Sequence[Entry], *, title: str, x: str, y: str, chance: float | None, doubling: bool
) -> drawing.Figure:
    """Draw the value against the middle of each range, with two standard errors; `doubling` makes x logarithmic.

    One model has a line per length; several models have a panel per length with a line per model.
    """
    models = list(dict.fromkeys(entry.subject.name for entry in measured))
    lengths = sorted({entry.length for entry in measured})
    several = len(models) > 1
    panels = lengths if several else [0]
    figure = drawing.new_figure(8.2, 3.0 * len(panels) + 1.0 if several else 4.4)
    _title(figure, title)
    axes = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        lines = [entry for entry in measured if not several or entry.length == panel]
        for entry in lines:
            number = models.index(entry.subject.name) if several else lengths.index(entry.length)
            _line(axis, entry, entry.subject.name if several else f"{entry.length:,} tokens", number, doubling=doubling)
        if chance is not None:
            axis.axhline(chance, color="#7f7f7f", linestyle="-.", linewidth=1.2, label="chance")
            axis.set_ylim(-0.03, 1.03)
            axis.set_xlim(0, 1)
        if several:
            axis.set_title(f"{panel:,} tokens", fontsize=10)
        axis.set_ylabel(y, fontsize=9)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    if doubling:
        axes[-1].set_xscale("log", base=2)
        axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes[0].legend(
        title="" if several else "sequence length",
        title_fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=8,
        handlelength=4,
    )
    axes[-1].set_xlabel(f"{x}; bars: two standard errors", fontsize=9)
    return figure


def _line(axis: drawing.Axes, entry: Entry, label: str, number: int, *, doubling: bool) -> None:
    """Draw one line, with a range a to b - 1 of whole numbers at sqrt(a (b - 1)) and a range of shares at its mean."""
    style = drawing.Style.number(number)
    x = [
        (score.start * (score.stop - 1)) ** 0.5 if doubling else (score.start + score.stop) / 2
        for score in entry.scores
    ]
    axis.errorbar(
        x,
        [score.value for score in entry.scores],
        [2 * score.error for score in entry.scores],
        color=style.color,
        linestyle=style.linestyle,
        marker=style.marker,
        markersize=4,
        linewidth=1.2,
        capsize=2,
        label=label,
    )
