"""Reading a trained model back from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from transformers.utils.logging import disable_progress_bar

from subquad.data import load_tokenizer
from subquad.hf import SubquadForCausalLM
from subquad.models import Decoder
from subquad.training.config import TrainConfig


class LoadedRun(NamedTuple):
    """A trained model with its tokenizer; `config` is None where the folder holds no training configuration."""

    folder: Path
    decoder: Decoder
    tokenizer: Tokenizer
    config: TrainConfig | None


def load_run(folder: str | Path, device: str = "auto") -> LoadedRun:
    """Read a run's folder, one of its checkpoints, or any folder with a model's files and `tokenizer.json`.

    `device` is `cpu`, or `auto` for a GPU where PyTorch finds one. Raises `FileNotFoundError` that names what is
    missing and says what to do.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; give the folder of a run, as `subquad train` makes it")
    checkpoint = folder.resolve().parent.name == "checkpoints" and not (folder / "tokenizer.json").is_file()
    home = folder.resolve().parent.parent if checkpoint else folder
    settings = home / "config.yaml"
    if not (folder / "config.json").is_file():
        hint = "give the folder of a run, as `subquad train` makes it"
        if settings.is_file():
            hint = f"its training has not ended; go on with: subquad train --config {settings}"
        raise FileNotFoundError(f"{folder} holds no config.json, so no trained model; {hint}")
    if not (home / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{home} holds no tokenizer.json; copy the one that the model was trained with there")
    disable_progress_bar()  # reading a file takes no time worth a bar
    model = SubquadForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    model.to("cuda" if device == "auto" and torch.cuda.is_available() else "cpu")
    config = TrainConfig.from_file(settings) if settings.is_file() else None
    return LoadedRun(folder, model.model, load_tokenizer(home), config)
