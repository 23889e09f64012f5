"""The option --draft of `subquad generate` and `subquad serve`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from subquad import training
from subquad.bars import READING, waiting
from subquad.generation.speculative import MakeDraft, ModelDraft, NgramDraft

DRAFT_HELP = (
    "Guess the next tokens and check several in one pass of the model, which changes no text. ngram: as the text went "
    "on after its last tokens before, for code and other text that repeats itself. A folder: by the smaller model in "
    "it, which has the same tokenizer. null: no guesses."
)


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
