"""Generate Pathfinder: are two discs the ends of one long dashed curve, among shorter ones?

The rules of Linsley et al. 2018 (arXiv:1805.08315) as in their published generator, with the numbers of Long Range
Arena (Tay et al. 2020, arXiv:2011.04006, section 2.2.5). Two long snakes of strokes grow in turn from near the middle;
then short snakes fill the rest. One disc marks the start of a long snake, the other the end of the same snake (label 1)
or of the other one (label 0).

Each stroke begins where the last one points to and ends at a pixel of a circle, drawn with the weight
`free * cos(min(continuity * turn, 90 degrees))**2`. It is redrawn if it meets another stroke, other than the
latest of either snake, so long snakes cross in about 30 % of the images of 32 pixels. Images whose snakes
get stuck are dropped; since most do, the long snakes of many images grow at once. Letters: A images begun at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from subquad.data.lra.store import Labelled
from subquad.data.lra.strokes import DEGREES, FULL, PADDING, RULES, TAKEN, Cover, Strokes, strokes

VERSION = 2
VOCAB_SIZE = 256
CLASSES = ("apart", "connected")
BLOCK = 500
"""Images in a block."""
SEGMENTS = {"hard": 14, "intermediate": 9, "easy": 6}
"""Strokes of each long snake; the short ones have a third of that."""


class Drawing(NamedTuple):
    """An image before it is drawn: its snakes, discs and label."""

    strokes: Strokes
    label: int
    targets: tuple[Snake, Snake]
    distractors: tuple[Snake, ...]
    discs: tuple[int, int]
    """Centres of the two discs."""

    def image(self) -> np.ndarray:
        """Return the brightness `[size, size]`, uint8; each pixel is the maximum over all parts."""
        canvas = np.zeros(self.strokes.stride**2)
        relative = self.strokes.rules.short_contrast / self.strokes.rules.contrast
        for snakes, factor in ((self.targets, 1.0), (self.distractors, relative)):
            for snake in snakes:
                for place, way in snake.strokes:
                    pixels, levels = self.strokes.drawn[way]
                    _paint(canvas, place, pixels, factor * levels)
        for place in self.discs:
            _paint(canvas, place, *self.strokes.disc)
        return np.rint(self.strokes.crop(canvas) * (FULL / max(FULL, canvas.max()))).astype(np.uint8)


def make_block(options: dict[str, Any], seed: int, number: int) -> Labelled:
    """Make `BLOCK` images, row by row, and their labels; each block number has its own random numbers."""
    drawings = draw(options["size"], options["difficulty"], BLOCK, np.random.default_rng([seed, 3, number]))
    tokens = np.concatenate([drawing.image().ravel() for drawing in drawings])
    lengths = np.full(BLOCK, options["size"] ** 2, dtype=np.int64)
    return Labelled(tokens, lengths, np.array([drawing.label for drawing in drawings]))


def draw(size: int, difficulty: str, images: int, rng: np.random.Generator) -> list[Drawing]:
    """Draw images of `size` by `size` pixels: 32, 64 or 128."""
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


REDRAWS = 2
"""Redraws of a stroke that meets another before its snake is stuck."""
RETRIES = 4
"""Retries of a short snake before it is left out."""
LEAST_FREE = 0.01
"""Fraction of the image that must be free for another short snake."""
TRIES = 64
"""Random places tried for the start of a short snake before all places are searched."""
CANVAS_BYTES = 1 << 24
"""Memory of the canvases of all images begun at once."""
LEAST_WEIGHT = 1e-4
"""Total weight of all candidates at or below which a snake is stuck."""


class Snake(NamedTuple):
    """A chain of strokes: the place of its tail, of its far end, and the place and direction of each stroke."""

    origin: int
    tip: int
    strokes: list[tuple[int, int]]


class Pair(NamedTuple):
    """The two long snakes of an image, and the cover of each pixel."""

    snakes: tuple[Snake, Snake]
    near: np.ndarray
    far: np.ndarray


def pairs(strokes: Strokes, segments: int, rng: np.random.Generator) -> Iterator[Pair]:
    """Yield pairs of long snakes of `segments` strokes, one for each image, endlessly."""
    while True:
        yield from _Pairs(strokes, segments, rng).grown()


class _Pairs:
    """Grow the long snakes of A images in turn, dropping images in which one gets stuck.

    Canvases are `[A, pixels]`. As in the published generator, a stroke goes onto them only when its snake gets the next
    one, so the latest stroke of either snake blocks nothing, and the short snakes ignore the first snake's last stroke.
    """

    def __init__(self, strokes: Strokes, segments: int, rng: np.random.Generator) -> None:
        self.strokes, self.rng, pixels = strokes, rng, strokes.stride**2
        self.count = max(1, CANVAS_BYTES // (2 * pixels))
        self.near, self.far = (
            np.broadcast_to(blank, (self.count, pixels)).copy()
            for blank in (strokes.blank(), strokes.blank(strokes.margin))
        )
        self.alive = np.arange(self.count)
        self.places, self.ways = (np.zeros((segments, 2, self.count), dtype=np.int64) for _ in range(2))
        self.segments = segments

    def grown(self) -> Iterator[Pair]:
        """Grow all snakes and yield the images that are complete."""
        pivots = self._seed()
        for segment in range(1, self.segments):
            for snake in range(2):
                self._extend(segment, snake, pivots[snake])
        self._take(self.segments - 1, 1)
        for number in self.alive.tolist():
            yield Pair((self._snake(number, 0), self._snake(number, 1)), self.near[number], self.far[number])

    def _snake(self, number: int, snake: int) -> Snake:
        places, ways = self.places[:, snake, number], self.ways[:, snake, number]
        tip = int(places[-1] + self.strokes.ends[ways[-1] - DEGREES])
        return Snake(int(places[0]), tip, list(zip(places.tolist(), ways.tolist(), strict=True)))

    def _seed(self) -> np.ndarray:
        """Draw the first stroke of both snakes, a fixed distance apart; return their pivots `[2, A]`."""
        rng, strokes = self.rng, self.strokes
        self.ways[0] = rng.integers(DEGREES, size=(2, self.count))
        inside = strokes.inside[self.ways[0, 0]].T
        self.places[0, 0] = strokes.places(*(rng.integers(inside[i], inside[i + 2]) for i in range(2)))
        self.places[0, 1] = self.places[0, 0] + strokes.apart[rng.integers(DEGREES, size=self.count)]
        return self.places[0] + strokes.backs[self.ways[0]]

    def _extend(self, segment: int, snake: int, pivots: np.ndarray) -> None:
        """Add a stroke to this snake of each live image; images in which none fits are dropped."""
        strokes, alive = self.strokes, self.alive
        before = self.ways[segment - 1, snake, alive]
        pivot = pivots[alive] + strokes.steps[before]
        free = FULL - self.far[alive[:, None], pivot[:, None] + strokes.ends]
        weights = (strokes.weights[before] * (free / FULL)).cumsum(1)
        fits = np.zeros(len(alive), dtype=bool)
        ways = np.zeros_like(before)
        for _ in range(1 + REDRAWS):
            (todo,) = np.nonzero(~fits & (weights[:, -1] > LEAST_WEIGHT))
            drawn = self.rng.random(len(todo)) * weights[todo, -1]
            ways[todo] = DEGREES + (weights[todo] <= drawn[:, None]).sum(1)
            covered = self.near[alive[todo, None], pivot[todo, None] + strokes.tested[ways[todo]]]
            fits[todo] = (covered < strokes.allowed[ways[todo]]).all(1)
        self.alive = alive[fits]
        self.places[segment, snake, self.alive] = pivots[self.alive] = pivot[fits]
        self.ways[segment, snake, self.alive] = ways[fits]
        self._take(segment - 1, snake)

    def _take(self, segment: int, snake: int) -> None:
        """Put stroke `segment` of this snake on the canvases."""
        images = self.alive[:, None]
        place, way = self.places[segment, snake, self.alive][:, None], self.ways[segment, snake, self.alive]
        for canvas, cover in ((self.near, self.strokes.near), (self.far, self.strokes.far)):
            where = images, place + cover.pixels[way]
            canvas[where] = np.maximum(canvas[where], cover.levels[way])


def short_snakes(strokes: Strokes, pair: Pair, segments: int, wanted: int, rng: np.random.Generator) -> Iterator[Snake]:
    """Yield at most `wanted` snakes of `segments` strokes in the space that the long ones leave."""
    near, far = pair.near.copy(), pair.far.copy()
    for _ in range(wanted):
        for _ in range(1 + RETRIES):
            if (near <= TAKEN).sum() < LEAST_FREE * strokes.rules.size**2:
                return
            if snake := _short_snake(strokes, near, far, segments, rng):
                for place, way in snake.strokes:
                    _put(near, strokes.near, place, way)
                    _put(far, strokes.far, place, way)
                yield snake
                break


def _short_snake(
    strokes: Strokes, near: np.ndarray, far: np.ndarray, segments: int, rng: np.random.Generator
) -> Snake | None:
    """Grow a snake and return it, or None if it gets stuck; the canvases do not change."""
    near, far = near.copy(), far.copy()
    way = int(rng.integers(DEGREES))
    place = _free_place(strokes, near, way, rng)
    if place is None:
        return None
    drawn = [(place, way)]
    pivot, tip = place + int(strokes.backs[way]), place + int(strokes.reaches[way])
    for _ in range(segments - 1):
        pivot += int(strokes.steps[way])
        weights = (strokes.weights[way] * ((FULL - far[pivot + strokes.ends]) / FULL)).cumsum()
        if weights[-1] <= LEAST_WEIGHT:
            return None
        for _ in range(1 + REDRAWS):
            number = int(weights.searchsorted(rng.random() * weights[-1], side="right"))
            candidate = DEGREES + number
            if (near[pivot + strokes.tested[candidate]] < strokes.allowed[candidate]).all():
                break
        else:
            return None
        before, last = drawn[-1]
        _put(near, strokes.near, before, last)
        _put(far, strokes.far, before, last)
        way, tip = candidate, pivot + int(strokes.ends[number])
        drawn.append((pivot, way))
    return Snake(place, tip, drawn)


def _free_place(strokes: Strokes, near: np.ndarray, way: int, rng: np.random.Generator) -> int | None:
    """Return a random place where a first stroke fits, all equally likely, or None."""
    first, end = PADDING, strokes.rules.size - PADDING
    places = strokes.places(*rng.integers(first, end, (2, TRIES)))
    for some in (places, None):
        if some is None:
            rows, columns = np.mgrid[first:end, first:end]
            some = rng.permutation(strokes.places(rows.ravel(), columns.ravel()))
        fitting = some[(near[some[:, None] + strokes.inner[way]] <= TAKEN).all(1)]
        if len(fitting):
            return int(fitting[0])
    return None


def _put(canvas: np.ndarray, cover: Cover, place: int, way: int) -> None:
    where = place + cover.pixels[way]
    canvas[where] = np.maximum(canvas[where], cover.levels[way])
