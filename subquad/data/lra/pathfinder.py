"""Pathfinder: are two discs the ends of one long dashed curve, among shorter ones?

The rules of Linsley et al. 2018 (arXiv:1805.08315), as their published generator follows them, with the numbers of Long
Range Arena (Tay et al. 2020, arXiv:2011.04006, section 2.2.5). Two snakes of strokes grow in turn from near the middle;
then short snakes fill what is left. One disc marks the start of a long snake, the other the end of it (label 1) or of
the other one (label 0).

Each stroke begins where the last one points to and ends at a pixel of a circle, drawn with the weight
`free * cos(min(continuity * turn, 90 degrees))**2`. It is drawn again where it meets another, but the last stroke of
either snake is in nobody's way: long snakes cross in about 30 % of the images of 32 pixels. What cannot be completed
begins again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from subquad.data.lra._snakes import Snake, pairs, short_snakes
from subquad.data.lra._strokes import FULL, RULES, Strokes, strokes
from subquad.data.lra.store import Labelled

VERSION = 2
VOCAB_SIZE = 256
CLASSES = ("apart", "connected")
BLOCK = 500
"""Images in a block."""
SEGMENTS = {"hard": 14, "intermediate": 9, "easy": 6}
"""Strokes of the two long snakes; the short ones have a third of them."""


class Drawing(NamedTuple):
    """An image before it is drawn: which pixels are to have which brightness."""

    strokes: Strokes
    label: int
    targets: tuple[Snake, Snake]
    distractors: tuple[Snake, ...]
    discs: tuple[int, int]
    """The middles of the two discs."""

    def image(self, *, distractors: bool = True, discs: bool = True) -> np.ndarray:
        """Brightness `[size, size]`, uint8: the greatest of all parts, or of those that are asked for."""
        canvas = np.zeros(self.strokes.stride**2)
        relative = self.strokes.rules.short_contrast / self.strokes.rules.contrast
        for snakes, factor in ((self.targets, 1.0), (self.distractors if distractors else (), relative)):
            for snake in snakes:
                for place, way in snake.strokes:
                    pixels, levels = self.strokes.drawn[way]
                    _paint(canvas, place, pixels, factor * levels)
        for place in self.discs if discs else ():
            _paint(canvas, place, *self.strokes.disc)
        return np.rint(self.strokes.crop(canvas) * (FULL / max(FULL, canvas.max()))).astype(np.uint8)


def make_block(options: dict[str, Any], seed: int, number: int) -> Labelled:
    """`BLOCK` images, row by row, and their labels. Each block has random numbers of its own."""
    drawings = draw(options["size"], options["difficulty"], BLOCK, np.random.default_rng([seed, 3, number]))
    tokens = np.concatenate([drawing.image().ravel() for drawing in drawings])
    lengths = np.full(BLOCK, options["size"] ** 2, dtype=np.int64)
    return Labelled(tokens, lengths, np.array([drawing.label for drawing in drawings]))


def draw(size: int, difficulty: str, images: int, rng: np.random.Generator) -> list[Drawing]:
    """Images of `size` by `size` pixels: 32, 64 or 128."""
    rules, segments = RULES[size], SEGMENTS[difficulty]
    short = segments // 3
    supply = {margin: pairs(strokes(size, margin), segments, rng) for margin in rules.margins}
    made = []
    for margin in rng.choice(rules.margins, images).tolist():
        pair, label, chosen = next(supply[margin]), int(rng.integers(2)), int(rng.integers(2))
        others = short_snakes(strokes(size, margin), pair, short, rules.distractor_factor // short, rng)
        discs = (pair.snakes[chosen].origin, pair.snakes[chosen if label else 1 - chosen].tip)
        made.append(Drawing(strokes(size, margin), label, pair.snakes, tuple(others), discs))
    return made


def _paint(canvas: np.ndarray, place: int, pixels: np.ndarray, levels: np.ndarray) -> None:
    canvas[place + pixels] = np.maximum(canvas[place + pixels], levels)
