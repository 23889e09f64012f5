"""`subquad export`: a model of ours as one of transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from subquad.cli._model_folders import check_new, write_model
from subquad.cli.arguments import Parser


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        "export RUN --out FOLDER",
        "Write a model of ours with full attention as a model of transformers that needs nothing of ours: the same "
        "weights, the same logits.",
    )
    parser.add_argument("run", type=str, help="The folder of a run, or of an imported model.")
    parser.add_argument("--out", type=str, required=True, help="The folder to write: a new one, or an empty one.")
    parser.add_argument(
        "--family", type=str | None, default=None,
        help="llama, qwen2, qwen3, gpt2 or gpt_neox (null: the first of them that the model fits).",
    )  # fmt: skip
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, read, write, return the exit status."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    with parser.checking():
        target = check_new(chosen.out)
        from subquad.hf import to_transformers
        from subquad.training.runs import load_language_model

        ours, home = load_language_model(chosen.run)
        model = to_transformers(ours, chosen.family)
    write_model(target, model, {}, home)
    kind = f"{type(model).__name__} ({model.config.model_type})"
    sys.stdout.write(f"{chosen.out} holds a {kind} of transformers\n")
    return 0
