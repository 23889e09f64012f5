"""What the snakes of Pathfinder are drawn with: strokes, their surroundings, discs.

Places are indices into a flat canvas of `stride` pixels a row, whose rim lies outside of the image, so that nothing
drawn in the image leaves it. A direction is an index: 0 to 359 are whole degrees, then come the candidates of an
extension. Angles grow from the x axis (to the right) towards the y axis (down).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

DEGREES = 360


class Rules(NamedTuple):
    """The sizes of an image's parts, in pixels, as Long Range Arena has them."""

    size: int
    margins: tuple[int, ...]
    seed_distance: int
    marker_radius: float
    length: int
    """Of a stroke."""
    thickness: float
    continuity: float
    """The greater, the straighter the snakes."""
    contrast: float
    distractor_factor: int
    """Short snakes times their strokes."""


RULES = {
    32: Rules(32, (1,), 7, 1.5, 2, 0.5, 1.0, 1.5, 20),
    64: Rules(64, (1,), 12, 2.5, 5, 1.0, 1.8, 0.8, 22),
    128: Rules(128, (2, 3), 20, 3.0, 5, 1.5, 1.8, 0.9, 35),
}
PADDING = 1
"""Pixels at the border that nothing is drawn on."""
ANTIALIAS = 2
"""Strokes and discs are drawn so many times larger, then shrunk."""


class Stroke(NamedTuple):
    """A stroke, relative to its place."""

    near: np.ndarray
    """Pixels up to the margin from it: no other stroke's may be among them."""
    far: np.ndarray
    """Pixels up to twice the margin from it: no stroke ends there."""
    pixels: np.ndarray
    levels: np.ndarray
    """Brightness of `pixels`, 0 to 255 (and above, before it is clipped)."""


class Strokes:
    """All strokes that an image of `rules` with one margin may have; made once."""

    def __init__(self, rules: Rules, margin: int) -> None:
        self.rules, self.margin = rules, margin
        self.rim = rules.length + 5 * margin + 3
        self.stride = rules.size + 2 * self.rim
        reach = rules.length + margin
        circle = np.arange(0, 2 * np.pi, 1 / reach)
        ends = np.unique(np.rint(reach * np.stack([np.sin(circle), np.cos(circle)], 1)).astype(int), axis=0)
        angles = np.concatenate([np.deg2rad(np.arange(DEGREES)), np.arctan2(ends[:, 0], ends[:, 1])])
        self.ways = np.stack([np.sin(angles), np.cos(angles)], 1)
        """Unit vectors (y, x) of the directions."""
        self.steps = self._flat(np.rint((rules.length + 2 * margin) * self.ways))
        """From one pivot to the next."""
        self.backs = self._flat(np.rint(-margin * self.ways))
        """From the tail of a first stroke to the pivot that it would have."""
        self.reaches = self._flat(np.rint(rules.length * self.ways))
        """From the tail of a first stroke to its far end."""
        self.apart = self._flat(np.rint(rules.seed_distance * self.ways[:DEGREES]))
        """From the tail of the first long snake to that of the second."""
        self.ends = self._flat(ends)
        """From a pivot to the candidates for the stroke's far end."""
        turn = np.abs(angles[:, None] - angles[None, DEGREES:]) % (2 * np.pi)
        turn = np.minimum(turn, 2 * np.pi - turn)
        self.weights = np.cos(np.minimum(rules.continuity * turn, np.pi / 2)).clip(0) ** 2
        """Of each candidate after each direction `[directions, candidates]`."""
        self.seeds = [self._stroke(np.zeros(2), way * rules.length) for way in self.ways[:DEGREES]]
        """First strokes, from the tail in each direction."""
        starts = ends - rules.length * self.ways[DEGREES:]
        self.extensions = [self._stroke(start, end) for start, end in zip(starts, ends, strict=True)]
        """Further strokes, from the pivot."""
        self.near, self.far = (_table([stroke[i] for stroke in self.seeds + self.extensions]) for i in range(2))
        """The same of all strokes, a row for each direction, filled up with its first pixel."""
        self.drawn = [stroke[2:] for stroke in self.seeds + self.extensions]
        """Pixels and brightness of all strokes."""
        self.disc = self._disc()

    def blank(self, around: int = 0) -> np.ndarray:
        """Which pixels are taken, before anything is drawn: the rim, the border and `around` pixels more."""
        taken = np.ones((self.stride, self.stride), dtype=bool)
        first = self.rim + PADDING + around
        taken[first:-first, first:-first] = False
        return taken.ravel()

    def places(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The indices of pixels of the image."""
        return (rows + self.rim) * self.stride + columns + self.rim

    def crop(self, canvas: np.ndarray) -> np.ndarray:
        """The image in the canvas `[size, size]`."""
        return canvas.reshape(self.stride, self.stride)[self.rim : -self.rim, self.rim : -self.rim]

    def _flat(self, vectors: np.ndarray) -> np.ndarray:
        return (vectors[..., 0] * self.stride + vectors[..., 1]).astype(np.int64)

    def _stroke(self, start: np.ndarray, end: np.ndarray) -> Stroke:
        """The stroke between two points (y, x)."""
        reach = self.rules.length + 3 * self.margin + 3
        grid = np.moveaxis(np.mgrid[-reach : reach + 1, -reach : reach + 1], 0, -1)
        along = end - start
        share = ((grid - start) @ along / (along @ along)).clip(0, 1)
        distance = np.linalg.norm(grid - start - share[..., None] * along, axis=-1) - self.rules.thickness / 2
        image = Image.new("L", (ANTIALIAS * len(grid),) * 2)
        points = [tuple(ANTIALIAS * (point[::-1] + reach + 0.5) - 0.5) for point in (start, end)]
        width = max(1, round(ANTIALIAS * self.rules.thickness))
        ImageDraw.Draw(image).line(points, fill=255, width=width)
        pixels, levels = self._shrunk(image, grid, self.rules.contrast)
        near, far = (self._flat(grid[distance <= times * self.margin]) for times in (1, 2))
        return Stroke(near, far, pixels, levels)

    def _disc(self) -> tuple[np.ndarray, np.ndarray]:
        """Pixels and brightness of a disc, relative to its middle."""
        reach = int(self.rules.marker_radius) + 2
        grid = np.moveaxis(np.mgrid[-reach : reach + 1, -reach : reach + 1], 0, -1)
        fine = (np.arange(ANTIALIAS * len(grid)) + 0.5) / ANTIALIAS - 0.5 - reach
        inside = fine[:, None] ** 2 + fine**2 <= self.rules.marker_radius**2
        return self._shrunk(Image.fromarray((255 * inside).astype(np.uint8)), grid, 1.0)

    def _shrunk(self, image: Image.Image, grid: np.ndarray, contrast: float) -> tuple[np.ndarray, np.ndarray]:
        small = np.asarray(image.resize((len(grid),) * 2, Image.Resampling.LANCZOS), dtype=np.float64) * contrast
        return self._flat(grid[small > 0]), small[small > 0]


def _table(rows: list[np.ndarray]) -> np.ndarray:
    table = np.empty((len(rows), max(map(len, rows))), dtype=np.int64)
    for row, values in zip(table, rows, strict=True):
        row[:] = values[0]
        row[: len(values)] = values
    return table


@lru_cache
def strokes(size: int, margin: int) -> Strokes:
    """Those of Long Range Arena's images of `size` by `size` pixels."""
    return Strokes(RULES[size], margin)
