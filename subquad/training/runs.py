"""Reading a trained model back from its folder, alone or with an adapter, and the images that belong to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from subquad.data import load_tokenizer
from subquad.data.images import ImageSet, load_images, load_pictures
from subquad.hf import SubquadConfig, SubquadForCausalLM, SubquadForImages, SubquadForSequenceClassification, lora
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.hf.image import SubquadImageConfig
from subquad.hf.lora import is_adapter, is_extension
from subquad.models import Decoder
from subquad.models.image import ImageModel
from subquad.parsing import read_json_mapping
from subquad.training.config import TrainConfig
from subquad.training.processes import device_type
from subquad.training.saving import CHECKPOINTS

Model = TypeVar("Model")


class LoadedRun(NamedTuple):
    """A trained model with its tokenizer; `config` is None where the folder holds no training configuration."""

    folder: Path
    decoder: Decoder
    tokenizer: Tokenizer
    config: TrainConfig | None


class LoadedProbe(NamedTuple):
    """A model that was trained on a probe."""

    folder: Path
    decoder: Decoder
    config: TrainConfig


class Loaded(NamedTuple, Generic[Model]):
    """A trained model of another kind; `config` is None where the folder holds no training configuration."""

    folder: Path
    model: Model
    config: TrainConfig | None


LoadedClassifier = Loaded[SubquadForSequenceClassification]
LoadedImageModel = Loaded[ImageModel]


def load_run(folder: str | Path, device: str = "auto", adapter: str | None = None) -> LoadedRun:
    """Read a run's folder, one of its checkpoints, or any folder with a model's files and `tokenizer.json`.

    `device` is `cpu`, or `auto` for a GPU where PyTorch finds one. The folder of a LoRA adapter is read with its base;
    `adapter` names one to put on the model in `folder`. Raises `FileNotFoundError` that names what is
    missing and says what to do, and `ValueError` for a classifier and for a model that was trained on a probe.
    """
    folder, home = _model_folder(folder)
    if is_classifier(folder):
        raise ValueError(
            f"{folder} holds a classifier: it labels whole sequences and predicts no text; `subquad eval` measures it"
        )
    if is_image_model(folder):
        raise ValueError(
            f"{folder} holds a model of images, which knows no text; `subquad generate RUN --images 100` draws images"
        )
    if is_extension(folder):
        raise ValueError(
            f"{folder} holds an extension of a model of transformers: make one of ours of it by `subquad lora merge "
            f"{folder} --out MERGED` and `subquad import MERGED --out FOLDER`"
        )
    model_type = _model_type(folder)
    if not is_adapter(folder) and not str(model_type).startswith(SubquadConfig.model_type):
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}, not one of ours: make one by `subquad import {folder} "
            "--out FOLDER`"
        )
    settings = _settings(home)
    if settings is not None and "pretrain" in settings.groups:
        raise ValueError(
            f"{folder} holds an encoder in pretraining, no finished model: it is the first phase of a classifier"
        )
    if settings is not None and "probe" in settings.groups:
        raise ValueError(
            f"{folder} holds a model of the probe {settings.probe.name}, which knows no text; `subquad probe` measures "
            "it"
        )
    if not (home / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{home} holds no tokenizer.json; copy the one that the model was trained with there")
    model = _on_device(read_model(SubquadForCausalLM, folder, adapter), device)
    return LoadedRun(folder, model.model, load_tokenizer(home), settings)


def load_language_model(folder: str | Path) -> tuple[SubquadForCausalLM, Path]:
    """The whole model in a run's folder, or in any with a model's files, and the folder that holds its tokenizer.

    Raises `FileNotFoundError` as `load_run`, and `ValueError` for an adapter and for a model that is no language model.
    """
    folder, home = _model_folder(folder)
    if is_adapter(folder):
        raise ValueError(f"{folder} holds an adapter; `subquad lora merge` makes one plain model of it and its base")
    model_type = _model_type(folder)
    if model_type != SubquadConfig.model_type:
        raise ValueError(f"{folder} holds a model of type {model_type!r}; it must be {SubquadConfig.model_type!r}")
    return SubquadForCausalLM.from_pretrained(folder).eval(), home


def load_probe(folder: str | Path, device: str = "auto") -> LoadedProbe:
    """Read the folder of a run with task=probe, or one of its checkpoints.

    Raises `FileNotFoundError` as `load_run`, and `ValueError` for another run's folder.
    """
    folder, home = _model_folder(folder)
    settings = _settings(home)
    if settings is None or "probe" not in settings.groups:
        raise ValueError(f"{folder} holds no model of a probe; `subquad train --task probe` makes one")
    return LoadedProbe(folder, _on_device(read_model(SubquadForCausalLM, folder), device).model, settings)


def is_probe(folder: str | Path) -> bool:
    """Whether a folder is that of a run with task=probe, or one of its checkpoints."""
    settings = _settings(_model_folder(folder)[1])
    return settings is not None and "probe" in settings.groups


def load_classifier(folder: str | Path, device: str = "auto", adapter: str | None = None) -> LoadedClassifier:
    """Read the folder of a classifier's run, or one of its checkpoints. Raises as `load_run`, for what it refuses."""
    folder, home = _model_folder(folder)
    if not is_classifier(folder):
        raise ValueError(f"{folder} holds a language model, no classifier")
    model = _on_device(read_model(SubquadForSequenceClassification, folder, adapter), device)
    return LoadedClassifier(folder, model, _settings(home))


