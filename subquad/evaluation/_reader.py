"""A fixed classifier that reads images, to judge completions by. Shape letters: N images, B batch, T pixels (bytes)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.data.images import ImageSet
from subquad.models.mlp import Mlp

HIDDEN = (64, 64)
EPOCHS = 5
BATCH = 128
LR = 2e-3


class Reader:
    """What `train_reader` trained: T - 64 - 64 - classes, with ReLU."""

    def __init__(self, model: Mlp) -> None:
        self.model = model

    @torch.no_grad()
    def labels(self, pixels_NT: Tensor, /) -> Tensor:
        """The likeliest class of each image `[N, T]` of bytes, `[N]`."""
        return self.model(_inputs(pixels_NT)).argmax(-1)

    def accuracy(self, pixels_NT: Tensor, labels_N: Tensor, /) -> float:
        """Share of the images that it reads as their labels say."""
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
