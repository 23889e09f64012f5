"""`subquad export`: convert a subquad model into a transformers model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad import training
from subquad.bars import READING, waiting
from subquad.checksums import write_checksums
from subquad.cli.arguments import Parser
from subquad.data.files import MODEL_FILES
from subquad.disk import aside
from subquad.training.checkpoint import share

NAMES = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gpt2", "gpt_neox", "mamba2", "granitemoehybrid", "bamba",
    "qwen3_5_text", "qwen3_next",
)  # fmt: skip
"""Keys of `subquad.hf.families.FAMILIES`, whose import would take seconds."""


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "export RUN --out FOLDER",
        "Convert a subquad model with layers of full, window, mamba2 or gated_delta_net attention into a transformers "
        "model that loads without subquad: same weights, same logits.",
    )
    parser.add_argument("run", type=str, help="Folder of a run, or of an imported model.")
    parser.add_argument("--out", type=str, required=True, help="Folder to write: new or empty.")
    parser.add_optional("--family", f"{', '.join(NAMES)}. null: the first of these that fits.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, convert and write; return the exit status."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    with parser.checking(), waiting(READING):
        target = check_new(chosen.out)
        ours, home = training.runs.load_language_model(chosen.run)
        from subquad.hf import to_transformers

        model = to_transformers(ours, chosen.family)
    write_model(target, model, {}, home)
    kind = f"{type(model).__name__} ({model.config.model_type})"
    sys.stdout.write(f"{chosen.out} holds a {kind} of transformers\n")
    return 0


def check_new(out: str) -> Path:
    """Return the folder to write; `ValueError` if it isn't new or empty."""
    target = Path(out)
    filled = target.is_dir() and any(target.iterdir())
    if not out or filled or (target.exists() and not target.is_dir()):
        raise ValueError(f"{out!r} is not empty; --out must name a new or empty folder")
    if any(above.is_file() for above in target.absolute().parents):
        raise ValueError(f"{out!r} lies below a file; --out must name a new or empty folder")
    return target


def write_model(target: Path, model: Any, texts: Mapping[str, str], kept_from: Path | None) -> None:
    """Write a folder atomically: the model, `texts` by file name, and `MODEL_FILES` copied from `kept_from`."""
    with aside(target) as folder:
        model.save_pretrained(folder)
        for name in MODEL_FILES:
            if kept_from is not None and (kept_from / name).is_file():
                shutil.copyfile(kept_from / name, folder / name)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_checksums(folder)
        share(folder)
