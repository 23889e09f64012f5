"""`subquad data`: make or open a labelled data set, and say what is in it."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from subquad.cli.arguments import Parser
from subquad.cli.tables import console, count, print_table, write_json
from subquad.data.config import DatasetName, LabelledConfig

if TYPE_CHECKING:
    from subquad.data.labelled import LabelledCorpus

LENGTHS = {"toy": 48, "listops": 2000, "text": 4000, "retrieval": 4000, "image": 1024}
"""Tokens of a sequence in Long Range Arena; those of Pathfinder are its pixels."""
COMMANDS = ("tokens", "check")
"""What is no data set but a command of `_data_tokens`."""
PICTURES = ("image", "pathfinder32", "pathfinder64", "pathfinder128")
LOOKED_AT = 2000
"""Sequences of a part that are counted where they are made as they are read."""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        "data DATASET",
        "Make or open a data set for --task classify and print its statistics: examples, lengths, classes, what is "
        "cut, and one example. Interrupted work goes on when the same command is given again. `subquad data tokens` "
        "makes a folder of token shards of any text, `subquad data check` reads one through; see their --help.",
    )
    parser.add_argument("dataset", type=DatasetName, help="Which data set; toy, listops and pathfinder need no path.")
    parser.add_class_arguments(LabelledConfig, None, as_group=False, skip={"dataset"})
    parser.add_argument(
        "--length", type=int | None, default=None, help="Tokens of a sequence (null: those of Long Range Arena)."
    )
    parser.add_argument("--workers", type=int | None, default=None, help="Processes that make it (null: one a CPU).")
    parser.add_argument(
        "--out", type=str | None, default=None, help="Draw samples with their labels to this PNG (images, pathfinder)."
    )
    parser.add_argument("--samples", type=int, default=16, help="How many samples to draw.")
    parser.add_argument("--json", type=str | None, default=None, help="Also write the numbers to this file.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, make or open, print, return the exit status."""
    if arguments and arguments[0] in COMMANDS:
        from subquad.cli import _data_tokens

        return _data_tokens.run(arguments)
    parser = make_parser()
    values = parser.parse_args(arguments).as_dict()
    with parser.checking():
        names = (field.name for field in dataclasses.fields(LabelledConfig))
        config = LabelledConfig.from_dict({name: values[name] for name in names})
        length = _length(config, values["length"])
        _check(config, values)
    from subquad.data.labelled import labelled_corpus

    begin = time.perf_counter()
    progress: Any = _show_progress if sys.stderr.isatty() else None
    corpus = labelled_corpus(config, length, workers=values["workers"], progress=progress)
    record = _record(config, length, corpus, time.perf_counter() - begin)
    _print(config, corpus, record)
    if values["out"] is not None:
        from subquad.cli._draw_samples import draw_samples

        drawn = draw_samples(corpus, values["samples"], values["out"])
        console().print(Text(f"{values['out']} shows {drawn} sequences to learn from."))
    if values["json"] is not None:
        write_json(values["json"], record)
    return 0


def _length(config: LabelledConfig, given: int | None) -> int:
    if given is not None and given < 1:
        raise ValueError(f"length must be at least 1, got {given}")
    if given is None and config.dataset in LENGTHS:
        return LENGTHS[config.dataset]
    return given if given is not None else int(config.dataset.removeprefix("pathfinder")) ** 2


def _check(config: LabelledConfig, values: dict[str, Any]) -> None:
    """Raise `ValueError` or `FileNotFoundError` for options that cannot be followed, before any work."""
    config.check_source()
    if values["workers"] is not None and values["workers"] < 1:
        raise ValueError(f"workers must be at least 1, got {values['workers']}")
    if values["samples"] < 1:
        raise ValueError(f"samples must be at least 1, got {values['samples']}")
    if values["out"] is not None:
        if config.dataset not in PICTURES:
            raise ValueError(f"--out draws images, and {config.dataset} has none; {', '.join(PICTURES)} have")
        if not str(values["out"]).lower().endswith(".png"):
            raise ValueError(f"--out must name a .png file, got {values['out']!r}")
    for name in ("out", "json"):
        if values[name] is not None and not Path(values[name]).absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {Path(values[name]).absolute().parent} for --{name}")


