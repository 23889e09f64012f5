"""Changes of labelled sequences that keep their labels: more examples than there are.

The ideas are those of Miralles-Gonzalez et al. 2025 (arXiv:2501.14850) as far as they are exact on tokens: images are
mirrored and shifted, Pathfinder's turned too, the arguments of ListOps' operators (all of them symmetric) permuted, the
papers of a pair swapped. Not done here: AutoAugment, rotations by a few degrees, shear.

Random numbers are torch's, drawn in the training step: a run that goes on draws the same. Shape letters: B batch,
T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from subquad.data.lra.listops import CLOSE, MIN, SM

Batch = dict[str, Tensor]
SHIFT = 8
"""Images are shifted by up to their side divided by this."""


def check_whole(dataset: str, lengths: np.ndarray, length: int) -> None:
    """Raise `ValueError` where images of `lengths` pixels do not fill sequences of `length` tokens exactly.

    A cut image, or an image with padding after it, has no rows of `sqrt(length)` pixels to move.
    """
    wrong = lengths[lengths != length]
    if (dataset == "image" or dataset.startswith("pathfinder")) and len(wrong):
        raise ValueError(
            f"classify.augment=true moves the pixels of whole images, and batch.length={length} is not their "
            f"{int(wrong[0]):,}; set it to that, or leave classify.augment out"
        )


def augmentation(dataset: str) -> Callable[[Batch], Batch]:
    """Return the changes that keep the labels of `dataset`; `ValueError` where none is known."""
    known = {"image": mirrored_and_shifted, "pathfinder": turned, "listops": permuted, "retrieval": swapped}
    rules = dataset.rstrip("0123456789")
    if rules not in known:
        raise ValueError(f"no change is known to keep the labels of dataset {dataset!r}")
    return known[rules]


def mirrored_and_shifted(batch: Batch) -> Batch:
    """Mirror square images left to right or not, and shift each by up to an eighth of the side; zeros come in."""
    pixels_BHW = _square(batch["input_ids"])
    B, side, _ = pixels_BHW.shape
    mirrored_B11 = (torch.rand(B) < 0.5).to(pixels_BHW.device)[:, None, None]
    pixels_BHW = torch.where(mirrored_B11, pixels_BHW.flip(2), pixels_BHW)
    most = side // SHIFT
    shifts_B2 = torch.randint(-most, most + 1, (B, 2)).to(pixels_BHW.device)
    place_N = torch.arange(side, device=pixels_BHW.device)
    rows_BH, columns_BW = (place_N - shifts_B2[:, axis, None] for axis in (0, 1))
    rows_in_BH, columns_in_BW = ((place >= 0) & (place < side) for place in (rows_BH, columns_BW))
    inside_BHW = rows_in_BH[:, :, None] & columns_in_BW[:, None, :]
    from_BT = (rows_BH.clamp(0, side - 1)[:, :, None] * side + columns_BW.clamp(0, side - 1)[:, None, :]).flatten(1)
    moved_BT = pixels_BHW.flatten(1).gather(1, from_BT).masked_fill(~inside_BHW.flatten(1), 0)
    return {**batch, "input_ids": moved_BT}


def turned(batch: Batch) -> Batch:
    """Turn square images by 0, 1, 2 or 3 right angles, mirrored or not: all eight are equally likely."""
    pixels_BHW = _square(batch["input_ids"]).clone()
    way_B = torch.randint(8, (len(pixels_BHW),)).to(pixels_BHW.device)
    for way in range(1, 8):
        chosen_B = way_B == way
        images = pixels_BHW[chosen_B].rot90(way % 4, (1, 2))
        pixels_BHW[chosen_B] = images.flip(2) if way >= 4 else images
    return {**batch, "input_ids": pixels_BHW.flatten(1)}


def permuted(batch: Batch) -> Batch:
    """Put the arguments of each operator of ListOps in a random order; an expression that was cut stays as it is."""
    rng = np.random.default_rng(int(torch.randint(2**31, ())))
    tokens_BT, lengths_B = batch["input_ids"].clone(), batch["attention_mask"].sum(1).tolist()
    for row, length in enumerate(lengths_B):
        made = permuted_expression(tokens_BT[row, :length].tolist(), rng)
        tokens_BT[row, :length] = torch.tensor(made, dtype=tokens_BT.dtype, device=tokens_BT.device)
    return {**batch, "input_ids": tokens_BT}


def permuted_expression(tokens: list[int], rng: np.random.Generator) -> list[int]:
    """Return an expression of the same value: the arguments of each operator, at every depth, in a random order."""
    open_lists: list[list[list[int]]] = [[]]
    for token in tokens:
        if MIN <= token <= SM:
            open_lists.append([[token]])
        elif token == CLOSE and len(open_lists) > 1:
            operator, *arguments = open_lists.pop()
            order = rng.permutation(len(arguments))
            inside = [part for place in order for part in arguments[place]]
            open_lists[-1].append([*operator, *inside, token])
        else:
            open_lists[-1].append([token])
    if len(open_lists) > 1:  # cut before its end
        return tokens
    return [token for part in open_lists[0] for token in part]


def swapped(batch: Batch) -> Batch:
    """Swap the two sequences of each pair, or not."""
    swap_B1 = (torch.rand(len(batch["input_ids"])) < 0.5).to(batch["input_ids"].device)[:, None]
    made = dict(batch)
    for name in ("input_ids", "attention_mask"):
        one, other = batch[name], batch[f"pair_{name}"]
        made[name], made[f"pair_{name}"] = torch.where(swap_B1, other, one), torch.where(swap_B1, one, other)
    return made


def _square(tokens_BT: Tensor) -> Tensor:
    side = math.isqrt(tokens_BT.shape[1])
    if side * side != tokens_BT.shape[1]:
        raise ValueError(
            f"classify.augment moves the pixels of square images, and batch.length={tokens_BT.shape[1]} is no square"
        )
    return tokens_BT.view(len(tokens_BT), side, side)
