"""What the snakes of Pathfinder are drawn with: strokes, their surroundings, discs.

Places are indices into a flat canvas of `stride` pixels a row, whose rim lies outside of the image, so that nothing
drawn in the image leaves it. A direction is an index: 0 to 359 are whole degrees, then come the candidates of an
extension. Angles grow from the x axis (to the right) towards the y axis (down).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

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
    """Brightness of the long snakes; a disc's is 1."""
    short_contrast: float
    """Brightness of the short ones."""
    distractor_factor: int
    """Short snakes times their strokes."""


RULES = {
    32: Rules(32, (1,), 7, 1.5, 2, 0.5, 1.0, 1.5, 2.0, 20),
    64: Rules(64, (1,), 12, 2.5, 5, 1.0, 1.8, 0.8, 0.8, 22),
    128: Rules(128, (2, 3), 20, 3.0, 5, 1.5, 1.8, 0.9, 0.9, 35),
}
FULL = 255
"""How much of a pixel is covered is counted in 1/255, as images are."""
MEETS = 459
"""Two strokes meet in a pixel of which their surroundings together cover so much: 1.8."""
TAKEN = 76
"""No short snake starts on a pixel of which more is covered: 0.3."""
PADDING = 1
"""Pixels at the border that nothing is drawn on."""
ANTIALIAS = 2
"""Strokes and discs are drawn so many times larger, then shrunk."""


class Cover(NamedTuple):
    """Cover of pixels, relative to a place: `pixels` and their `levels`, above 0 to 255."""

    pixels: np.ndarray
    levels: np.ndarray


class Stroke(NamedTuple):
    """A stroke, relative to its place."""

    near: Cover
    """What lies up to the margin from it."""
    far: Cover
    """What lies up to the margin from `near`: a stroke ends there so much more rarely."""
    drawn: Cover
    """The stroke itself, which may be brighter than 255 before the image is scaled."""


