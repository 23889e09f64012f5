"""The snakes of Pathfinder: chains of strokes that do not meet.

The two long ones are grown for many images at once, since most beginnings fail. Letters: A images that are begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from subquad.data.lra._strokes import DEGREES, FULL, PADDING, TAKEN, Cover, Strokes

REDRAWS = 2
"""How often a stroke that meets another is drawn again before its snake fails."""
RETRIES = 4
"""How often a short snake is tried again before it is left out."""
LEAST_FREE = 0.01
"""Of the image, for another short snake."""
TRIES = 64
"""Random places that are looked at for the start of a short snake, before all places are."""
CANVAS_BYTES = 1 << 24
"""Of the images that are begun at once."""
LEAST_WEIGHT = 1e-4
"""Of all candidates together, for another stroke."""


class Snake(NamedTuple):
    """A chain of strokes: the places of its first tail and of its far end, and of each stroke with its direction."""

    origin: int
    tip: int
    strokes: list[tuple[int, int]]


class Pair(NamedTuple):
    """The two long snakes of an image, and how much of each pixel they take."""

    snakes: tuple[Snake, Snake]
    near: np.ndarray
    far: np.ndarray


def pairs(strokes: Strokes, segments: int, rng: np.random.Generator) -> Iterator[Pair]:
    """Long snakes of `segments` strokes, of one image after another, without end."""
    while True:
        yield from _Pairs(strokes, segments, rng).grown()


class _Pairs:
    """Long snakes of A images, grown in turn; those of an image that are stuck are given up.

    Canvases are `[A, pixels]`. As in the published generator, a stroke is on them once its snake has the next one: the
    last stroke of either snake is in nobody's way, and at the end the first snake's last one is not there for the short
    snakes either.
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
        """The images that are completed."""
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
        """The first strokes: one in the middle, the other's tail at a distance from its tail. Their pivots `[2, A]`."""
        rng, strokes = self.rng, self.strokes
        self.ways[0] = rng.integers(DEGREES, size=(2, self.count))
        inside = strokes.inside[self.ways[0, 0]].T
        self.places[0, 0] = strokes.places(*(rng.integers(inside[i], inside[i + 2]) for i in range(2)))
        self.places[0, 1] = self.places[0, 0] + strokes.apart[rng.integers(DEGREES, size=self.count)]
        return self.places[0] + strokes.backs[self.ways[0]]

    def _extend(self, segment: int, snake: int, pivots: np.ndarray) -> None:
        """Another stroke for this snake of each image that is alive."""
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
        """Put a stroke of this snake on the canvases."""
        images = self.alive[:, None]
        place, way = self.places[segment, snake, self.alive][:, None], self.ways[segment, snake, self.alive]
        for canvas, cover in ((self.near, self.strokes.near), (self.far, self.strokes.far)):
            where = images, place + cover.pixels[way]
            canvas[where] = np.maximum(canvas[where], cover.levels[way])


def short_snakes(strokes: Strokes, pair: Pair, segments: int, wanted: int, rng: np.random.Generator) -> Iterator[Snake]:
    """At most `wanted` snakes of `segments` strokes where the long ones have left room."""
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
    """A snake on a canvas, which is left as it is; None where it is stuck."""
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
    """A place where a first stroke fits, each as likely as another; None where there is none."""
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
