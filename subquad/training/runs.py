"""Load trained models, with or without adapters, from run folders, and the images to measure them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from subquad.checksums import check_unchanged
from subquad.data import load_tokenizer
from subquad.data.images import ImageSet, load_images, load_pictures
from subquad.data.special_tokens import end_tokens
from subquad.hf import (
    SubquadConfig,
    SubquadEncoderForSequenceClassification,
    SubquadForCausalLM,
    SubquadForImages,
    lora,
)
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.hf.image import SubquadImageConfig
from subquad.hf.lora import is_adapter, is_extension
from subquad.models import Decoder
from subquad.models.image import ImageModel
from subquad.models.precision import set_precision
from subquad.parsing import read_json_mapping
from subquad.program import command
from subquad.training.config import TrainConfig
from subquad.training.processes import device_type
from subquad.training.saving import CHECKPOINTS

Model = TypeVar("Model")


class LoadedRun(NamedTuple):
    """A trained language model with its tokenizer; `config` is None if the folder has no `config.yaml`."""

    folder: Path
    decoder: Decoder
    tokenizer: Tokenizer
    config: TrainConfig | None

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return all tokens that end a text; for an adapter, its base's configuration names them."""
        return end_tokens(self.tokenizer, model_home(self.folder))


class LoadedProbe(NamedTuple):
    """A model trained on a probe."""

    folder: Path
    decoder: Decoder
    config: TrainConfig


class Loaded(NamedTuple, Generic[Model]):
    """A trained classifier or image model; `config` is None if the folder has no `config.yaml`."""

    folder: Path
    model: Model
    config: TrainConfig | None


LoadedClassifier = Loaded[SubquadEncoderForSequenceClassification]
LoadedImageModel = Loaded[ImageModel]


