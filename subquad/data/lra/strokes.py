"""Precompute the pixels that Pathfinder's snakes are drawn with: strokes, their surroundings and discs.

Places are indices into a flat canvas of `stride` pixels per row, with a rim around the image wide enough that strokes
never leave the canvas. A direction is an index: 0 to 359 are whole degrees, followed by the candidates that extend a
snake. Angles grow from the x axis (to the right) towards the y axis (down).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

DEGREES = 360


class Rules(NamedTuple):
    """Long Range Arena's sizes of the parts of an image, in pixels."""

    size: int
    margins: tuple[int, ...]
    seed_distance: int
    marker_radius: float
    length: int
    """Length of a stroke."""
    thickness: float
    continuity: float
    """Straightness of the snakes: a stroke turns by at most 90 degrees / continuity."""
    contrast: float
    """Brightness of the long snakes, relative to a disc."""
    short_contrast: float
    """Brightness of the short snakes, relative to a disc."""
    distractor_factor: int
    """Total number of strokes in the short snakes."""


RULES = {
    32: Rules(32, (1,), 7, 1.5, 2, 0.5, 1.0, 1.5, 2.0, 20),
    64: Rules(64, (1,), 12, 2.5, 5, 1.0, 1.8, 0.8, 0.8, 22),
    128: Rules(128, (2, 3), 20, 3.0, 5, 1.5, 1.8, 0.9, 0.9, 35),
}
FULL = 255
"""Cover of a whole pixel; cover is counted in 1/255, as in images."""
MEETS = 459
"""Two strokes meet in a pixel that their surroundings together cover by this much, 1.8 pixels."""
TAKEN = 76
"""A short snake cannot start on a pixel covered by more than this, 0.3 pixels."""
PADDING = 1
"""Width of the empty border of the image, in pixels."""
ANTIALIAS = 2
"""Strokes and discs are drawn larger by this factor, then shrunk."""


class Cover(NamedTuple):
    """Cover of pixels, relative to a place: `pixels` and their `levels`, above 0 to 255."""

    pixels: np.ndarray
    levels: np.ndarray


class Stroke(NamedTuple):
    """A stroke, relative to its place."""

    near: Cover
    """Pixels within the margin of the stroke."""
    far: Cover
    """Pixels within the margin of `near`; their cover lowers the probability that another stroke ends there."""
    drawn: Cover
    """The stroke itself, which may be brighter than 255 before the image is scaled."""


