"""Models by their name on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path


def fetch(name: str) -> Path:
    """The folder of a model on the Hugging Face hub, fetched where it must be; `FileNotFoundError`: it has none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "tokenizer*", "*.jinja"]))
    except (OSError, ValueError) as error:  # no such name, no network
        raise FileNotFoundError(
            f"there is no folder {name}, and the hub gives no model of that name: {error}"
        ) from error
