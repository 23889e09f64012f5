"""Loading that refuses weights that do not fit and is safe on untrusted folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from subquad.parsing import read_json_mapping

CONFIG = "config.json"
PREFIX = "subquad_"
"""Prefix of our attention implementations' names (`subquad.hf.register`)."""
_COUNTS = ("num_layers", "num_hidden_layers", "n_layer", "loops", "mixtures", "num_labels")
"""Fields that count parts of a model, each of which has its own tensors or rows."""
SMALL = 1 << 22
"""Largest tensor, in numbers, that is created without being found in the weights."""


class StrictModel(PreTrainedModel):
    """A transformers model around one of ours, its attribute `model`; weights that do not fit raise an error."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _no_split_modules = ["Block", "LatentBlock"]  # noqa: RUF012 (transformers declares it so)
    leaves_out: ClassVar[tuple[str, ...]] = ()
    """Prefixes of weights that a folder of another class may have besides, such as the head's for a backbone."""
    begins_with: ClassVar[tuple[str, ...]] = ()
    """Prefixes of weights that are new where the folder is of another class, such as a classifier's on a language
    model's."""
    model: Any

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        self._check_implementation(config._attn_implementation)
        super().__init__(config, *args, **kwargs)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Accept `eager`, which has no effect here; `ValueError` for other implementations."""
        self._check_implementation(attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def _check_implementation(self, name: Any) -> None:
        if name not in (None, "eager"):
            raise ValueError(
                f"attn_implementation={name!r} is for transformers' models: {type(self).__name__} takes its attention "
                "from its own configuration (attention=...); leave it out"
            )

    def blocks_to_shard(self) -> list[nn.Module]:
        """Return the blocks that can be sharded one by one: those that transformers must not split."""
        return [module for module in self.modules() if type(module).__name__ in (self._no_split_modules or ())]

    def _init_weights(self, module: nn.Module) -> None:
        self.model.initialise(module)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Self:
        """Load a model as transformers does, from safetensors only. Missing, left over or misshapen weights raise
        `ValueError`, before a model of their size is created."""
        wants_info = kwargs.pop("output_loading_info", False)
        place = args[0] if args else kwargs.get("pretrained_model_name_or_path", "")
        options = {"use_safetensors": True, **kwargs, "output_loading_info": True}
        with naming(place):
            folder = None if place is None else Path(place, kwargs.get("subfolder") or "")
            if folder is not None and (folder / CONFIG).is_file():
                check_sizes(cls, folder, kwargs.get("config"))
            loaded: Any = super().from_pretrained(*args, **options)
        model, info = loaded
        another = cls.__name__ not in (model.config.architectures or [cls.__name__])
        known = {"missing_keys": cls.begins_with if another else (), "unexpected_keys": cls.leaves_out}
        for problem, prefixes in known.items():
            names = ", ".join(sorted(str(key) for key in info[problem] if not str(key).startswith(prefixes)))
            if names:
                raise ValueError(
                    f"{place}: the weights do not fit the configuration: {problem.replace('_', ' ')}: {names}"
                )
        return loaded if wants_info else model


def read_config(folder: str | Path) -> PreTrainedConfig:
    """Read the configuration in a folder without running any code from it; `ValueError` names a damaged folder."""
    with naming(folder):
        values = read_json_mapping(Path(folder) / CONFIG)
        _check_counts(values, SMALL)
        if "auto_map" in values and not str(values.get("model_type")).startswith("subquad"):
            raise ValueError("its configuration names code of its own, which is not run")
        found: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return found


def fetch(name: str) -> Path:
    """Return the folder of a model on the Hugging Face hub, maybe downloading it; `FileNotFoundError` for none."""
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "tokenizer*", "*.jinja"]))
    except (OSError, ValueError) as error:  # unknown name or no network
        raise FileNotFoundError(
            f"there is no folder {name}, and the hub gives no model of that name: {error}"
        ) from error


@contextmanager
def naming(place: object) -> Iterator[None]:
    """Turn errors from reading a damaged model folder into a `ValueError` that names the folder."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(place) in str(error):
            raise
        raise ValueError(f"{place} cannot be read as a model: {error}") from error


def _check_counts(values: dict[str, Any], most: int) -> None:
    for name in _COUNTS:
        count = values.get(name)
        if isinstance(count, int | float) and count > most:
            raise ValueError(f"{name}={count} is more than its weights have place for")


@contextmanager
def no_bar() -> Iterator[None]:
    """Keep transformers from drawing its progress bar over ours."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' report of weights that do not fit, for callers that report them."""
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)


def check_sizes(cls: type[PreTrainedModel], folder: Path, config: Any) -> None:
    """Raise `ValueError` if a model built on the meta device has other shapes or far more numbers than the weights."""
    values = read_json_mapping(folder / CONFIG)
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    if not shapes:
        return  # transformers reports the missing weights
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    _check_counts(values, max(numbers, len(shapes)))
    if config is None:
        kind: Any = cls.config_class
        config = kind.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = cls(config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found = shapes.get(name)
        if found is not None and list(tensor.shape) != found:
            raise ValueError(
                f"the weights do not fit the configuration: {name} has shape {found}, the configuration asks for "
                f"{list(tensor.shape)}"
            )
        if found is None and tensor.numel() > max(SMALL, numbers):
            raise ValueError(
                f"the weights do not fit the configuration: {name} would have {tensor.numel():,} numbers, all weights "
                f"have {numbers:,}"
            )


def check_finite(model: nn.Module, place: object) -> None:
    """Raise `ValueError` for weights that are infinite or NaN."""
    for name, tensor in model.named_parameters():
        if not bool(tensor.detach().isfinite().all()):
            raise ValueError(f"{place} holds a model whose weights are damaged: {name} is not finite")
