"""Folders that are written whole or not at all: a model, its tokenizer, and what else belongs to it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_new(out: str) -> Path:
    """The folder to write; `ValueError` where something is there already."""
    target = Path(out)
    filled = target.is_dir() and any(target.iterdir())
    if not out or filled or (target.exists() and not target.is_dir()):
        raise ValueError(f"{out!r} is there already; --out must name a new or an empty folder")
    if any(above.is_file() for above in target.absolute().parents):
        raise ValueError(f"{out!r} is below a file; --out must name a new or an empty folder")
    return target


def write_model(target: Path, model: PreTrainedModel, texts: Mapping[str, str], kept_from: Path | None) -> None:
    """The model, the `texts` by their file names, and what goes along with it from another folder."""
    from transformers.utils.logging import disable_progress_bar

    from subquad.data.files import MODEL_FILES, aside
    from subquad.training.checkpoint import share

    disable_progress_bar()
    with aside(target) as folder:
        model.save_pretrained(folder)
        for name in MODEL_FILES:
            if kept_from is not None and (kept_from / name).is_file():
                shutil.copyfile(kept_from / name, folder / name)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        share(folder)
