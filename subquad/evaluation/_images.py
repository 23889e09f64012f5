"""How many bits a model of images needs for them. Shape letters: N images, T pixels (bytes) of an image."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.models.image import ImageModel


@dataclass(frozen=True)
class ImageEvaluation:
    """What `evaluate_images` measured. A dimension is a byte: a pixel of a grey image, a channel of a colour's."""

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
        """Plain values, for JSON."""
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
    """Bits per dimension of the images `[N, T]`, uint8, and of a part of their dimensions (`occluded`, bool `[T]`).

    Runs where the model is, without dropout. `progress(done, images)` is called after each batch. Raises `ValueError`
    for no image, a batch size below 1, images or a mask that do not fit the model, and a mask without a True.
    """
    for name, value in (("the number of images", len(pixels_NT)), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    tokens = model.config.tokens
    if pixels_NT.shape[1:] != (tokens,) or (occluded_T is not None and occluded_T.shape != (tokens,)):
        mask = "" if occluded_T is None else f" and a mask {list(occluded_T.shape)}"
        raise ValueError(f"the model predicts images of {tokens} bytes, got {list(pixels_NT.shape)}{mask}")
    if occluded_T is not None and (occluded_T.dtype != torch.bool or not occluded_T.any()):
        raise ValueError(f"the mask must be bool and True somewhere, got {occluded_T.dtype}, sum {occluded_T.sum()}")
    device, training = next(model.parameters()).device, model.training
    model.eval()
    begin, bits = time.perf_counter(), []
    for first in range(0, len(pixels_NT), batch_size):
        part_BT = pixels_NT[first : first + batch_size].to(device).long()
        bits.append(model.log_prob(part_BT).double().cpu() / -math.log(2))
        if progress:
            progress(min(first + batch_size, len(pixels_NT)), len(pixels_NT))
    model.train(training)
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
