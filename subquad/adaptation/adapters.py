"""List adapters on disk, merge one into its base model, and load a model with its tokenizer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from subquad.adaptation import extended
from subquad.checksums import write_checksums
from subquad.config import Record
from subquad.data.files import MODEL_FILES, write_json
from subquad.disk import aside
from subquad.hf import lora
from subquad.hf.loading import read_config
from subquad.parsing import read_json_mapping
from subquad.training.checkpoint import share
from subquad.training.config import LoraConfig, TrainConfig
from subquad.training.processes import device_type
from subquad.training.runs import run_folder


@dataclass(frozen=True)
class Adapter(Record):
    """An adapter on disk, its base model, and whether the two belong together."""

    folder: str
    base: str
    rank: int
    alpha: int
    kind: str
    """LoRA or DoRA, prefixed by rs if the scale is alpha / sqrt(rank)."""
    layers: list[str]
    """Full names of the adapted layers."""
    parameters: int
    """Number of values in the adapter's weights."""
    base_parameters: int | None
    """Number of values in the base's weights; None if the base is missing or has other weights."""
    bytes: int
    """Size of the adapter's weights on disk."""
    fits: str
    """yes, or the reason why not."""

    @property
    def short(self) -> str:
        """Return the kinds of adapted layers (`query`, `key`), without the path to each."""
        return ", ".join(sorted({name.rpartition(".")[2] for name in self.layers}))


def adapters(folders: Sequence[str]) -> list[Adapter]:
    """Return the adapters in and below each of `folders`, sorted by path, without those of checkpoints.

    Raises `FileNotFoundError` for a missing folder and `ValueError` for a damaged `adapter_config.json`.
    """
    found: list[Path] = []
    for folder in folders:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        files = sorted(Path(folder).rglob(lora.ADAPTER_CONFIG))
        found += [file.parent for file in files if "checkpoints" not in file.parent.relative_to(folder).parts]
    return [_adapter(folder) for folder in dict.fromkeys(found)]


def _adapter(folder: Path) -> Adapter:
    file, weights = folder / lora.ADAPTER_CONFIG, folder / lora.ADAPTER_WEIGHTS
    try:
        config = read_json_mapping(file)
        rank, alpha, names = int(config["r"]), int(config["lora_alpha"]), config["target_modules"]
        layers = sorted([names] if isinstance(names, str) else map(str, names))
        kind = f"{'rs' if config.get('use_rslora') else ''}{'DoRA' if config.get('use_dora') else 'LoRA'}"
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{file} is not the configuration of a LoRA adapter: {error!r}") from error
    base, fits, there = str(config.get("base_model_name_or_path")), "yes", None
    try:
        record = lora.Base.read(folder)
        base, there = record.path, record.find(folder)
    except FileNotFoundError:
        known = (folder / lora.RECORD).is_file()
        fits = "no: the base is missing" if known else f"unknown: no {lora.RECORD}"
    except ValueError as error:
        fits = "no: the base has other weights" if "SHA-256" in str(error) else f"unknown: {lora.RECORD} is damaged"
    parameters = 0
    try:
        parameters = _numbers([weights])
    except FileNotFoundError:
        fits = f"no {lora.ADAPTER_WEIGHTS}"
    except SafetensorError as error:
        fits = f"no: {lora.ADAPTER_WEIGHTS} is damaged ({error})"
    return Adapter(
        folder=str(folder),
        base=base,
        rank=rank,
        alpha=alpha,
        kind=kind,
        layers=layers,
        parameters=parameters,
        base_parameters=None if there is None else _numbers(sorted(there.glob("*.safetensors"))),
        bytes=weights.stat().st_size if weights.is_file() else 0,
        fits=fits,
    )


def _numbers(files: Sequence[Path]) -> int:
    """Count the values in safetensors files from their headers."""
    total = 0
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


@dataclass(frozen=True)
class Merging:
    """A merged model, ready to be written to `out`."""

    model: PreTrainedModel
    source: Path
    home: Path
    out: Path
    extension: bool = False
    """Whether it is a transformers model that `subquad extend` adapted."""

    def write(self) -> None:
        """Write the model, the tokenizer, and `config.yaml` without LoRA; `out` appears only once it is complete."""
        with aside(self.out) as folder:
            self.model.save_pretrained(folder)
            for name in MODEL_FILES:
                if (self.home / name).is_file():
                    shutil.copyfile(self.home / name, folder / name)
            settings = self.home / "config.yaml"
            if settings.is_file() and not self.extension:
                config = TrainConfig.from_file(settings)
                config = config.replace(lora=LoraConfig(), run=config.run.replace(folder=str(self.out)))
                if config.reads_text:
                    config = config.replace(data=config.data.replace(tokenizer=str(self.out / "tokenizer.json")))
                config.to_file(folder / "config.yaml")
            write_json(folder / "merged.json", {"adapter": str(self.source), **asdict(lora.Base.read(self.source))})
            write_checksums(folder)
            share(folder)


def open_merging(run: str, out: str, base: str | None) -> Merging:
    """Merge the adapter in `run` into its base, the recorded one or `base`; `Merging.write` then saves it to `out`.

    Raises `FileNotFoundError` or `ValueError` for a missing adapter, a missing or different base, or an existing `out`.
    """
    source, target = Path(run), Path(out)
    if not lora.is_adapter(source):
        raise FileNotFoundError(f"{run} holds no adapter; `subquad lora list` shows the adapters in a folder")
    if not out or target.exists() or any(above.is_file() for above in target.parents):
        raise ValueError(f"{out!r} already exists or lies below a file; --out must name a new folder")
    home = run_folder(source)
    disable_progress_bar()
    if lora.is_extension(source):
        whole: Any = lora.merge(extended.open_extension(source, base))
        dtype = read_config(source).dtype or torch.float32  # merged in float32, saved as the original was
        return Merging(whole.to(dtype), source, home, target, extension=True)
    record = lora.Base.read(source)
    if base is None:
        place = record.find(source)
    else:
        lora.base_config(base)
        record.check(base, source)
        place = Path(base)
    adapted = lora.load_adapter(lora.load_base(place, record.classes), source)
    return Merging(lora.merge(adapted), source, home, target)


def open_foreign(folder: str, device: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load the causal model in `folder` in eval mode on `device` (`cpu` or `auto`), and its tokenizer."""
    model = extended.load_causal(folder).eval().to(device_type(device))
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
