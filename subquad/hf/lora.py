"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) by PEFT on any model of ours: `W + s B A`.

An adapter's folder is PEFT's own (`adapter_config.json`, `adapter_model.safetensors`), as `PeftModel.from_pretrained`
reads it, with `base.json`: which weights it was trained on. PEFT is imported inside functions: it is the extra `peft`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.config import suggest
from subquad.hf._lora_base import (
    ADAPTER_CONFIG,
    RECORD,
    Base,
    check_adapter,
    is_adapter,
    put_adapter,
    read_tensors,
    weights_digest,
)
from subquad.hf._strict import check_sizes, naming, read_config
from subquad.hf.classification import SubquadForSequenceClassification
from subquad.hf.config import SubquadConfig

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NOT_DEFAULT = {"head", "lookup"}
"""Linear layers without factors if not asked for: heads and what follows them."""
_READ_AS_WEIGHTS = {"compress"}
"""Linear layers whose matrix is read, not called: factors would do nothing (Perceiver AR, history=compressed; like the
heads of all models but classifiers)."""

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "RECORD",
    "Base",
    "adapter_weights",
    "add_adapter",
    "base_config",
    "counts",
    "is_adapter",
    "is_extension",
    "load_adapter",
    "load_base",
    "merge",
    "open_adapter",
    "read_weights",
    "require_peft",
    "save_adapter",
    "targets",
    "weights_digest",
]


def require_peft() -> None:
    """Raise `ImportError` that names the extra where PEFT is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ImportError("LoRA needs PEFT: pip install 'subquad[peft]'") from error


def is_extension(folder: str | Path) -> bool:
    """Whether a folder holds an adapter and, beside it, the configuration of a model of transformers."""
    if not is_adapter(folder) or not (Path(folder) / "config.json").is_file():
        return False
    return not isinstance(read_config(folder), SubquadConfig)


def base_config(folder: str | Path) -> SubquadConfig:
    """The configuration of the model in `folder`; errors say what is there instead of a model of ours."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; lora.base is the folder of a run")
    if is_adapter(folder):
        raise ValueError(f"{folder} holds an adapter, no model of its own: merge it first (subquad lora merge)")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json, so no trained model; lora.base is the folder of a run")
    config = read_config(folder)
    if not isinstance(config, SubquadConfig):
        raise ValueError(f"{folder} holds a model of type {config.model_type!r}; lora.base must be a model of subquad")
    return config


def load_base(folder: str | Path, classes: Sequence[str] | None = None) -> PreTrainedModel:
    """The model in `folder`; with `classes` a classifier with a new head for them, from the present random numbers."""
    import subquad.hf

    config = base_config(folder)
    owners = [getattr(subquad.hf, name) for name in subquad.hf.__all__]
    model_class = next(owner for owner in owners if getattr(owner, "config_class", None) is type(config))
    if classes is None:
        return model_class.from_pretrained(folder, local_files_only=True)
    names = dict(enumerate(classes))
    with naming(folder):
        check_sizes(model_class, Path(folder), config)
        weights = {k: v for path in sorted(Path(folder).glob("*.safetensors")) for k, v in read_tensors(path).items()}
    model = model_class(type(config).from_dict({**config.to_dict(), "id2label": names, "label2id": _inverse(names)}))
    model.to(config.dtype or torch.float32)
    kept = {name: weight for name, weight in weights.items() if not name.startswith("model.head.")}
    with naming(folder):
        missing, unexpected = model.load_state_dict(kept, strict=False)
    wrong = [name for name in missing if not name.startswith("model.head.")] + list(unexpected)
    if wrong:
        raise ValueError(f"the weights in {folder} do not fit its configuration: {', '.join(sorted(wrong))}")
    return model


def _inverse(names: dict[int, str]) -> dict[str, int]:
    return {name: number for number, name in names.items()}


