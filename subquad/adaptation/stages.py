"""The stages of a conversion on disk: each is whole or not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from subquad.config import differences
from subquad.hf import SubquadForCausalLM
from subquad.parsing import read_json_mapping
from subquad.training.checkpoint import replace_folder, share, write_atomically

SETTINGS, RECORD = "conversion.json", "stage.json"
NAMES = ("original", "replaced", "matched", "tuned")
"""In their order."""


class Stages:
    """The folder of a conversion: `conversion.json` and a folder for each stage that is complete.

    Raises `ValueError` where the folder holds something else, or a conversion with other settings.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]) -> None:
        self.folder = Path(folder)
        file = self.folder / SETTINGS
        if file.is_file():
            changed = differences(read_json_mapping(file), settings)
            if changed:
                raise ValueError(
                    f"{folder} holds another conversion ({'; '.join(changed)}); give --out another folder, or the same "
                    "settings"
                )
            return
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise ValueError(f"{folder} holds files that are no conversion's; give --out a new folder")
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{folder} is no folder; give --out a new one")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps(settings, indent=2) + "\n").encode())

    def place(self, name: str) -> Path:
        """The folder of a stage."""
        return self.folder / "stages" / f"{NAMES.index(name) + 1}-{name}"

    def record(self, name: str) -> dict[str, Any] | None:
        """What a complete stage measured; None where it is not complete."""
        file = self.place(name) / RECORD
        return dict(read_json_mapping(file)) if file.is_file() else None

    def model(self, name: str) -> SubquadForCausalLM:
        """The model of a complete stage."""
        return SubquadForCausalLM.from_pretrained(self.place(name), local_files_only=True).eval()

    def save(self, name: str, record: dict[str, Any], model: SubquadForCausalLM | None = None) -> None:
        """Complete a stage."""
        target = self.place(name)
        aside = target.with_name(f".saving-{target.name}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if model is not None:
            model.save_pretrained(aside)
        write_atomically(aside / RECORD, (json.dumps(record, indent=2) + "\n").encode())
        share(aside)
        replace_folder(aside, target)
