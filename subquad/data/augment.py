"""Augment labelled sequences by random changes that keep their labels.

From Miralles-Gonzalez et al. 2025 (arXiv:2501.14850), the changes that are exact on tokens: mirror and shift images,
mirror and rotate Pathfinder's, permute the arguments of ListOps' operators (all are symmetric), swap the papers of a
pair. Left out: AutoAugment, rotations by a few degrees, shear.

Random numbers come from torch's global generator in the training step, so a resumed run draws the same ones. Shape
letters: B batch, H rows, W columns, T tokens.
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
"""Shift images by at most their side divided by this."""


def check_whole(dataset: str, lengths: np.ndarray, length: int) -> None:
    """Raise `ValueError` unless all images have `length` pixels: a truncated one has no rows of `sqrt(length)`."""
    wrong = lengths[lengths != length]
    if (dataset == "image" or dataset.startswith("pathfinder")) and len(wrong):
        raise ValueError(
            f"classify.augment=true needs whole images of {int(wrong[0]):,} pixels, got batch.length={length}"
        )


def augmentation(dataset: str) -> Callable[[Batch], Batch]:
    """Return the augmentation of `dataset`, from batch to batch; raise `ValueError` if it has none."""
    known = {"image": mirrored_and_shifted, "pathfinder": turned, "listops": permuted, "retrieval": swapped}
    rules = dataset.rstrip("0123456789")
    if rules not in known:
        raise ValueError(f"dataset {dataset!r} cannot be augmented; valid: {', '.join(known)}")
    return known[rules]


def mirrored_and_shifted(batch: Batch) -> Batch:
    """Mirror half of the square images left to right and shift each by up to 1/`SHIFT` of its side, filled with 0."""
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
    """Rotate square images by 0 to 3 right angles, mirrored or not, all eight equally likely."""
    pixels_BHW = _square(batch["input_ids"]).clone()
    way_B = torch.randint(8, (len(pixels_BHW),)).to(pixels_BHW.device)
    for way in range(1, 8):
        chosen_B = way_B == way
        images = pixels_BHW[chosen_B].rot90(way % 4, (1, 2))
        pixels_BHW[chosen_B] = images.flip(2) if way >= 4 else images
    return {**batch, "input_ids": pixels_BHW.flatten(1)}


def permuted(batch: Batch) -> Batch:
    """Shuffle the arguments of every ListOps operator; leave truncated expressions unchanged."""
    rng = np.random.default_rng(int(torch.randint(2**31, ())))
    tokens_BT, lengths_B = batch["input_ids"].clone(), batch["attention_mask"].sum(1).tolist()
    for row, length in enumerate(lengths_B):
        made = permuted_expression(tokens_BT[row, :length].tolist(), rng)
        tokens_BT[row, :length] = torch.tensor(made, dtype=tokens_BT.dtype, device=tokens_BT.device)
    return {**batch, "input_ids": tokens_BT}


def permuted_expression(tokens: list[int], rng: np.random.Generator) -> list[int]:
    """Return an expression of the same value, the arguments of each operator shuffled at every depth."""
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
    if len(open_lists) > 1:  # truncated
        return tokens
    return [token for part in open_lists[0] for token in part]


def swapped(batch: Batch) -> Batch:
    """Swap the two sequences of half of the pairs."""
    swap_B1 = (torch.rand(len(batch["input_ids"])) < 0.5).to(batch["input_ids"].device)[:, None]
    made = dict(batch)
    for name in ("input_ids", "attention_mask"):
        one, other = batch[name], batch[f"pair_{name}"]
        made[name], made[f"pair_{name}"] = torch.where(swap_B1, other, one), torch.where(swap_B1, one, other)
    return made


def _square(tokens_BT: Tensor) -> Tensor:
    side = math.isqrt(tokens_BT.shape[1])
    if side * side != tokens_BT.shape[1]:
        raise ValueError(f"classify.augment=true needs square images, got batch.length={tokens_BT.shape[1]}")
    return tokens_BT.view(len(tokens_BT), side, side)
