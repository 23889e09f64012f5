"""Which model a LoRA adapter belongs to."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.parsing import check_keys, read_json_mapping

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_CONFIG, RECORD = "adapter_config.json", "base.json"


@dataclass(frozen=True)
class Base:
    """The model that an adapter belongs to."""

    path: str
    """Its folder as it was given."""
    absolute: str
    """The same from the root."""
    weights: str
    """SHA-256 of its weights."""
    classes: tuple[str, ...] | None = None
    """Names of the classes where they are others than the base's: its head is then the adapter's alone."""

    @classmethod
    def of(cls, folder: str | Path, classes: Sequence[str] | None = None) -> Base:
        """The record of a folder with a model."""
        names = None if classes is None else tuple(classes)
        return cls(str(folder), str(Path(folder).resolve()), weights_digest(folder), names)

    @classmethod
    def read(cls, folder: str | Path) -> Base:
        """What an adapter's folder says; `FileNotFoundError` where it doesn't, `ValueError` where it is damaged."""
        file = Path(folder) / RECORD
        if not file.is_file():
            raise FileNotFoundError(f"{folder} holds no {RECORD}, which names the model that the adapter belongs to")
        values = read_json_mapping(file)
        check_keys(values, {"path": str, "absolute": str, "weights": str}, str(file))
        classes = values.get("classes")
        if set(values) - {"classes", "path", "absolute", "weights"} or not isinstance(classes, list | None):
            raise ValueError(f"{file} is damaged: it has the keys {', '.join(values)}, and the classes {classes!r}")
        return cls(**{**values, "classes": None if classes is None else tuple(map(str, classes))})

    def find(self, adapter: str | Path) -> Path:
        """The base's folder: where it was, or at the same relative path from a folder above the adapter's.

        Raises `FileNotFoundError` where no such folder holds a model, and `ValueError` where its weights are others.
        """
        adapter = Path(adapter)
        places = [Path(self.path), Path(self.absolute)]
        if not Path(self.path).is_absolute():
            places += [above / self.path for above in adapter.resolve().parents]
        there = [place for place in dict.fromkeys(places) if (place / "config.json").is_file()]
        if not there:
            raise FileNotFoundError(
                f"{adapter} is an adapter of the model in {self.path}, which is not there (it was {self.absolute}); "
                f"put it back, or merge with the base where it is: subquad lora merge {adapter} --base FOLDER --out NEW"
            )
        for place in there[:-1]:  # other projects too have a runs/tiny
            if weights_digest(place) == self.weights:
                return place
        self.check(there[-1], adapter)
        return there[-1]

    def check(self, folder: str | Path, adapter: str | Path) -> None:
        """Raise `ValueError` where the weights in `folder` are not those that the adapter was trained on."""
        found = weights_digest(folder)
        if found != self.weights:
            raise ValueError(
                f"{adapter} was trained on other weights than those in {folder}: SHA-256 {self.weights[:12]}..., found "
                f"{found[:12]}..."
            )


_READ = {
    "base_model_name_or_path", "bias", "ensure_weight_tying", "inference_mode", "lora_alpha", "lora_dropout",
    "modules_to_save", "peft_type", "peft_version", "r", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""What an adapter's configuration may choose."""


def check_adapter(folder: str | Path, model: nn.Module, defaults: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an adapter's configuration that asks for more than low-rank factors in named layers.

    PEFT would import a module by the name in `megatron_core`, copy layers by `layer_replication`, match regular
    expressions that never end, and make factors of any rank. `defaults` is what PEFT sets itself.
    """
    widest = max((max(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)), default=1)
    values = read_json_mapping(Path(folder) / ADAPTER_CONFIG)
    for name, value in values.items():
        if name not in _READ and value and value != defaults.get(name):
            raise ValueError(f"{name}={value!r} is not read; leave it out")
    check_keys(values, {"r": int, "lora_alpha": int, "target_modules": list}, ADAPTER_CONFIG)
    if not 1 <= values["r"] <= widest:
        raise ValueError(f"rank {values['r']}: it must lie between 1 and {widest}, the model's widest layer")
    for name in ("target_modules", "modules_to_save"):
        if not all(isinstance(word, str) for word in values.get(name) or ()):
            raise ValueError(f"{name} must be names of layers, got {values[name]!r}")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; `ValueError` names it where it is damaged."""
    try:
        return load_file(file)
    except OSError:
        raise
    except Exception as error:  # the header names any dtype and shape, and safetensors does not check them all
        raise ValueError(f"{file} is damaged: {error}") from error


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter, by its file."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def weights_digest(folder: str | Path) -> str:
    """SHA-256 of a folder's weights, `*.safetensors` in the order of their names; `FileNotFoundError` without any."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights (*.safetensors)")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def put_adapter(model: PreTrainedModel, config: Any) -> PeftModel:
    """PEFT's model; it asks transformers for a property by its old name."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        adapted: Any = get_peft_model(model, config)
    return adapted
