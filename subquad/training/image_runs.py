"""Trained models of images, and the images that go with them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.data.images import ImageSet, load_images, load_pictures
from subquad.hf import SubquadForImages
from subquad.models.image import ImageModel
from subquad.training import adapters as _adapters
from subquad.training.config import TrainConfig
from subquad.training.runs import _device, _model_folder, _settings, is_image_model


class LoadedImageModel(NamedTuple):
    """A trained model of images; `config` is None where the folder holds no training configuration."""

    folder: Path
    model: ImageModel
    config: TrainConfig | None


def load_image_run(folder: str | Path, device: str = "auto", adapter: str | None = None) -> LoadedImageModel:
    """Read the folder of a run with task=image, or one of its checkpoints.

    Raises `FileNotFoundError` as `load_run`, and `ValueError` for another run's folder.
    """
    folder, home = _model_folder(folder)
    if not is_image_model(folder):
        raise ValueError(f"{folder} holds no model of images; `subquad train --task image` makes one")
    model = _adapters.read(SubquadForImages, folder, adapter).eval()
    model.to(_device(device))
    return LoadedImageModel(folder, model.model, _settings(home))


class Images(NamedTuple):
    """Images to measure a model on."""

    held_out: ImageSet
    train: ImageSet | None
    """Those to learn from, where the files tell them apart."""


def images_for(loaded: LoadedImageModel, path: str | None) -> Images:
    """The images at `path` (None: those of the run); `ValueError` where there are none or they have another size.

    At another path than the run's, the pictures of a folder are all measured; of the run's own those it held out.
    """
    own = None if loaded.config is None else loaded.config.image.path
    if path is None:
        if own is None:
            raise ValueError(f"{loaded.folder} has no config.yaml that names its images; give some by their path")
        path = own
    pictures = None if _same(path, own) else load_pictures(path)
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


def _same(path: str, own: str | None) -> bool:
    return own is not None and Path(path).expanduser().resolve() == Path(own).expanduser().resolve()


def _size(shape: tuple[int, int, int]) -> str:
    return " x ".join(map(str, shape))


def chosen(images: ImageSet, wanted: int | None) -> ImageSet:
    """`wanted` images, evenly spread over all of them (all where there are fewer, or for None)."""
    size = len(images.pixels)
    count = size if wanted is None else min(wanted, size)
    index = np.arange(count) * size // count
    labels = None if images.labels is None else images.labels[index]
    return ImageSet(images.pixels[index], labels, images.classes)


def flat(images: ImageSet) -> Tensor:
    """The bytes of each image in a row, `[N, T]`."""
    return torch.from_numpy(images.pixels.reshape(len(images.pixels), -1))
