"""The image task: predict the next pixel."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset

from subquad.config import digest
from subquad.data.files import check_path
from subquad.data.images import ImageSet, load_images
from subquad.models.image import ImageModel, ImageModelConfig
from subquad.models.pixels import LEVELS
from subquad.training.config import BatchConfig, TrainConfig
from subquad.training.memory import check_fits
from subquad.training.task import Task, fitted, spread

logger = logging.getLogger(__name__)


class PixelItems(Dataset[dict[str, Tensor]]):
    """Images as `{"input_ids": [T], "labels": [T]}`, with bytes row by row."""

    def __init__(self, images: ImageSet) -> None:
        self.pixels_NT = images.flat

    def __len__(self) -> int:
        return len(self.pixels_NT)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixels_T = self.pixels_NT[index].long()
        return {"input_ids": pixels_T, "labels": pixels_T}


def image_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the fields that `ImageModelConfig` adds to the decoder's, from a run's settings."""
    names = ("output", "mixtures", "axes", "near", "position_channels")
    return {name: value for name, value in config.image.to_dict().items() if name in names}


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """Predict the next pixel of images."""

    image: ImageModelConfig

    unit: ClassVar[str] = "pixel"

    @classmethod
    def check_source(cls, config: TrainConfig) -> None:
        if config.image.path is not None:
            check_path(config.image.path, "hf:NAME")

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise `ValueError` or `TypeError` for a model that fits no image."""
        if config.image.path is None:
            raise ValueError("task=image needs image.path: a folder of images, an npz file, or hf:NAME")
        side = max(28, config.image.near + 1)
        with torch.device("meta"):
            model = ImageModelConfig.from_decoder(config.model, height=side, width=side, **image_settings(config))
            check_fits(ImageModel(model), config)

    @classmethod
    def prepare(cls, config: TrainConfig, console: Console | None) -> Self:
        cls.check(config)
        assert config.image.path is not None
        sets = load_images(config.image.path)
        height, width, channels = sets["train"].shape
        config = _sized(config, height * width * channels, f"{height} x {width} x {channels}")
        train, held_out = (PixelItems(sets[part]) for part in ("train", "test"))
        return cls(
            config=config,
            data=sets["test"],
            train=train,
            held_out=spread(held_out, config.run.eval_windows),
            image=ImageModelConfig.from_decoder(
                config.model, height=height, width=width, channels=channels, **image_settings(config)
            ),
            identity={
                "task": "image",
                "image": digest(image_settings(config)),
                "data": digest([images.fingerprint() for images in sets.values()]),
            },
        )

    def new_model(self) -> Any:
        from subquad.hf.image import SubquadForImages, SubquadImageConfig

        return SubquadForImages(SubquadImageConfig.from_image(self.image))

    def measure(self, values: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the loss in nats and in bits per pixel."""
        measured = super().measure(values)
        return {**measured, "eval_bits_per_dim": measured["eval_loss"] / math.log(2)}


def _sized(config: TrainConfig, tokens: int, shape: str) -> TrainConfig:
    """Return `config` with batch.length = `tokens` of an image; raise `ValueError` for any other than the default."""
    length = config.batch.length
    if length not in (tokens, BatchConfig.length):
        raise ValueError(
            f"batch.length must be {tokens} for images of {shape} (rows x columns x channels), got {length}; leave it "
            "out"
        )
    if length != tokens:
        logger.info("batch.length is %d, the bytes of an image of %s", tokens, shape)
    model = fitted(config.model, LEVELS + 1, "the pixel levels and a start token")
    if model.position == "learned":
        model = model.replace(max_positions=max(tokens, model.max_positions))
    return config.replace(model=model, batch=config.batch.replace(length=tokens))
