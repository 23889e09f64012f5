"""The options --draft of `subquad generate` and `serve`, and --dtype and --quantize of these and `eval`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from subquad import training
from subquad.bars import READING, waiting
from subquad.cli.arguments import Parser
from subquad.generation.speculative import MakeDraft, ModelDraft, NgramDraft
from subquad.models.precision import Dtype, Quantize

DRAFT_HELP = (
    "Guess the next tokens and check several in one pass of the model, which changes no text. ngram: as the text went "
    "on after its last tokens before, for code and other text that repeats itself. A folder: by the smaller model in "
    "it, which has the same tokenizer. null: no guesses."
)
DTYPE_HELP = (
    "Dtype of the weights and of what passes between layers; states and sums stay float32. docs/precision.md has the "
    "errors. null: as the model was saved."
)
QUANTIZE_HELP = (
    "int8: keep the weights of linear layers as integers of eight bits with a scale for each output, and multiply them "
    "with inputs in bfloat16. null: in --dtype."
)


def add_precision(parser: Parser) -> None:
    """Add `--dtype` and `--quantize`."""
    parser.add_optional("--dtype", DTYPE_HELP, Dtype)
    parser.add_optional("--quantize", QUANTIZE_HELP, Quantize)


def draft_of(asked: str | None, loaded: training.runs.LoadedRun, device: str) -> MakeDraft | None:
    """Return what makes the draft of a text; raise `ValueError` for a model with another tokenizer.

    Raises `FileNotFoundError` for a folder that does not exist.
    """
    if asked is None:
        return None
    if asked == "ngram":
        return NgramDraft
    if not Path(asked).is_dir():
        raise FileNotFoundError(f"--draft must be ngram or the folder of a smaller model; there is no folder {asked}")
    with waiting(READING):
        draft = training.runs.load_run(asked, device)
    if draft.tokenizer.to_str() != loaded.tokenizer.to_str():
        raise ValueError(f"--draft needs a model with the tokenizer of {loaded.folder}, and {asked} has another one")
    return partial(ModelDraft, draft.decoder)
