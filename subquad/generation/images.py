"""Draw images, or their occluded parts, pixel by pixel with a carried state, and compose pictures of them.

Shape letters: N images, B batch, T pixels (bytes) of an image, H rows, W columns, C channels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subquad.config import check_at_least
from subquad.disk import aside
from subquad.inference import device_of, inference
from subquad.models.image import START, ImageModel
from subquad.state import State

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]
OCCLUDED = (70, 90, 170)
"""Colour of occluded pixels."""
GAP, BACKGROUND = 2, (128, 128, 128)
CAPTION = 14
"""Height of the captions above the columns, in pixels."""
LEAST = 56
"""Least length of an image's longer side in a picture, in pixels: smaller images are enlarged."""


@dataclass(frozen=True)
class DrawnImages:
    """Images drawn by `generate_images` or `complete_images`."""

    pixels_NT: Tensor
    """Bytes, uint8."""
    seconds: float
    state_bytes: int
    """Size of the states of one batch after its last pixel; 0 without a cache."""
    batch_size: int
    """Images drawn at once."""


def generate_images(
    model: ImageModel,
    count: int,
    /,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 100,
    cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> DrawnImages:
    """Draw `count` images, `batch_size` at a time; image i draws from the seed `seed + i` modulo 2**64.

    Without `cache`, the model rereads all previous pixels for each one, like a softmax model without cached keys and
    values. `progress(done, total)` counts pixels of all images. Raises `ValueError` for a count or batch size below 1
    and a temperature below 0.
    """
    check_at_least(1, count=count)
    nothing_NT = torch.zeros(count, model.config.tokens, dtype=torch.uint8)
    return complete_images(
        model,
        nothing_NT,
        torch.ones(model.config.tokens, dtype=torch.bool),
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        cache=cache,
        progress=progress,
    )


def complete_images(
    model: ImageModel,
    pixels_NT: Tensor,
    occluded_T: Tensor,
    /,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 100,
    cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> DrawnImages:
    """Draw the pixels where `occluded` `[T]` is True, and keep the others.

    A pixel depends only on pixels before it: given pixels that follow have no influence. Those between two drawn pixels
    are read in one pass. The other arguments are those of `generate_images`. Also raises `ValueError` for images or a
    mask that do not fit the model.
    """
    check_at_least(1, **{"the number of images": len(pixels_NT)}, batch_size=batch_size)
    check_at_least(0, temperature=temperature)
    tokens = model.config.tokens
    sizes = pixels_NT.shape[1:] == occluded_T.shape == (tokens,)
    if not sizes or pixels_NT.dtype != torch.uint8 or occluded_T.dtype != torch.bool:
        raise ValueError(
            f"the model draws images of {tokens} bytes, got pixels {list(pixels_NT.shape)} of {pixels_NT.dtype} and a "
            f"mask {list(occluded_T.shape)} of {occluded_T.dtype}; valid: uint8 and bool"
        )
    begin, state_bytes, drawn = time.perf_counter(), 0, []
    for first in range(0, len(pixels_NT), batch_size):
        part_BT = pixels_NT[first : first + batch_size]
        random_BT = torch.stack([_random(seed + first + i, tokens) for i in range(len(part_BT))])
        before = first * tokens

        def show(done: int, before: int = before, images: int = len(part_BT)) -> None:
            if progress:
                progress(before + done * images, len(pixels_NT) * tokens)

        with inference(model):
            pixels_BT, state = _fill(model, part_BT, occluded_T, random_BT, temperature, cache, show)
        show(tokens)
        drawn.append(pixels_BT)
        state_bytes = max(state_bytes, 0 if state is None else state.nbytes)
    seconds = time.perf_counter() - begin
    return DrawnImages(torch.cat(drawn), seconds, state_bytes, min(batch_size, len(pixels_NT)))


def _random(seed: int, count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed % 2**64), dtype=torch.float64)


def _fill(
    model: ImageModel,
    pixels_BT: Tensor,
    occluded_T: Tensor,
    random_BT: Tensor,
    temperature: float,
    cache: bool,
    show: Callable[[int], None],
) -> tuple[Tensor, State | None]:
    """Return one batch with its occluded pixels drawn, and the state after the last token read."""
    device = device_of(model)
    # `inputs` shifts by one and drops the last entry: a dummy pixel keeps the real last one.
    tokens_BT = model.inputs(torch.cat((pixels_BT, pixels_BT[:, :1]), 1).long()).to(device)
    tokens_BT[:, 1:] = tokens_BT[:, 1:].masked_fill(occluded_T.to(device), START)
    random_BT = random_BT.to(device)
    state: State | None = None
    read = 0
    for place in occluded_T.nonzero()[:, 0].tolist():
        if cache:
            h_BTD, state = model.hidden(tokens_BT[:, read : place + 1], state)
            read = place + 1
        else:
            h_BTD, _ = model.hidden(tokens_BT[:, : place + 1])
        parameters_BP = model.parameters_of(h_BTD[:, -1])
        tokens_BT[:, place + 1] = model.sample(parameters_BP, random_BT[:, place], temperature=temperature)
        show(place + 1)
    return tokens_BT[:, 1:].to("cpu", torch.uint8), state


def write_png(file: Path, picture: Image.Image) -> None:
    """Write a picture atomically."""
    with aside(file) as draft:
        picture.save(draft, format="PNG")


def picture_of(rows: Sequence[Sequence[Pixels]], captions: Sequence[str] = ()) -> Image.Image:
    """Return a picture of `rows` of equally large images `[H, W, C]`, with `captions` above the columns."""
    from PIL import Image, ImageDraw

    height, width, _ = rows[0][0].shape
    scale = max(1, math.ceil(LEAST / max(height, width)))
    columns = max(len(row) for row in rows)
    cell_y, cell_x = height * scale + GAP, width * scale + GAP
    top = GAP + (CAPTION if captions else 0)
    canvas = np.full((top + len(rows) * cell_y, GAP + columns * cell_x, 3), BACKGROUND, np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            shown = np.broadcast_to(image, (height, width, 3)).repeat(scale, 0).repeat(scale, 1)
            y, x = top + i * cell_y, GAP + j * cell_x
            canvas[y : y + height * scale, x : x + width * scale] = shown
    picture = Image.fromarray(canvas)
    draw = ImageDraw.Draw(picture)
    for j, caption in enumerate(captions):
        draw.text((GAP + j * cell_x, 1), caption, fill=(255, 255, 255))
    return picture


def square(images: Sequence[Pixels]) -> list[list[Pixels]]:
    """Return the images in about as many rows as columns."""
    columns = math.ceil(math.sqrt(len(images)))
    return [list(images[first : first + columns]) for first in range(0, len(images), columns)]


def occluded(image: Pixels, mask_HW: NDArray[np.bool_]) -> Pixels:
    """Return the image in colour, with the pixels of `mask` painted as occluded."""
    shown = np.broadcast_to(image, (*image.shape[:2], 3)).copy()
    shown[mask_HW] = OCCLUDED
    return shown