def load_image_run(folder: str | Path, device: str = "auto", adapter: str | None = None) -> LoadedImageModel:
    """Read the folder of a run with task=image, or one of its checkpoints.

    Raises `FileNotFoundError` as `load_run`, and `ValueError` for another run's folder.
    """
    folder, home = _model_folder(folder)
    if not is_image_model(folder):
        raise ValueError(f"{folder} holds no model of images; `subquad train --task image` makes one")
    model = _on_device(read_model(SubquadForImages, folder, adapter), device)
    return LoadedImageModel(folder, model.model, _settings(home))


class Images(NamedTuple):
    """Images to measure a model on."""

    held_out: ImageSet
    train: ImageSet | None
    """Those to learn from, where the files tell them apart."""


def images_for(loaded: LoadedImageModel, path: str | None) -> Images:
    """Return the images at `path` (None: the run's); `ValueError` where there are none or they have another size.

    At another path than the run's, the pictures of a folder are all measured; of the run's own those it held out.
    """
    own = None if loaded.config is None else loaded.config.image.path
    if path is None:
        if own is None:
            raise ValueError(f"{loaded.folder} has no config.yaml that names its images; give some by their path")
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
            f"{path} holds images of {_size(found.held_out.shape)}, but the model in {loaded.folder} has "
            f"{_size(loaded.model.config.shape)} (rows x columns x channels)"
        )
    return found


def _size(shape: tuple[int, int, int]) -> str:
    return " x ".join(map(str, shape))


def chosen(images: ImageSet, wanted: int | None) -> ImageSet:
    """Return `wanted` images, evenly spread over all of them (all where there are fewer, or for None)."""
    size = len(images.pixels)
    count = size if wanted is None else min(wanted, size)
    index = np.arange(count) * size // count
    labels = None if images.labels is None else images.labels[index]
    return ImageSet(images.pixels[index], labels, images.classes)


def flat(images: ImageSet) -> Tensor:
    """Return the bytes of each image in a row, `[N, T]`."""
    return torch.from_numpy(images.pixels.reshape(len(images.pixels), -1))


def is_classifier(folder: str | Path) -> bool:
    """Whether a folder holds a classifier, by its config.json; an adapter's is its base's."""
    return _model_type(folder) == SubquadClassifierConfig.model_type


def is_image_model(folder: str | Path) -> bool:
    """Whether a folder holds a model of images, by its config.json; an adapter's is its base's."""
    return _model_type(folder) == SubquadImageConfig.model_type


def _model_type(folder: str | Path) -> Any:
    file = model_home(folder) / "config.json"
    return read_json_mapping(file).get("model_type") if file.is_file() else None


def _model_folder(folder: str | Path) -> tuple[Path, Path]:
    """The folder, which holds a model's files, and that of its run: another one for a checkpoint."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; give the folder of a run, as `subquad train` makes it")
    home = run_folder(folder)
    settings = home / "config.yaml"
    if not (folder / "config.json").is_file() and not is_adapter(folder):
        hint = "give the folder of a run, as `subquad train` makes it"
        if settings.is_file():
            hint = f"its training has not ended; go on with: subquad train --config {settings}"
        raise FileNotFoundError(f"{folder} holds no config.json, so no trained model; {hint}")
    disable_progress_bar()  # reading a file takes no time worth a bar
    return folder, home


def run_folder(folder: Path) -> Path:
    """Return the run's folder of a checkpoint that holds no tokenizer of its own; any other folder as it is."""
    checkpoint = folder.resolve().parent.name == CHECKPOINTS and not (folder / "tokenizer.json").is_file()
    return folder.resolve().parent.parent if checkpoint else folder


def _settings(home: Path) -> TrainConfig | None:
    file = home / "config.yaml"
    return TrainConfig.from_file(file) if file.is_file() else None


def _on_device(model: Any, device: str) -> Any:
    return model.eval().to(device_type(device))


def read_model(model_class: type[PreTrainedModel], folder: Path, adapter: str | None = None) -> Any:
    """Return the model of a folder, of an adapter's with its base; `adapter` is put on the model in `folder`.

    Raises `FileNotFoundError` where the base or the adapter is not there, and `ValueError` where they do not belong
    together.
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
        raise ValueError(f"{folder} is an adapter itself: give its base as RUN, and one adapter by --adapter")
    return lora.open_adapter(folder).get_base_model()


def model_home(folder: str | Path) -> Path:
    """Return the folder that holds the whole model: that of the base for an adapter."""
    return lora.Base.read(folder).find(folder) if is_adapter(folder) else Path(folder)
