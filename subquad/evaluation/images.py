"""Bits per dimension of an image model, and a small classifier that judges completions.

Shape letters: N images, B batch, T pixels (bytes) of an image.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.config import Record, check_at_least
from subquad.data.images import ImageSet
from subquad.inference import device_of, inference
from subquad.models.image import ImageModel
from subquad.models.mlp import Mlp


@dataclass(frozen=True)
class ImageEvaluation(Record):
    """The result of `evaluate_images`. A dimension is a byte: a grey pixel, or one channel of a colour pixel."""

    images: int
    dimensions: int
    """Dimensions per image; all are predicted, including the first."""
    bits_per_dim: float
    """Mean of `-log2 p` over all dimensions of all images."""
    error: float | None
    """Standard error of that mean over images; None for a single image."""
    constant: float
    """Entropy of the levels in these images: bits per dimension of the best constant prediction."""
    occluded: int | None
    """Occluded dimensions per image."""
    occluded_bits_per_dim: float | None
    """Mean over the occluded dimensions, each predicted from the true dimensions before it."""
    seconds: float


def evaluate_images(
    model: ImageModel,
    pixels_NT: Tensor,
    /,
    *,
    occluded_T: Tensor | None = None,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> ImageEvaluation:
    """Measure bits per dimension of uint8 images `[N, T]`, also over the dimensions where `occluded_T` (bool) is True.

    Runs on the model's device, in eval mode. `progress(done, images)` is called after each batch. Raises `ValueError`
    for no images, a batch size below 1, images or a mask of the wrong shape, and a mask that is False everywhere.
    """
    check_at_least(1, **{"the number of images": len(pixels_NT)}, batch_size=batch_size)
    tokens = model.config.tokens
    if pixels_NT.shape[1:] != (tokens,) or (occluded_T is not None and occluded_T.shape != (tokens,)):
        mask = "" if occluded_T is None else f" and a mask {list(occluded_T.shape)}"
        raise ValueError(f"the model predicts images of {tokens} bytes, got {list(pixels_NT.shape)}{mask}")
    if occluded_T is not None and (occluded_T.dtype != torch.bool or not occluded_T.any()):
        raise ValueError(f"the mask must be bool and somewhere True, got {occluded_T.dtype}, sum {occluded_T.sum()}")
    device = device_of(model)
    begin, bits = time.perf_counter(), []
    with inference(model):
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
    """A small image classifier: an MLP T - 64 - 64 - classes with ReLU."""

    def __init__(self, model: Mlp) -> None:
        self.model = model

    @torch.no_grad()
    def labels(self, pixels_NT: Tensor, /) -> Tensor:
        """Return the likeliest class `[N]` of each image of bytes `[N, T]`."""
        return self.model(_inputs(pixels_NT)).argmax(-1)

    def accuracy(self, pixels_NT: Tensor, labels_N: Tensor, /) -> float:
        """Return the share of images classified as `labels_N`."""
        return (self.labels(pixels_NT) == labels_N).double().mean().item()


def train_reader(images: ImageSet, /, *, seed: int = 0) -> Reader:
    """Train a small classifier on labelled images, deterministically for the same images, seed and machine.

    Adam, five epochs in batches of 128, learning rate decaying linearly to zero. Raises `ValueError` for images without
    labels.
    """
    if images.labels is None:
        raise ValueError("a classifier needs labelled images to train on; these have no labels")
    pixels_NT, labels_N = images.flat, torch.from_numpy(images.labels)
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