def load_run(
    folder: str | Path,
    device: str = "auto",
    adapter: str | None = None,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
) -> LoadedRun:
    """Load a language model from a run folder, a checkpoint, or any folder with model files and `tokenizer.json`.

    `device` is `cpu`, or `auto` for a GPU if PyTorch finds one. The folder of a LoRA adapter is loaded with its base;
    `adapter` is a folder of an adapter to apply to the model in `folder`. `dtype` and `quantize` are those of
    `set_precision`. Raises `FileNotFoundError` for missing files and `ValueError` for a model of another kind
    (classifier, images, probe, pretraining, other libraries), and for `quantize` with an adapter.
    """
    folder, home = _model_folder(folder)
    if is_classifier(folder):
        raise ValueError(
            f"{folder} holds a classifier, which labels sequences and predicts no text; measure it with: "
            + command("eval", folder)
        )
    if is_image_model(folder):
        raise ValueError(
            f"{folder} holds an image model, which predicts no text; draw images with: "
            + command("generate", folder, "--images", 100)
        )
    if is_extension(folder):
        raise ValueError(
            f"{folder} holds an extension of a transformers model: merge it, then import the result, with:\n  "
            f"{lora.merging(folder)}\n  " + command("import", f"{folder}-merged", "--out", f"{folder}-imported")
        )
    model_type = _model_type(folder)
    if not is_adapter(folder) and not str(model_type).startswith(SubquadConfig.model_type):
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}, not a subquad model: convert it with: "
            + command("import", folder, "--out", f"{folder}-imported")
        )
    settings = _settings(home)
    if settings is not None and "pretrain" in settings.groups:
        raise ValueError(
            f"{folder} holds a pretrained encoder, which is the first phase of a classifier and not a finished model"
        )
    if settings is not None and "probe" in settings.groups:
        raise ValueError(
            f"{folder} holds a model of the probe {settings.probe.name}, which predicts no text; measure it with: "
            + command("probe", folder)
        )
    own = folder if is_adapter(folder) else adapter
    if quantize is not None and own is not None:
        raise ValueError(f"quantize needs a model without an adapter; merge {own} first, with: {lora.merging(own)}")
    words = tokenizer_folder(folder)
    if not (words / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{words} holds no tokenizer.json; copy the one that the model was trained with there")
    model = _on_device(read_model(SubquadForCausalLM, folder, adapter), device)
    set_precision(model.decoder, dtype, quantize)
    return LoadedRun(folder, model.decoder, load_tokenizer(words), settings)


def load_language_model(folder: str | Path) -> tuple[SubquadForCausalLM, Path]:
    """Return the transformers model of a run folder or any folder with model files, and the folder of its tokenizer.

    Raises `FileNotFoundError` like `load_run`, and `ValueError` for an adapter and for other kinds of models.
    """
    folder, _ = _model_folder(folder)
    if is_adapter(folder):
        raise ValueError(
            f"{folder} holds an adapter; make one plain model of it and its base with: {lora.merging(folder)}"
        )
    model_type = _model_type(folder)
    if model_type != SubquadConfig.model_type:
        raise ValueError(f"{folder} holds a model of type {model_type!r}; it must be {SubquadConfig.model_type!r}")
    return SubquadForCausalLM.from_pretrained(folder).eval(), tokenizer_folder(folder)


def load_probe(folder: str | Path, device: str = "auto") -> LoadedProbe:
    """Load the model of a run with task=probe or of its checkpoint. Raises like `load_run` for other folders."""
    folder, home = _model_folder(folder)
    settings = _settings(home)
    if settings is None or "probe" not in settings.groups:
        raise ValueError(f"{folder} has no model of a probe; `subquad train --task probe` makes one")
    return LoadedProbe(folder, _on_device(read_model(SubquadForCausalLM, folder), device).decoder, settings)


def is_probe(folder: str | Path) -> bool:
    """Return whether `folder` is a run with task=probe, or one of its checkpoints."""
    settings = _settings(_model_folder(folder)[1])
    return settings is not None and "probe" in settings.groups


def load_classifier(folder: str | Path, device: str = "auto", adapter: str | None = None) -> LoadedClassifier:
    """Load the model of a run with task=classify or of its checkpoint. Raises like `load_run` for other folders."""
    folder, home = _model_folder(folder)
    if not is_classifier(folder):
        raise ValueError(f"{folder} has no classifier; `subquad train --task classify` makes one")
    model = _on_device(read_model(SubquadEncoderForSequenceClassification, folder, adapter), device)
    return LoadedClassifier(folder, model, _settings(home))


def load_image_run(folder: str | Path, device: str = "auto", adapter: str | None = None) -> LoadedImageModel:
    """Load the model of a run with task=image or of its checkpoint. Raises like `load_run` for other folders."""
    folder, home = _model_folder(folder)
    if not is_image_model(folder):
        raise ValueError(f"{folder} has no image model; `subquad train --task image` makes one")
    model = _on_device(read_model(SubquadForImages, folder, adapter), device)
    return LoadedImageModel(folder, model.model, _settings(home))


class Images(NamedTuple):
    """Images to measure a model on."""

    held_out: ImageSet
    train: ImageSet | None
    """Training images, or None if the files have no split."""


def images_for(loaded: LoadedImageModel, path: str | None) -> Images:
    """Return the images at `path` (None: the run's own).

    All pictures of a plain folder are measured, except for the run's own path, of which only the held-out ones are.
    Raises `ValueError` if there are no images or they don't have the model's size.
    """
    own = None if loaded.config is None else loaded.config.image.path
    if path is None:
        if own is None:
            raise ValueError(f"{loaded.folder} has no config.yaml that names its images; give the path of some")
        path = own
    own_path = own is not None and Path(path).expanduser().resolve() == Path(own).expanduser().resolve()
    pictures = None if own_path else load_pictures(path)
    if pictures is not None:
        found = Images(pictures, None)
    else:
        sets = load_images(path)
        found = Images(sets["test"], sets["train"])
    if found.held_out.shape != loaded.model.config.shape:
        raise ValueError(
            f"{path} has images of {_size(found.held_out.shape)}, but the model in {loaded.folder} needs "
            f"{_size(loaded.model.config.shape)} (rows x columns x channels)"
        )
    return found


def _size(shape: tuple[int, int, int]) -> str:
    return " x ".join(map(str, shape))


def chosen(images: ImageSet, wanted: int | None) -> ImageSet:
    """Return `wanted` images, evenly spread over all; None or too large a number means all."""
    size = len(images.pixels)
    count = size if wanted is None else min(wanted, size)
    index = np.arange(count) * size // count
    labels = None if images.labels is None else images.labels[index]
    return ImageSet(images.pixels[index], labels, images.classes)


def is_classifier(folder: str | Path) -> bool:
    """Return whether `folder` holds a classifier or an adapter of one, by the model's config.json."""
    return _model_type(folder) == SubquadClassifierConfig.model_type


def is_image_model(folder: str | Path) -> bool:
    """Return whether `folder` holds an image model or an adapter of one, by the model's config.json."""
    return _model_type(folder) == SubquadImageConfig.model_type


def _model_type(folder: str | Path) -> Any:
    file = model_home(folder) / "config.json"
    return read_json_mapping(file).get("model_type") if file.is_file() else None


def _model_folder(folder: str | Path) -> tuple[Path, Path]:
    """Return `folder` after checking that it has model files, and the run's folder, which differs for a checkpoint."""
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give its folder, {folder.parent}")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; give the folder of a run, as `subquad train` makes it")
    home = run_folder(folder)
    settings = home / "config.yaml"
    if not (folder / "config.json").is_file() and not is_adapter(folder):
        hint = "give the folder of a run, as `subquad train` makes it"
        if settings.is_file():
            hint = f"its training has not ended; go on with: {command('train', '--config', settings)}"
        raise FileNotFoundError(f"{folder} holds no config.json, so no trained model; {hint}")
    check_unchanged(folder)
    disable_progress_bar()  # loading is too quick for a bar
    return folder, home


