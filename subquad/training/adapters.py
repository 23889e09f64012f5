"""Models with their adapters, for the commands that read a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from subquad.hf import lora


def read(model_class: type[PreTrainedModel], folder: Path, adapter: str | None = None) -> Any:
    """The model of a folder, of an adapter's with its base; `adapter` is put on the model in `folder`.

    Raises `FileNotFoundError` where the base or the adapter is not there, and `ValueError` where they do not belong
    together.
    """
    if not lora.is_adapter(folder):
        if adapter is None:
            return model_class.from_pretrained(folder, local_files_only=True)
        if not lora.is_adapter(adapter):
            raise FileNotFoundError(f"there is no adapter in {adapter}; `subquad train --lora.rank` makes one")
        record = lora.Base.read(adapter)
        record.check(folder, adapter)
        return lora.load_adapter(lora.load_base(folder, record.classes), adapter).get_base_model()
    if adapter is not None:
        raise ValueError(f"{folder} is an adapter itself: give its base as RUN, and one adapter by --adapter")
    return lora.open_adapter(folder).get_base_model()


def home(folder: str | Path) -> Path:
    """The folder that holds the whole model: that of the base for an adapter."""
    return lora.Base.read(folder).find(folder) if lora.is_adapter(folder) else Path(folder)
