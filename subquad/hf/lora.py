"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) for all our models, by PEFT: `W + s B A`.

An adapter's folder is PEFT's (`adapter_config.json`, `adapter_model.safetensors`) plus `base.json`, which identifies
the weights it was trained on. PEFT is the extra `peft`: it is imported inside functions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.checksums import check_unchanged
from subquad.config import suggest
from subquad.extras import needed
from subquad.hf.config import SubquadConfig
from subquad.hf.encoders import SubquadEncoderForSequenceClassification, SubquadForPreTraining
from subquad.hf.image import SubquadForImages
from subquad.hf.loading import CONFIG, check_sizes, naming, read_config
from subquad.hf.model import SubquadForCausalLM
from subquad.parsing import check_keys, read_json_mapping
from subquad.program import command

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "base.json"
_PREFIX = "base_model.model."
_NOT_DEFAULT = {"head", "lm_head", "lookup", "compress"}
"""Linear layers that get factors only on request: heads, the look-up after them, and a projection along the sequence.
"""

_READ = {
    "base_model_name_or_path", "bias", "ensure_weight_tying", "inference_mode", "lora_alpha", "lora_dropout",
    "modules_to_save", "peft_type", "peft_version", "r", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Fields that an adapter's configuration may set."""
_MODELS = (SubquadForCausalLM, SubquadEncoderForSequenceClassification, SubquadForPreTraining, SubquadForImages)


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that an adapter belongs to."""

    path: str
    """Its folder, as given."""
    absolute: str
    """Its folder as an absolute path."""
    weights: str
    """SHA-256 of its weights."""
    classes: tuple[str, ...] | None = None
    """Class names if they differ from the base's; the adapter then has its own head."""

    @classmethod
    def of(cls, folder: str | Path, classes: Sequence[str] | None = None) -> Base:
        """Return the record of the model in `folder`."""
        names = None if classes is None else tuple(classes)
        return cls(str(folder), str(Path(folder).resolve()), weights_digest(folder), names)

    @classmethod
    def read(cls, folder: str | Path) -> Base:
        """Read the record in an adapter's folder; `FileNotFoundError` for none, `ValueError` for a damaged one."""
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
        """Return the base's folder: its recorded path, or the same relative path from a folder above the adapter's.

        Raises `FileNotFoundError` if there is no model at any of them, `ValueError` if its weights have changed.
        """
        adapter = Path(adapter)
        places = [Path(self.path), Path(self.absolute)]
        if not Path(self.path).is_absolute():
            places += [above / self.path for above in adapter.resolve().parents]
        there = [place for place in dict.fromkeys(places) if (place / CONFIG).is_file()]
        if not there:
            raise FileNotFoundError(
                f"{adapter} is an adapter of the model in {self.path}, which is not there (it was {self.absolute}); "
                "put it back, or merge with the base where it is: "
                + command("lora", "merge", adapter, "--base", "FOLDER", "--out", "NEW")
            )
        for place in there[:-1]:  # another project may have a model at the same relative path
            if weights_digest(place) == self.weights:
                return place
        self.check(there[-1], adapter)
        return there[-1]

    def check(self, folder: str | Path, adapter: str | Path) -> None:
        """Raise `ValueError` unless the weights in `folder` are those that the adapter was trained on."""
        found = weights_digest(folder)
        if found != self.weights:
            raise ValueError(
                f"{adapter} was trained on other weights than those in {folder}: SHA-256 {self.weights[:12]}..., found "
                f"{found[:12]}..."
            )


def check_adapter(folder: str | Path, model: nn.Module, defaults: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an adapter's configuration that asks for more than low-rank factors in named layers.

    PEFT would import the module named in `megatron_core`, copy layers by `layer_replication`, match regular expressions
    without a time limit, and make factors of any rank. `defaults` are PEFT's own settings.
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
    """Return the tensors of a safetensors file; `ValueError` names a damaged file."""
    try:
        return load_file(file)
    except OSError:
        raise
    except Exception as error:  # safetensors does not validate every dtype and shape that a header names
        raise ValueError(f"{file} is damaged: {error}") from error


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds an adapter's configuration."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def weights_digest(folder: str | Path) -> str:
    """Return the SHA-256 of a folder's `*.safetensors`, in name order; `FileNotFoundError` if there are none."""
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
    """Return PEFT's model around `model`, silencing the deprecation warning that PEFT triggers in transformers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        adapted: PeftModel = require_peft().get_peft_model(model, config)
    return adapted


def require_peft() -> Any:
    """Return the module `peft`; `ImportError` names the extra if it is not installed."""
    with needed("LoRA"):
        import peft
    return peft


def is_extension(folder: str | Path) -> bool:
    """Return whether a folder holds both an adapter and the configuration of a transformers model."""
    if not is_adapter(folder) or not (Path(folder) / CONFIG).is_file():
        return False
    return not isinstance(read_config(folder), SubquadConfig)


def merging(folder: str | Path) -> str:
    """Return the command that merges the adapter in `folder` into its base."""
    return command("lora", "merge", folder, "--out", f"{Path(folder)}-merged")


def base_config(folder: str | Path) -> SubquadConfig:
    """Return the configuration of the model in `folder`; errors say what else the folder holds."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; lora.base is the folder of a run")
    if is_adapter(folder):
        raise ValueError(f"{folder} holds an adapter, no model of its own: merge it with: {merging(folder)}")
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no config.json, so no trained model; lora.base is the folder of a run")
    config = read_config(folder)
    if not isinstance(config, SubquadConfig):
        raise ValueError(f"{folder} holds a model of type {config.model_type!r}; lora.base must be a model of subquad")
    return config


def load_base(folder: str | Path, classes: Sequence[str] | None = None) -> PreTrainedModel:
    """Load the model in `folder`; with `classes`, load a classifier with a new, random head for them."""
    check_unchanged(folder)
    config = base_config(folder)
    model_class: Any = next(owner for owner in _MODELS if owner.config_class is type(config))
    if classes is None:
        return model_class.from_pretrained(folder, local_files_only=True)
    names = dict(enumerate(classes))
    with naming(folder):
        check_sizes(model_class, Path(folder), config)
        weights = {k: v for path in sorted(Path(folder).glob("*.safetensors")) for k, v in read_tensors(path).items()}
    labels = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    model = model_class(type(config).from_dict(config.to_dict() | labels))
    model.to(config.dtype or torch.float32)
    kept = {name: weight for name, weight in weights.items() if not name.startswith("model.head.")}
    with naming(folder):
        missing, unexpected = model.load_state_dict(kept, strict=False)
    wrong = [name for name in missing if not name.startswith("model.head.")] + list(unexpected)
    if wrong:
        raise ValueError(f"the weights in {folder} do not fit its configuration: {', '.join(sorted(wrong))}")
    return model


def targets(model: nn.Module, wanted: Sequence[str] = ()) -> list[str]:
    """Return the full names of the linear layers that get factors: those in `wanted`, or all but heads and look-ups.

    A word in `wanted` is the end of a name (`query`, `feedforward.up`) or a regular expression for a whole name. Raises
    `ValueError` for a word that matches no layer.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not wanted:
        return [name for name in linear if not _NOT_DEFAULT & set(name.split("."))]
    chosen: dict[str, None] = {}
    for word in wanted:
        found = [name for name in linear if name == word or name.endswith(f".{word}")] or _matching(word, linear)
        if not found:
            raise ValueError(f"lora.targets: no linear layer is called {word!r}; {suggest(word, _short(linear))}")
        for name in found:
            if any(model.get_submodule(name).weight is table.weight for table in tables):
                raise ValueError(
                    f"lora.targets: {name} is tied to the embeddings, which factors merged into it would change; leave "
                    "it out"
                )
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def _matching(word: str, names: Sequence[str]) -> list[str]:
    try:
        return [name for name in names if re.fullmatch(word, name)]
    except re.error as error:
        raise ValueError(
            f"lora.targets: {word!r} is neither a layer's name nor a regular expression: {error}"
        ) from error


def _short(names: Sequence[str]) -> set[str]:
    """Return the last two parts of the names, which layers at all depths share."""
    parts = [[part for part in name.split(".") if not part.isdigit()] for name in names]
    return {".".join(part[-2:]) for part in parts}


def add_adapter(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: int | None = None,
    dropout: float = 0.0,
    wanted: Sequence[str] = (),
    dora: bool = False,
    rslora: bool = False,
    train_head: bool = False,
    base: Base | None = None,
) -> PeftModel:
    """Put fresh factors into the linear layers of `model`, freeze everything else and return PEFT's model around it.

    `B = 0`, so nothing changes at first. `wanted` chooses the layers (`targets`); `save_adapter` records `base`.
    """
    peft = require_peft()
    if train_head and not isinstance(model, SubquadEncoderForSequenceClassification):
        raise ValueError(f"train_head is for classifiers, and this is a {type(model).__name__}")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=targets(model, wanted),
        use_dora=dora,
        use_rslora=rslora,
        modules_to_save=["model.head"] if train_head else None,
        task_type="CAUSAL_LM" if model.can_generate() else None,
    )
    adapted = put_adapter(model, config)
    config.base_model_name_or_path = None if base is None else base.path
    model.adapter_base = base  # type: ignore[assignment]
    return adapted


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's tensors under the names in PEFT's file; `model` is what `add_adapter` took or returned."""
    tensors = require_peft().get_peft_model_state_dict(_inner(model), save_embedding_layers=False)
    copied = {"memory_format": torch.contiguous_format}  # a tied head shares the embeddings' memory
    return {f"{_PREFIX}{name}": tensor.clone(**copied) for name, tensor in tensors.items()}


def save_adapter(model: nn.Module, folder: str | Path) -> None:
    """Write the adapter only: factors, PEFT's configuration and, if known, the record of the base."""
    folder, inner = Path(folder), _inner(model)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter_weights(inner), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    base: Base | None = getattr(inner, "adapter_base", None)
    if base is not None:
        (folder / RECORD).write_text(json.dumps(dataclasses.asdict(base), indent=2) + "\n", encoding="utf-8")
    config: Any = inner.peft_config["default"]
    written = dataclasses.replace(config, inference_mode=True)
    written.target_modules = sorted(config.target_modules)  # a set, whose order varies
    written.save_pretrained(str(folder))


def read_weights(model: nn.Module, folder: str | Path) -> None:
    """Load the factors of `model` from a folder. Missing, left over or misshapen tensors, which PEFT only warns about,
    raise `ValueError`."""
    file, inner = Path(folder) / ADAPTER_WEIGHTS, _inner(model)
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no {ADAPTER_WEIGHTS}")
    tensors, expected = read_tensors(file), adapter_weights(inner)
    for problem, names in (("missing", expected.keys() - tensors.keys()), ("left over", tensors.keys() - expected)):
        if names:
            raise ValueError(f"the adapter in {folder} does not fit the model: {problem}: {', '.join(sorted(names))}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"the adapter in {folder} does not fit the model: {name} has shape {list(tensor.shape)}, the model's "
                f"is {list(expected[name].shape)}"
            )
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    with torch.no_grad():
        require_peft().set_peft_model_state_dict(inner, weights)


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Put the adapter in `folder` into `model`. Raises as `read_weights`; `FileNotFoundError` for no adapter."""
    peft = require_peft()
    if not is_adapter(folder):
        raise FileNotFoundError(
            f"{folder} holds no {ADAPTER_CONFIG}, so no adapter; `subquad train --lora.rank` makes one"
        )
    check_unchanged(folder)
    try:
        check_adapter(folder, model, peft.LoraConfig().to_dict())
        config: Any = peft.LoraConfig.from_pretrained(str(folder))
        if not isinstance(config, peft.LoraConfig):
            raise ValueError(f"type {config.peft_type}")
    except Exception as error:  # PEFT does not validate the file and may fail anywhere
        raise ValueError(f"{folder}/{ADAPTER_CONFIG} is no configuration of a LoRA adapter: {error!r}") from error
    config.base_model_name_or_path = None  # PEFT would warn about another path; we compare weights
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    unknown = set(config.target_modules or ()) - linear
    # PEFT replaces long lists of names by common endings.
    if not all(any(name.endswith(f".{word}") for name in linear) for word in unknown):
        raise ValueError(
            f"the adapter in {folder} does not fit the model, which has no layer {', '.join(sorted(unknown))}"
        )
    with naming(folder):
        adapted = put_adapter(model, config)
    read_weights(adapted, folder)
    model.adapter_base = Base.read(folder) if (Path(folder) / RECORD).is_file() else None  # type: ignore[assignment]
    return adapted


def open_adapter(folder: str | Path) -> PeftModel:
    """Return the model of an adapter's folder: the base named by its record, with the adapter put into it."""
    record = Base.read(folder)
    return load_adapter(load_base(record.find(folder), record.classes), folder)


def merge(adapted: PeftModel) -> PreTrainedModel:
    """Return the model with `W + s B A` as its weights and no factors; `ValueError` for non-finite weights."""
    merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    return merged


def counts(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trainable parameters and of all parameters."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)


def _inner(model: nn.Module) -> Any:
    get = getattr(model, "get_base_model", None)
    return model if get is None else get()