def run_folder(folder: Path) -> Path:
    """Return the run folder of a checkpoint; other folders are returned unchanged."""
    place = folder.resolve().parent
    found = any((place.parent / name).is_file() for name in ("config.yaml", "tokenizer.json"))
    return place.parent if place.name == CHECKPOINTS and found else folder


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder of the tokenizer of the model in `folder`; a checkpoint without one has its run's."""
    return folder if (folder / "tokenizer.json").is_file() else run_folder(folder)


def _settings(home: Path) -> TrainConfig | None:
    file = home / "config.yaml"
    return TrainConfig.from_file(file) if file.is_file() else None


def _on_device(model: Any, device: str) -> Any:
    return model.eval().to(device_type(device))


def read_model(model_class: type[PreTrainedModel], folder: Path, adapter: str | None = None) -> Any:
    """Return the model in `folder`; an adapter is loaded with its base, and `adapter` is applied to the model.

    Raises `FileNotFoundError` if the base or the adapter is missing, and `ValueError` if they don't belong together.
    """
    if not is_adapter(folder):
        if adapter is None:
            return model_class.from_pretrained(folder, local_files_only=True)
        if not is_adapter(adapter):
            raise FileNotFoundError(f"there is no adapter in {adapter}; `subquad train --lora.rank` makes one")
        record = lora.Base.read(adapter)
        record.check(folder, adapter)
        return lora.load_adapter(lora.load_base(folder, record.classes), adapter).get_base_model()
    if adapter is not None:
        raise ValueError(f"{folder} is an adapter itself: give its base as RUN, and one adapter with --adapter")
    return lora.open_adapter(folder).get_base_model()


def model_home(folder: str | Path) -> Path:
    """Return the folder of the full model, which for an adapter is its base's."""
    return lora.Base.read(folder).find(folder) if is_adapter(folder) else Path(folder)