class Strokes:
    """All strokes that an image of `rules` with one margin may have; made once."""

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
        """From one pivot to the next."""
        heads = _whole(np.ceil, rules.length * self.ways)
        self.backs = self._flat(_whole(np.ceil, heads - reach * self.ways))
        """From the tail of a first stroke to the pivot that it would have."""
        self.reaches = self._flat(heads)
        """From the tail of a first stroke to its far end."""
        self.apart = self._flat(np.rint(rules.seed_distance * self.ways[:DEGREES]))
        """From the tail of the first long snake to that of the second."""
        self.ends = self._flat(ends)
        """From a pivot to the candidates for the stroke's far end."""
        turn = np.abs(angles[:, None] - angles[None, DEGREES:]) % (2 * np.pi)
        turn = np.minimum(turn, 2 * np.pi - turn)
        self.weights = np.cos(np.minimum(rules.continuity * turn, np.pi / 2)).clip(0) ** 2
        """Of each candidate after each direction `[directions, candidates]`."""
        starts = ends - rules.length * self.ways[DEGREES:]
        first = [self._stroke(np.zeros(2), way * rules.length) for way in self.ways[:DEGREES]]
        # First strokes go from the tail in each direction, further ones from the pivot to each candidate.
        made = first + [self._stroke(start, end) for start, end in zip(starts, ends, strict=True)]
        self.drawn = [stroke.drawn for stroke in made]
        self.near, self.far = Cover(*_table([s.near for s in made])), Cover(*_table([s.far for s in made]))
        """The surroundings of all strokes, a row for each direction, filled up with its first pixel."""
        tests = [stroke.near.levels >= MEETS - FULL for stroke in made]
        self.tested, levels = _table([Cover(*(a[t] for a in s.near)) for s, t in zip(made, tests, strict=True)])
        """The pixels in which a stroke can meet another,"""
        self.allowed = MEETS - levels.astype(np.int16)
        """and how much of them must not be covered already."""
        inner = [Cover(*(a[stroke.near.levels == FULL] for a in stroke.near)) for stroke in first]
        self.inner = _table(inner)[0]
        """The pixels that a first stroke's surroundings cover wholly,"""
        self.inside = np.array([self._bounds(cover.pixels) for cover in inner])
        """and the first row and column, and the last ones, of the middle for its tail, so that they all lie in it."""
        self.disc = self._disc()

    def blank(self, around: int = 0) -> np.ndarray:
        """Return an empty canvas, of which the rim, the border and `around` pixels more are taken."""
        taken = np.full((self.stride, self.stride), FULL, dtype=np.uint8)
        first = self.rim + PADDING + around
        taken[first:-first, first:-first] = 0
        return taken.ravel()

    def places(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the indices of pixels of the image."""
        return (rows + self.rim) * self.stride + columns + self.rim

    def crop(self, canvas: np.ndarray) -> np.ndarray:
        """Return the image in the canvas `[size, size]`."""
        return canvas.reshape(self.stride, self.stride)[self.rim : -self.rim, self.rim : -self.rim]

    def _bounds(self, pixels: np.ndarray) -> tuple[int, int, int, int]:
        """Return the first row and column, and those after the last, of the tail of a stroke in the middle."""
        half = self.stride // 2
        rows, columns = (part - half for part in np.divmod(pixels + half * (self.stride + 1), self.stride))
        first = 2 * self.rules.seed_distance
        end = self.rules.size - first
        return first - rows.min(), first - columns.min(), end - rows.max(), end - columns.max()

    def _flat(self, vectors: np.ndarray) -> np.ndarray:
        return (vectors[..., 0] * self.stride + vectors[..., 1]).astype(np.int64)

    def _stroke(self, start: np.ndarray, end: np.ndarray) -> Stroke:
        """Draw the stroke between two points (y, x)."""
        reach = self.rules.length + 3 * self.margin + 3
        grid = _grid(reach)
        along = end - start
        fine = _fine(grid) - start
        share = (fine @ along / (along @ along)).clip(0, 1)
        around = np.linalg.norm(fine - share[..., None] * along, axis=-1) <= self.rules.thickness / 2 + self.margin
        image = Image.new("L", (ANTIALIAS * len(grid),) * 2)
        points = [tuple(ANTIALIAS * (point[::-1] + reach + 0.5) - 0.5) for point in (start, end)]
        width = max(1, round(ANTIALIAS * self.rules.thickness))
        ImageDraw.Draw(image).line(points, fill=FULL, width=width)
        line = _shrunk(image).astype(np.float64) * self.rules.contrast
        near = _shrunk(Image.fromarray(FULL * around.astype(np.uint8)))
        far = np.zeros_like(near)
        for row, column in _grid(self.margin).reshape(-1, 2):
            if row**2 + column**2 <= self.margin**2:
                np.maximum(far, np.roll(near, (row, column), (0, 1)), out=far)
        return Stroke(*(Cover(self._flat(grid[levels > 0]), levels[levels > 0]) for levels in (near, far, line)))

    def _disc(self) -> Cover:
        """Return pixels and brightness of a disc, relative to its middle."""
        grid = _grid(int(self.rules.marker_radius) + 2)
        inside = (_fine(grid) ** 2).sum(-1) <= self.rules.marker_radius**2
        levels = _shrunk(Image.fromarray(FULL * inside.astype(np.uint8))).astype(np.float64)
        return Cover(self._flat(grid[levels > 0]), levels[levels > 0])


def _grid(reach: int) -> np.ndarray:
    """Return the pixels (y, x) around one, `[side, side, 2]`."""
    return np.moveaxis(np.mgrid[-reach : reach + 1, -reach : reach + 1], 0, -1)


def _fine(grid: np.ndarray) -> np.ndarray:
    """Return the places of `grid`, `ANTIALIAS` times finer."""
    places = (np.arange(ANTIALIAS * len(grid)) + 0.5) / ANTIALIAS - 0.5 - len(grid) // 2
    return np.stack(np.meshgrid(places, places, indexing="ij"), -1)


def _shrunk(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize([side // ANTIALIAS for side in image.size], Image.Resampling.LANCZOS))


def _whole(rounded: Any, vectors: np.ndarray) -> np.ndarray:
    """Round to whole pixels, up or down as the published generator does; numbers that are whole but for noise stay."""
    return rounded(vectors.round(9)).astype(np.int64)


def _table(rows: list[Cover]) -> tuple[np.ndarray, np.ndarray]:
    """Gather pixels and levels in two tables, a row for each cover."""
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
