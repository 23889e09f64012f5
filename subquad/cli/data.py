"""`subquad data`: make or open a labelled data set or a folder of token shards, and print statistics."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from subquad.bars import counter
from subquad.cli.arguments import Parser, check_output
from subquad.cli.rich_table import console
from subquad.cli.tables import count, print_table, show_line
from subquad.config import check_at_least
from subquad.data.config import DatasetName, LabelledConfig
from subquad.data.files import write_json
from subquad.data.labelled import LabelledCorpus, labelled_corpus
from subquad.data.lra.listops import WORDS
from subquad.data.lra.store import Sequences
from subquad.data.sources import open_source
from subquad.data.token_set import ShardError, TokenSet
from subquad.data.token_writer import check_target, write_tokens
from subquad.data.tokenizers import load_tokenizer
from subquad.data.vocabularies import TRAINED

LENGTHS = {"toy": 48, "listops": 2000, "text": 4000, "retrieval": 4000, "image": 1024}
"""Sequence length in tokens in Long Range Arena; Pathfinder's is its number of pixels."""
PICTURES = ("image", "pathfinder32", "pathfinder64", "pathfinder128")
SHARD_TOKENS = 1 << 27
"""Tokens per shard: 256 MiB at two bytes per token."""
LOOKED_AT = 2000
"""Sequences per part that statistics cover if a data set is generated on the fly."""


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "data DATASET",
        "Make or open a labelled data set for `subquad train --task classify` and print statistics: examples, lengths, "
        "classes, truncated sequences, and one example. To resume interrupted work, repeat the command. `subquad data "
        "tokens` makes a folder of token shards from any text, `subquad data check` verifies one; see their --help.",
    )
    parser.add_argument("dataset", type=DatasetName, help="Name; toy, listops and pathfinder* are generated.")
    parser.add_class_arguments(LabelledConfig, None, as_group=False, skip={"dataset"})
    parser.add_optional("--length", "Tokens per sequence. null: as in Long Range Arena.", int)
    parser.add_optional("--workers", "Processes that make the data set. null: one per CPU.", int)
    parser.add_optional("--out", "Draw samples with their labels to this PNG file (image and pathfinder* only).")
    parser.add_argument("--samples", type=int, default=16, help="Number of samples to draw.")
    parser.add_optional("--json", "Also write the numbers to this JSON file.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, make or open the data set and print; return the exit status."""
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    parser = make_parser()
    values = parser.parse_args(arguments).as_dict()
    with parser.checking():
        names = (field.name for field in dataclasses.fields(LabelledConfig))
        config = LabelledConfig.from_dict({name: values[name] for name in names})
        length = _length(config, values["length"])
        _check(config, values)
    begin = time.perf_counter()
    with counter() as shown:
        corpus = labelled_corpus(config, length, workers=values["workers"], progress=shown)
    record = _record(config, length, corpus, time.perf_counter() - begin)
    _print(config, corpus, record)
    if values["out"] is not None:
        drawn = draw_samples(corpus, values["samples"], values["out"])
        console().print(Text(f"{values['out']} shows {drawn} training examples."))
    if values["json"] is not None:
        write_json(values["json"], record)
    return 0


def _length(config: LabelledConfig, given: int | None) -> int:
    check_at_least(1, length=given)
    if given is None and config.dataset in LENGTHS:
        return LENGTHS[config.dataset]
    return given if given is not None else int(config.dataset.removeprefix("pathfinder")) ** 2


def _check(config: LabelledConfig, values: dict[str, Any]) -> None:
    """Raise `ValueError` or `FileNotFoundError`, before any work, for invalid options."""
    config.check_source()
    check_at_least(1, workers=values["workers"], samples=values["samples"])
    if values["out"] is not None:
        if config.dataset not in PICTURES:
            raise ValueError(f"--out draws images, and {config.dataset} has none; {', '.join(PICTURES)} have")
        if not str(values["out"]).lower().endswith(".png"):
            raise ValueError(f"--out must name a .png file, got {values['out']!r}")
    for name in ("out", "json"):
        check_output(name, values[name])


def _record(config: LabelledConfig, length: int, corpus: LabelledCorpus, seconds: float) -> dict[str, Any]:
    """Return the statistics of the data set."""
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
    print_table(f"{config.dataset}: {corpus.vocab_size} tokens", headers, lines)
    shares = [
        (name, *(f"{part['shares'][number]:.2%}" for part in record["parts"].values()))
        for number, name in enumerate(corpus.classes)
    ]
    print_table("classes", ("", *record["parts"]), shares)
    out = console()
    if config.dataset == "toy":
        out.print(Text(f"tokens and classes are of the first {LOOKED_AT:,} examples of each part"))
    out.print(Text(f"made or opened in {record['seconds']:.1f} s; fingerprint {corpus.fingerprint}"))
    out.print(Text(f"a training example:\n{example(config.dataset, corpus)}"))


def example(dataset: str, corpus: LabelledCorpus, shown: int = 400) -> str:
    """Return the first training example as text, cut to `shown` characters, with its class."""
    item = corpus.train[0]
    texts = []
    for name in ("", "pair_")[: 1 + corpus.pairs]:
        tokens = item[f"{name}input_ids"][item[f"{name}attention_mask"].bool()].tolist()
        text = _picture(tokens, corpus) if dataset in PICTURES else _text(dataset, tokens)
        texts.append(text if len(text) <= shown or dataset in PICTURES else f"{text[:shown]} ...")
    return "\n-- and --\n".join(texts) + f"\n-> {corpus.classes[int(item['labels'])]}"


def _text(dataset: str, tokens: list[int]) -> str:
    """Return a sequence as words, characters or numbers."""
    if dataset == "listops":
        return " ".join(WORDS[token] for token in tokens)
    if dataset in ("text", "retrieval"):
        return bytes(tokens).decode(errors="replace")
    return " ".join(map(str, tokens))


def _picture(tokens: list[int], corpus: LabelledCorpus) -> str:
    """Return an image as rows of characters, one per pixel; the grey levels as numbers if it isn't square."""
    train: Any = corpus.train
    pixels = int(train.full_lengths[0, 0])
    width = math.isqrt(pixels)
    if width**2 != pixels:
        return _text("", tokens)
    step = max(1, width // 32)
    rows = [tokens[start : start + width : step] for start in range(0, len(tokens), width * step)]
    return "\n".join("".join(" .:-=+*#%@"[level * 10 // 256] for level in row) for row in rows)


def draw_samples(corpus: LabelledCorpus, samples: int, path: str) -> int:
    """Draw up to `samples` evenly spread images with classes; return how many. `ValueError` unless square and whole."""
    from matplotlib.figure import Figure

    train: Any = corpus.train
    if train.cut:
        raise ValueError(f"images truncated to {train.length} pixels can't be drawn; leave --length out")
    samples = min(samples, len(train))
    columns = max(1, round(samples**0.5 + 0.49))
    rows = -(-samples // columns)
    figure = Figure(figsize=(1.6 * columns, 1.8 * rows + 0.4), layout="constrained", dpi=100)
    figure.suptitle(f"{samples} of {len(train):,} training examples", fontsize=10)
    for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).ravel()):
        axes.axis("off")
        if number >= samples:
            continue
        item = train[number * len(train) // samples]  # they may be sorted by class
        pixels = item["input_ids"][item["attention_mask"].bool()].numpy()
        width = int(len(pixels) ** 0.5)
        if width * width != len(pixels):
            raise ValueError(f"an image of {len(pixels)} pixels is not square and can't be drawn")
        axes.imshow(pixels.reshape(width, width), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_title(corpus.classes[int(item["labels"])], fontsize=8)
    figure.savefig(path)
    return samples


def make_tokens_parser() -> Parser:
    """Return the options of `subquad data tokens`."""
    parser = Parser(
        "data tokens PATH ...",
        "Tokenize texts of any size into a folder of token shards, holding one document in memory at a time. Train on "
        "it with `subquad train --data.path FOLDER`.",
    )
    parser.add_argument(
        "paths", type=str, nargs="+", metavar="PATH", help="Texts, in order: files, folders, globs, archives, hf:NAME."
    )
    parser.add_argument("--out", type=str, required=True, help="Folder to make; it must not exist.")
    parser.add_argument(
        "--tokenizer",
        type=str,
        default="bytes",
        help="`bytes`, a tokenizer.json, or a folder with a tokenizer.json (such as a run's) or GPT-2's two files.",
    )
    parser.add_argument(
        "--shard_tokens", type=int, default=SHARD_TOKENS, help="Start a new shard after this many tokens."
    )
    parser.add_argument(
        "--skip_bad_files", type=bool, default=False, help="Skip files that aren't UTF-8 text, with a warning for each."
    )
    parser.add_optional("--json", "Also write the numbers to this JSON file.")
    return parser


def _make_tokens(arguments: Sequence[str]) -> int:
    parser = make_tokens_parser()
    values = parser.parse_args(arguments).as_dict()
    with parser.checking():
        if values["tokenizer"] in TRAINED:
            raise ValueError(
                f"tokenizer {values['tokenizer']!r} has to be trained on the text first: train a model on a part of it "
                "(`subquad train --data.path PART`) and give the folder of that run"
            )
        check_target(values["out"], values["shard_tokens"])
        tokenizer = load_tokenizer(values["tokenizer"])
        sources = [open_source(path, skip_bad_files=values["skip_bad_files"]) for path in values["paths"]]
    begin = time.perf_counter()
    progress: Any = (lambda what, done, _: show_line(f"{what}: {done:,} documents")) if sys.stderr.isatty() else None
    made = write_tokens(values["out"], sources, tokenizer, shard_tokens=values["shard_tokens"], progress=progress)
    record = {
        "folder": str(made.path),
        "shards": len(made.entries),
        "tokens": len(made),
        "documents": sum(entry.documents for entry in made.entries),
        "text_bytes": made.text_bytes,
        "words": made.words,
        "vocab_size": made.vocab_size,
        "fingerprint": made.fingerprint,
    }
    _print_tokens(made, record, time.perf_counter() - begin)
    if values["json"] is not None:
        write_json(values["json"], record)
    return 0


def _check_tokens(arguments: Sequence[str]) -> int:
    parser = Parser(
        "data check FOLDER",
        "Read all shards of a folder and compare their checksums with the index. The exit status is 1 if a shard is "
        "missing or damaged.",
    )
    parser.add_argument("folder", type=str, help="Folder of token shards.")
    folder = parser.parse_args(arguments).folder
    with parser.checking():
        tokens = TokenSet(Path(folder).expanduser())
    bad = 0
    for number in range(len(tokens.entries)):
        try:
            tokens.shard(number)
        except ShardError as error:
            bad += 1
            console().print(Text(str(error)), soft_wrap=True)
    good = len(tokens.entries) - bad
    console().print(Text(f"{good} of {len(tokens.entries)} shards of {folder} are intact"), soft_wrap=True)
    return int(bad > 0)


def _print_tokens(tokens: TokenSet, record: dict[str, Any], seconds: float) -> None:
    lines = [(entry.name, count(entry.tokens), f"{entry.documents:,}") for entry in tokens.entries[:20]]
    print_table(str(tokens.path), ("shard", "tokens", "documents"), lines)
    text = (
        f"{record['tokens']:,} tokens of {record['documents']:,} documents in {record['shards']:,} shards, "
        f"{record['vocab_size']:,} in the vocabulary; made in {seconds:.1f} s; fingerprint {record['fingerprint']}"
    )
    console().print(Text(text), soft_wrap=True)
    console().print(Text(shlex.join(["subquad", "train", "--data.path", str(tokens.path)])), soft_wrap=True)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"tokens": _make_tokens, "check": _check_tokens}
"""Commands for token shards, given in place of a data set's name."""