def _record(config: LabelledConfig, length: int, corpus: LabelledCorpus, seconds: float) -> dict[str, Any]:
    """The numbers of the data set."""
    parts = {name: _part(getattr(corpus, name), len(corpus.classes)) for name in ("train", "held_out", "test")}
    return {
        "dataset": config.dataset,
        "path": config.path,
        "length": length,
        "vocab_size": corpus.vocab_size,
        "classes": list(corpus.classes),
        "pairs": corpus.pairs,
        "fingerprint": corpus.fingerprint,
        "seconds": seconds,
        "parts": parts,
    }


def _part(items: Any, classes: int) -> dict[str, Any]:
    import numpy as np

    from subquad.data.lra.store import Sequences

    if isinstance(items, Sequences):
        lengths, labels, cut = items.full_lengths, items.labels, items.cut
    else:
        some = [items[i] for i in range(min(LOOKED_AT, len(items)))]
        lengths = np.array([int(item["attention_mask"].sum()) for item in some])
        labels, cut = np.array([int(item["labels"]) for item in some]), 0
    return {
        "examples": len(items),
        "tokens": int(lengths.sum()),
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "longest": int(lengths.max()),
        "cut": cut,
        "shares": (np.bincount(labels, minlength=classes) / len(labels)).tolist(),
    }


def _print(config: LabelledConfig, corpus: LabelledCorpus, record: dict[str, Any]) -> None:
    headers = ("", "examples", "tokens", "shortest", "median", "mean", "longest", f"cut to {record['length']:,}")
    lines = [
        (
            name,
            f"{part['examples']:,}",
            count(part["tokens"]),
            *(f"{part[key]:,.0f}" for key in ("shortest", "median", "mean", "longest")),
            f"{part['cut']:,}",
        )
        for name, part in record["parts"].items()
    ]
    print_table(f"{config.dataset}: {corpus.vocab_size} tokens", headers, lines, markdown=False)
    shares = [
        (name, *(f"{part['shares'][number]:.2%}" for part in record["parts"].values()))
        for number, name in enumerate(corpus.classes)
    ]
    print_table("classes", ("", *record["parts"]), shares, markdown=False)
    out = console()
    if config.dataset == "toy":
        out.print(Text(f"tokens and classes are those of the first {LOOKED_AT:,} of a part"))
    out.print(Text(f"made or opened in {record['seconds']:.1f} s; fingerprint {corpus.fingerprint}"))
    out.print(Text(f"an example to learn from:\n{example(config.dataset, corpus)}"))


def example(dataset: str, corpus: LabelledCorpus, shown: int = 400) -> str:
    """The first example to learn from as text, and its class; of long ones the first `shown` characters."""
    item = corpus.train[0]
    texts = []
    for name in ("", "pair_")[: 1 + corpus.pairs]:
        tokens = item[f"{name}input_ids"][item[f"{name}attention_mask"].bool()].tolist()
        text = _picture(tokens, corpus) if dataset in PICTURES else _text(dataset, tokens)
        texts.append(text if len(text) <= shown or dataset in PICTURES else f"{text[:shown]} ...")
    return "\n-- and --\n".join(texts) + f"\n-> {corpus.classes[int(item['labels'])]}"


def _text(dataset: str, tokens: list[int]) -> str:
    """A sequence in words, characters or numbers."""
    if dataset == "listops":
        from subquad.data.lra.listops import WORDS

        return " ".join(WORDS[token] for token in tokens)
    if dataset in ("text", "retrieval"):
        return bytes(tokens).decode(errors="replace")
    return " ".join(map(str, tokens))


def _picture(tokens: list[int], corpus: LabelledCorpus) -> str:
    """The rows of an image that are there, a character for a pixel; of one that is not square the grey levels."""
    train: Any = corpus.train
    pixels = int(train.full_lengths[0, 0])
    width = math.isqrt(pixels)
    if width**2 != pixels:
        return _text("", tokens)
    step = max(1, width // 32)
    rows = [tokens[start : start + width : step] for start in range(0, len(tokens), width * step)]
    return "\n".join("".join(" .:-=+*#%@"[level * 10 // 256] for level in row) for row in rows)


def _show_progress(what: str, done: int, total: int) -> None:
    """One line that counts."""
    end = "\n" if done == total else ""
    sys.stderr.write(f"\r{what}: {done:,} of {total:,}{end}")
    sys.stderr.flush()
