"""The model that is converted: ours, or one of transformers that is imported on the way."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from torch import nn

from subquad.data import load_tokenizer
from subquad.data.tokenizers import check_vocabulary
from subquad.hf import SubquadConfig, SubquadForCausalLM, lora
from subquad.hf.loading import check_finite, read_config
from subquad.models import Decoder


class Source(NamedTuple):
    """A model of ours and its tokenizer."""

    folder: Path
    model: SubquadForCausalLM
    tokenizer: Tokenizer

    @property
    def decoder(self) -> Decoder:
        """The model without what transformers puts around it."""
        decoder: Decoder = self.model.model
        return decoder


def load_source(folder: str | Path) -> Source:
    """The model in a folder, in float32 and in eval mode.

    Raises `FileNotFoundError` where there is no model or no tokenizer, and `ValueError` for an adapter, for a model
    that is neither ours nor of a family that `subquad.hf.from_transformers` reads, for weights that are not finite, and
    for a tokenizer of more tokens than the model knows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; give the folder of a model")
    if lora.is_adapter(folder):
        raise ValueError(f"{folder} holds an adapter, no model of its own: merge it first (subquad lora merge)")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}; a conversion needs a model and its tokenizer")
    if isinstance(read_config(folder), SubquadConfig):
        model = SubquadForCausalLM.from_pretrained(folder, local_files_only=True)
    else:
        from subquad.hf import from_transformers

        model = from_transformers(folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, model.config.vocab_size, f"is that in {folder} another model's?")
    check_finite(model, folder)
    return Source(folder, model.float().eval(), tokenizer)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of the names and values of all weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()
