"""Bits per dimension of a model of images, and a small classifier that reads images, to judge completions by.

Shape letters: N images, B batch, T pixels (bytes) of an image.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.config import check_at_least
from subquad.data.images import ImageSet
from subquad.evaluation.text import evaluating
from subquad.models.image import ImageModel
from subquad.models.mlp import Mlp


@dataclass(frozen=True)
class ImageEvaluation:
    """The result of `evaluate_images`. A dimension is a byte: a pixel of a grey image, a channel of a colour's."""

    images: int
    dimensions: int
    """Of one image: all of them are predicted, the first one too."""
    bits_per_dim: float
    """Mean of `-log2 p` over all dimensions of all images."""
    error: float | None
    """Standard error of that mean, over images; None of one image, which has no spread."""
    constant: float
    """Bits per dimension by the frequencies of the levels in these images, the same for every dimension."""
    occluded: int | None
    """Dimensions that count as occluded, of one image."""
    occluded_bits_per_dim: float | None
    """The mean over those, each predicted from all true ones before it."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


@torch.no_grad()
def evaluate_images(
    model: ImageModel,
    pixels_NT: Tensor,
    /,
    *,
    occluded_T: Tensor | None = None,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> ImageEvaluation:
    """Measure bits per dimension of images `[N, T]`, uint8, and of a part of their dimensions (`occluded`, bool `[T]`).

    Runs where the model is, without dropout. `progress(done, images)` is called after each batch. Raises `ValueError`
    for no image, a batch size below 1, images or a mask that do not fit the model, and a mask without a True.
    """
    check_at_least(1, **{"the number of images": len(pixels_NT)}, batch_size=batch_size)
    tokens = model.config.tokens
    if pixels_NT.shape[1:] != (tokens,) or (occluded_T is not None and occluded_T.shape != (tokens,)):
        mask = "" if occluded_T is None else f" and a mask {list(occluded_T.shape)}"
        raise ValueError(f"the model predicts images of {tokens} bytes, got {list(pixels_NT.shape)}{mask}")
    if occluded_T is not None and (occluded_T.dtype != torch.bool or not occluded_T.any()):
        raise ValueError(f"the mask must be bool and True somewhere, got {occluded_T.dtype}, sum {occluded_T.sum()}")
    device = next(model.parameters()).device
    begin, bits = time.perf_counter(), []
    with evaluating(model):
        for first in range(0, len(pixels_NT), batch_size):
            part_BT = pixels_NT[first : first + batch_size].to(device).long()
            bits.append(model.log_prob(part_BT).double().cpu() / -math.log(2))
            if progress:
                progress(min(first + batch_size, len(pixels_NT)), len(pixels_NT))
    bits_NT = torch.cat(bits)
    counts_V = pixels_NT.flatten().long().bincount().double()
    share_V = counts_V[counts_V > 0] / counts_V.sum()
    bits_N = bits_NT.mean(1)
    return ImageEvaluation(
        images=len(pixels_NT),
        dimensions=tokens,
        bits_per_dim=bits_N.mean().item(),
        error=bits_N.std().item() / math.sqrt(len(bits_N)) if len(bits_N) > 1 else None,
        constant=-(share_V * share_V.log2()).sum().item(),
        occluded=None if occluded_T is None else int(occluded_T.sum()),
        occluded_bits_per_dim=None if occluded_T is None else bits_NT[:, occluded_T].mean().item(),
        seconds=time.perf_counter() - begin,
    )


HIDDEN = (64, 64)
EPOCHS = 5
BATCH = 128
LR = 2e-3


class Reader:
    """A small classifier of images: T - 64 - 64 - classes, with ReLU."""

    def __init__(self, model: Mlp) -> None:
        self.model = model

    @torch.no_grad()
    def labels(self, pixels_NT: Tensor, /) -> Tensor:
        """Return the likeliest class of each image `[N, T]` of bytes, `[N]`."""
        return self.model(_inputs(pixels_NT)).argmax(-1)

    def accuracy(self, pixels_NT: Tensor, labels_N: Tensor, /) -> float:
        """Return the share of the images that it reads as their labels say."""
        return (self.labels(pixels_NT) == labels_N).double().mean().item()


def train_reader(images: ImageSet, /, *, seed: int = 0) -> Reader:
    """Train a small classifier on labelled images: always the same one for the same images, seed and machine.

    Adam, five passes in batches of 128, the learning rate falling linearly to zero. Raises `ValueError` for images
    without labels.
    """
    if images.labels is None:
        raise ValueError("a classifier needs images with labels to learn from, and these have none")
    pixels_NT = torch.from_numpy(images.pixels.reshape(len(images.pixels), -1))
    labels_N = torch.from_numpy(images.labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Mlp(pixels_NT.shape[1], *HIDDEN, len(images.classes))
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    steps = EPOCHS * -(-len(labels_N) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(EPOCHS):
        for chosen_B in torch.randperm(len(labels_N), generator=order).split(BATCH):
            loss = F.cross_entropy(model(_inputs(pixels_NT[chosen_B])), labels_N[chosen_B])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return Reader(model.eval())


def _inputs(pixels_NT: Tensor) -> Tensor:
    return pixels_NT.float() / 255