class Strokes:
    """All strokes of images with the given `rules` and `margin`, computed once."""

    def __init__(self, rules: Rules, margin: int) -> None:
        self.rules, self.margin = rules, margin
        self.rim = rules.length + 5 * margin + 3
        self.stride = rules.size + 2 * self.rim
        reach = rules.length + margin
        circle = np.arange(0, 2 * np.pi, 1 / reach)
        ends = np.unique(_whole(np.floor, reach * np.stack([np.sin(circle), np.cos(circle)], 1)), axis=0)
        angles = np.concatenate([np.deg2rad(np.arange(DEGREES)), np.arctan2(ends[:, 0], ends[:, 1])])
        self.ways = np.stack([np.sin(angles), np.cos(angles)], 1)
        """Unit vectors (y, x) of the directions."""
        self.steps = self._flat(_whole(np.ceil, (rules.length + 2 * margin) * self.ways))
        """Offset from one pivot to the next."""
        heads = _whole(np.ceil, rules.length * self.ways)
        self.backs = self._flat(_whole(np.ceil, heads - reach * self.ways))
        """Offset from the tail of a first stroke to its virtual pivot."""
        self.reaches = self._flat(heads)
        """Offset from the tail of a first stroke to its far end."""
        self.apart = self._flat(np.rint(rules.seed_distance * self.ways[:DEGREES]))
        """Offset from the tail of the first long snake to the tail of the second."""
        self.ends = self._flat(ends)
        """Offsets from a pivot to the candidates for the stroke's far end."""
        turn = np.abs(angles[:, None] - angles[None, DEGREES:]) % (2 * np.pi)
        turn = np.minimum(turn, 2 * np.pi - turn)
        self.weights = np.cos(np.minimum(rules.continuity * turn, np.pi / 2)).clip(0) ** 2
        """`[directions, candidates]`, weight of each candidate after a stroke in each direction."""
        starts = ends - rules.length * self.ways[DEGREES:]
        first = [self._stroke(np.zeros(2), way * rules.length) for way in self.ways[:DEGREES]]
        # First strokes start at the tail, in any direction; further strokes end at a candidate.
        made = first + [self._stroke(start, end) for start, end in zip(starts, ends, strict=True)]
        self.drawn = [stroke.drawn for stroke in made]
        self.near, self.far = Cover(*_table([s.near for s in made])), Cover(*_table([s.far for s in made]))
        """Surroundings of all strokes, a row for each direction, padded with the row's first pixel."""
        tests = [stroke.near.levels >= MEETS - FULL for stroke in made]
        self.tested, levels = _table([Cover(*(a[t] for a in s.near)) for s, t in zip(made, tests, strict=True)])
        """Pixels in which a stroke can meet another one."""
        self.allowed = MEETS - levels.astype(np.int16)
        """Cover of `tested` from which on another stroke is met."""
        inner = [Cover(*(a[stroke.near.levels == FULL] for a in stroke.near)) for stroke in first]
        self.inner = _table(inner)[0]
        """Pixels that a first stroke's surroundings cover completely."""
        self.inside = np.array([self._bounds(cover.pixels) for cover in inner])
        """Bounds of the first long snake's tail, as in `_bounds`, for which `inner` lies in the middle of the image."""
        self.disc = self._disc()

    def blank(self, around: int = 0) -> np.ndarray:
        """Return an empty canvas in which the rim, the border and `around` more pixels are taken."""
        taken = np.full((self.stride, self.stride), FULL, dtype=np.uint8)
        first = self.rim + PADDING + around
        taken[first:-first, first:-first] = 0
        return taken.ravel()

    def places(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the canvas indices of the image's pixels (rows, columns)."""
        return (rows + self.rim) * self.stride + columns + self.rim

    def crop(self, canvas: np.ndarray) -> np.ndarray:
        """Return the image `[size, size]` without the canvas's rim."""
        return canvas.reshape(self.stride, self.stride)[self.rim : -self.rim, self.rim : -self.rim]

    def _bounds(self, pixels: np.ndarray) -> tuple[int, int, int, int]:
        """Return the first row and column and the end row and column of a tail that keeps `pixels` in the middle."""
        half = self.stride // 2
        rows, columns = (part - half for part in np.divmod(pixels + half * (self.stride + 1), self.stride))
        first = 2 * self.rules.seed_distance
        end = self.rules.size - first
        return first - rows.min(), first - columns.min(), end - rows.max(), end - columns.max()

    def _flat(self, vectors: np.ndarray) -> np.ndarray:
        return (vectors[..., 0] * self.stride + vectors[..., 1]).astype(np.int64)

    def _stroke(self, start: np.ndarray, end: np.ndarray) -> Stroke:
        """Draw the stroke from `start` to `end`, points (y, x)."""
        reach = self.rules.length + 3 * self.margin + 3
        grid = _grid(reach)
        along = end - start
        fine = _fine(grid) - start
        share = (fine @ along / (along @ along)).clip(0, 1)
        around = np.linalg.norm(fine - share[..., None] * along, axis=-1) <= self.rules.thickness / 2 + self.margin
        image = Image.new("L", (ANTIALIAS * len(grid),) * 2)
        points = [tuple(ANTIALIAS * (point[::-1] + reach + 0.5) - 0.5) for point in (start, end)]
        ImageDraw.Draw(image).line(points, fill=FULL, width=round(ANTIALIAS * self.rules.thickness))
        line = _shrunk(image).astype(np.float64) * self.rules.contrast
        near = _shrunk(Image.fromarray(FULL * around.astype(np.uint8)))
        far = np.zeros_like(near)
        for row, column in _grid(self.margin).reshape(-1, 2):
            if row**2 + column**2 <= self.margin**2:
                np.maximum(far, np.roll(near, (row, column), (0, 1)), out=far)
        return Stroke(*(Cover(self._flat(grid[levels > 0]), levels[levels > 0]) for levels in (near, far, line)))

    def _disc(self) -> Cover:
        """Return pixels and brightness of a disc, relative to its centre."""
        grid = _grid(int(self.rules.marker_radius) + 2)
        inside = (_fine(grid) ** 2).sum(-1) <= self.rules.marker_radius**2
        levels = _shrunk(Image.fromarray(FULL * inside.astype(np.uint8))).astype(np.float64)
        return Cover(self._flat(grid[levels > 0]), levels[levels > 0])


def _grid(reach: int) -> np.ndarray:
    """Return the pixels (y, x) up to `reach` from (0, 0), `[side, side, 2]`."""
    return np.moveaxis(np.mgrid[-reach : reach + 1, -reach : reach + 1], 0, -1)


def _fine(grid: np.ndarray) -> np.ndarray:
    """Return the points (y, x) of `grid`, `ANTIALIAS` times finer."""
    places = (np.arange(ANTIALIAS * len(grid)) + 0.5) / ANTIALIAS - 0.5 - len(grid) // 2
    return np.stack(np.meshgrid(places, places, indexing="ij"), -1)


def _shrunk(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize([side // ANTIALIAS for side in image.size], Image.Resampling.LANCZOS))


def _whole(rounded: Any, vectors: np.ndarray) -> np.ndarray:
    """Round up or down by `rounded`, as the published generator does, ignoring rounding noise in whole numbers."""
    return rounded(vectors.round(9)).astype(np.int64)


def _table(rows: list[Cover]) -> tuple[np.ndarray, np.ndarray]:
    """Stack the pixels and the levels of covers, a row for each, padded with the row's first value."""
    pixels = np.empty((len(rows), max(len(row.pixels) for row in rows)), dtype=np.int64)
    levels = np.empty(pixels.shape, dtype=np.uint8)
    for i, row in enumerate(rows):
        for table, values in ((pixels, row.pixels), (levels, row.levels)):
            table[i] = values[0]
            table[i, : len(values)] = values
    return pixels, levels


@lru_cache
def strokes(size: int, margin: int) -> Strokes:
    """Return the strokes of Long Range Arena's images of `size` by `size` pixels."""
    return Strokes(RULES[size], margin)
