"""The models that `subquad probe` measures, and what each is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from subquad.cli._probe_options import ProbeOptions
from subquad.data import prepare
from subquad.data.config import ProbeConfig
from subquad.data.corpus import prepare_shard
from subquad.data.probes import MEASURE, ProbeRows, probe_rows, text_passkey
from subquad.data.tokenizers import tokenizer_hash
from subquad.evaluation.probes import check_reach, check_rows, check_windows
from subquad.models import Decoder
from subquad.training.runs import LoadedProbe, LoadedRun, is_classifier, is_probe, load_probe, load_run

DEFAULT_LENGTH = 256
"""Tokens where neither --lengths nor a training configuration says how many."""


@dataclass(frozen=True)
class Subject:
    """A model and its questions: a probe's of its own vocabulary, or in a text's tokens."""

    name: str
    decoder: Decoder
    trained: int
    """Tokens of the sequences in training."""
    probe: ProbeConfig | None = None
    """What it was trained on, with the command's changes; None for a model of text."""
    text: np.ndarray | None = None
    """Tokens of a text, for a model of text."""
    tokenizer: Tokenizer | None = None
    digits: int = 0
    """Digits of a key in a text."""

    @property
    def chance(self) -> float:
        """Accuracy without memory."""
        return 10.0**-self.digits if self.probe is None else self.probe.chance

    def rows(self, length: int, rows: int, *, depth: float | None = None, seed: Sequence[int]) -> ProbeRows:
        """Sequences of `length` tokens: the same for every model of the same probe, or with the same tokenizer."""
        if self.probe is not None:
            return probe_rows(self.probe, length, rows, depth=depth, seed=seed)
        assert self.tokenizer is not None
        assert self.text is not None
        return text_passkey(self.tokenizer, self.text, length, rows, digits=self.digits, depth=depth, seed=seed)

    def check(self, options: ProbeOptions, length: int) -> None:
        """Raise `ValueError` where sequences of `length` tokens cannot be made, or the model cannot answer them."""
        if options.task == "position":
            assert self.text is not None
            check_windows(self.decoder, len(self.text), [length])
        elif self.probe is not None:
            check_reach(self.decoder, length, self.probe.first_asked(length))
        else:
            for depth in options.depths:
                check_rows(self.decoder, self.rows(length, 1, depth=depth, seed=seed_of(options, length)))

    def describe(self) -> dict[str, Any]:
        """What was measured, for JSON."""
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
    """The seed of the sequences of one length and, by its number, one depth; training uses another stream."""
    return (options.seed, MEASURE, length, depth)


def load_subjects(folders: Sequence[str], options: ProbeOptions) -> list[Subject]:
    """The models in `folders`. Raises `ValueError` for runs that the task is not for or that cannot be compared."""
    paths = [Path(folder) for folder in folders]
    alike = len({path.name for path in paths}) < len(paths) or any(not path.name for path in paths)
    names = [str(path) if alike else path.name for path in paths]
    probes = [not is_classifier(path) and is_probe(path) for path in paths]
    if all(probes):
        return _probes([load_probe(path, options.device) for path in paths], names, options)
    if any(probes):
        text, probe = (names[probes.index(which)] for which in (False, True))
        raise ValueError(f"{probe} was trained on a probe and {text} was not: they cannot be asked the same")
    return _texts([load_run(path, options.device) for path in paths], names, options)


def _probes(loaded: Sequence[LoadedProbe], names: Sequence[str], options: ProbeOptions) -> list[Subject]:
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


def _texts(loaded: Sequence[LoadedRun], names: Sequence[str], options: ProbeOptions) -> list[Subject]:
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


def _text(run: LoadedRun, options: ProbeOptions) -> np.ndarray:
    """The tokens of --text, or of the held-out part of what the first run was trained on."""
    if options.text is not None:
        return prepare_shard(options.text, run.tokenizer, cache=options.cache).tokens
    if run.config is None:
        raise ValueError(f"{run.folder} has no config.yaml that names its text; give one by --text")
    data = run.config.data
    corpus = prepare(data.replace(cache=options.cache or data.cache))
    if tokenizer_hash(corpus.tokenizer) != tokenizer_hash(run.tokenizer):
        raise ValueError(
            f"the text {data.path!r} is not what {run.folder} was trained on: it gives another tokenizer; "
            "give a text by --text"
        )
    return corpus.held_out.tokens[:]