def targets(model: nn.Module, wanted: Sequence[str] = ()) -> list[str]:
    """Full names of the linear layers that get factors: those that `wanted` names, or all but heads and look-ups.

    A word of `wanted` is the end of a name (`query`, `feedforward.up`) or a regular expression for a whole one. Raises
    `ValueError` for a word that names no layer, and for a layer whose matrix is read without a call.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    read = _READ_AS_WEIGHTS | (set() if isinstance(model, SubquadForSequenceClassification) else {"head"})
    usable = [name for name in linear if not read & set(name.split("."))]
    if not wanted:
        return [name for name in usable if not _NOT_DEFAULT & set(name.split("."))]
    chosen: dict[str, None] = {}
    for word in wanted:
        found = [name for name in linear if name == word or name.endswith(f".{word}")] or _matching(word, linear)
        if not found:
            raise ValueError(f"lora.targets: no linear layer is called {word!r}; {suggest(word, _short(usable))}")
        for name in found:
            if name not in usable:
                raise ValueError(
                    f"lora.targets: {name} cannot have factors: its matrix is read without calling the layer; "
                    f"valid: {', '.join(sorted(_short(usable)))}"
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
    """The last two parts of names, by which layers of all depths are meant."""
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
    """`model` with fresh factors in its linear layers, which alone train: `B = 0`, so that nothing changes at first.

    PEFT puts the factors into `model` itself. `wanted` chooses the layers (`targets`); `base` is what `save_adapter`
    writes down.
    """
    require_peft()
    from peft import LoraConfig

    if train_head and not isinstance(model, SubquadForSequenceClassification):
        raise ValueError(f"train_head is for classifiers, and this is a {type(model).__name__}")
    config = LoraConfig(
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
    """The adapter's tensors by the names of PEFT's file; `model` is what `add_adapter` was given or what it made."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(_inner(model), save_embedding_layers=False)
    copied = {"memory_format": torch.contiguous_format}  # embeddings and a head that is tied to them are one tensor
    return {f"{_PREFIX}{name}": tensor.clone(**copied) for name, tensor in tensors.items()}


def save_adapter(model: nn.Module, folder: str | Path) -> None:
    """Write the adapter alone: factors, PEFT's configuration and, where it is known, the record of the base."""
    folder, inner = Path(folder), _inner(model)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter_weights(inner), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    base: Base | None = getattr(inner, "adapter_base", None)
    if base is not None:
        (folder / RECORD).write_text(json.dumps(dataclasses.asdict(base), indent=2) + "\n", encoding="utf-8")
    config: Any = inner.peft_config["default"]
    written = dataclasses.replace(config, inference_mode=True)
    written.target_modules = sorted(config.target_modules)  # a set: the same adapter would give different files
    written.save_pretrained(str(folder))


def read_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill the factors in `model` from a folder. Raises `ValueError` where a tensor is missing, left over or of another
    shape, which PEFT only warns of."""
    from peft import set_peft_model_state_dict

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
    with torch.no_grad():
        set_peft_model_state_dict(inner, {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()})


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """`model` with the adapter of a folder put into it. Raises as `read_weights`, and where there is no adapter."""
    require_peft()
    from peft import LoraConfig

    if not is_adapter(folder):
        raise FileNotFoundError(
            f"{folder} holds no {ADAPTER_CONFIG}, so no adapter; `subquad train --lora.rank` makes one"
        )
    try:
        check_adapter(folder, model, LoraConfig().to_dict())
        config: Any = LoraConfig.from_pretrained(str(folder))
        if not isinstance(config, LoraConfig):
            raise ValueError(f"type {config.peft_type}")
    except Exception as error:  # PEFT takes what it finds, and stumbles over it somewhere
        raise ValueError(f"{folder}/{ADAPTER_CONFIG} is no configuration of a LoRA adapter: {error!r}") from error
    config.base_model_name_or_path = None  # PEFT would warn of a base by another name; what counts is checked here
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    unknown = set(config.target_modules or ()) - linear
    if unknown and not _short_targets(unknown, linear):
        raise ValueError(
            f"the adapter in {folder} does not fit the model, which has no layer {', '.join(sorted(unknown))}"
        )
    with naming(folder):
        adapted = put_adapter(model, config)
    read_weights(adapted, folder)
    model.adapter_base = Base.read(folder) if (Path(folder) / RECORD).is_file() else None  # type: ignore[assignment]
    return adapted


def _short_targets(unknown: set[str], linear: set[str]) -> bool:
    """Whether each name is the end of a layer's, as PEFT shortens long lists."""
    return all(any(name.endswith(f".{word}") for name in linear) for word in unknown)


def open_adapter(folder: str | Path) -> PeftModel:
    """The model of an adapter's folder: its base, found by the record, with the adapter put into it."""
    record = Base.read(folder)
    return load_adapter(load_base(record.find(folder), record.classes), folder)


def merge(adapted: PeftModel) -> PreTrainedModel:
    """The model with `W + s B A` as its weights, and no factors. Raises `ValueError` for what isn't finite."""
    merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    return merged


def counts(model: nn.Module) -> tuple[int, int]:
    """Parameters that train, and all."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)


def _inner(model: nn.Module) -> Any:
    get = getattr(model, "get_base_model", None)
    return model if get is None else get()
