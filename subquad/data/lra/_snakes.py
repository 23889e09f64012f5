"""The snakes of Pathfinder: chains of strokes that do not meet.

The two long ones are grown for many images at once, since most beginnings fail. Letters: A images that are begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from subquad.data.lra._strokes import DEGREES, PADDING, Strokes

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
    """The two long snakes of an image, and which pixels they take."""

    snakes: tuple[Snake, Snake]
    near: np.ndarray
    far: np.ndarray


def pairs(strokes: Strokes, segments: int, rng: np.random.Generator) -> Iterator[Pair]:
    """Long snakes of `segments` strokes, of one image after another, without end."""
    while True:
        yield from _Pairs(strokes, segments, rng).grown()


class _Pairs:
    """Long snakes of A images, grown in turn; those of an image that are stuck are given up.

    A snake's own last stroke is not in the way of its next one. So each snake has a canvas of its own,
    `[2, A, pixels]`: the strokes of the other, and its own but the last.
    """

    def __init__(self, strokes: Strokes, segments: int, rng: np.random.Generator) -> None:
        self.strokes, self.rng, self.pixels = strokes, rng, strokes.stride**2
        self.count = max(1, CANVAS_BYTES // (4 * self.pixels))
        self.near, self.far = (
            np.broadcast_to(blank, (2, self.count, self.pixels)).copy()
            for blank in (strokes.blank(), strokes.blank(strokes.margin))
        )
        self.alive = np.arange(self.count)
        self.places, self.ways = (np.zeros((segments, 2, self.count), dtype=np.int64) for _ in range(2))
        self.pivots = np.zeros((2, self.count), dtype=np.int64)
        self.segments = segments

    def grown(self) -> Iterator[Pair]:
        """The images that are completed."""
        self._seed()
        for segment in range(1, self.segments):
            for snake in range(2):
                self._extend(segment, snake)
        for number in self.alive.tolist():
            near, far = (canvas[0, number] | canvas[1, number] for canvas in (self.near, self.far))
            first, second = (self._snake(number, i) for i in range(2))
            yield Pair((first, second), near, far)

    def _snake(self, number: int, snake: int) -> Snake:
        places, ways = self.places[:, snake, number], self.ways[:, snake, number]
        tip = int(places[-1] + self.strokes.ends[ways[-1] - DEGREES])
        return Snake(int(places[0]), tip, list(zip(places.tolist(), ways.tolist(), strict=True)))

    def _seed(self) -> None:
        """The first strokes: one near the middle, the other at a distance from it."""
        rules, rng, strokes = self.strokes.rules, self.rng, self.strokes
        first = 2 * rules.seed_distance
        rows, columns = rng.integers(first, rules.size - first, (2, self.count))
        self.places[0, 0] = strokes.places(rows, columns)
        self.places[0, 1] = self.places[0, 0] + strokes.apart[rng.integers(DEGREES, size=self.count)]
        self.ways[0] = rng.integers(DEGREES, size=(2, self.count))
        self._take(0, 0)
        self.alive = self.alive[self._fits(1, self.places[0, 1, self.alive], self.ways[0, 1, self.alive])]
        self._take(0, 1)
        self.pivots[:] = self.places[0] + strokes.backs[self.ways[0]]

    def _extend(self, segment: int, snake: int) -> None:
        """Another stroke for this snake of each image that is alive."""
        strokes, alive = self.strokes, self.alive
        before = self.ways[segment - 1, snake, alive]
        pivot = self.pivots[snake, alive] + strokes.steps[before]
        ends = pivot[:, None] + strokes.ends
        weights = (strokes.weights[before] * ~self.far[snake][alive[:, None], ends]).cumsum(1)
        fits = np.zeros(len(alive), dtype=bool)
        ways = np.zeros_like(before)
        for _ in range(1 + REDRAWS):
            (todo,) = np.nonzero(~fits & (weights[:, -1] > LEAST_WEIGHT))
            drawn = self.rng.random(len(todo)) * weights[todo, -1]
            ways[todo] = DEGREES + (weights[todo] <= drawn[:, None]).sum(1)
            fits[todo] = self._fits(snake, pivot[todo], ways[todo], alive[todo])
        self._take(segment - 1, snake, own=True)
        self.alive = alive[fits]
        self.places[segment, snake, self.alive] = self.pivots[snake, self.alive] = pivot[fits]
        self.ways[segment, snake, self.alive] = ways[fits]
        self._take(segment, snake)

    def _fits(self, snake: int, places: np.ndarray, ways: np.ndarray, images: np.ndarray | None = None) -> np.ndarray:
        """Whether the strokes are clear of what this snake has to keep clear of."""
        images = self.alive if images is None else images
        return ~self.near[snake][images[:, None], places[:, None] + self.strokes.near[ways]].any(1)

    def _take(self, segment: int, snake: int, *, own: bool = False) -> None:
        """Draw a stroke of this snake on the other's canvas, or (`own`) on its own."""
        images = self.alive[:, None]
        place, way = self.places[segment, snake, self.alive][:, None], self.ways[segment, snake, self.alive]
        canvas = snake if own else 1 - snake
        self.near[canvas][images, place + self.strokes.near[way]] = True
        self.far[canvas][images, place + self.strokes.far[way]] = True


def short_snakes(strokes: Strokes, pair: Pair, segments: int, wanted: int, rng: np.random.Generator) -> Iterator[Snake]:
    """At most `wanted` snakes of `segments` strokes where the long ones have left room."""
    near, far = pair.near.copy(), pair.far.copy()
    for _ in range(wanted):
        for _ in range(1 + RETRIES):
            if (~near).sum() < LEAST_FREE * strokes.rules.size**2:
                return
            if snake := _short_snake(strokes, near, far, segments, rng):
                for place, way in snake.strokes:
                    near[place + strokes.near[way]] = True
                    far[place + strokes.far[way]] = True
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
        weights = (strokes.weights[way] * ~far[pivot + strokes.ends]).cumsum()
        if weights[-1] <= LEAST_WEIGHT:
            return None
        for _ in range(1 + REDRAWS):
            number = int(weights.searchsorted(rng.random() * weights[-1], side="right"))
            if not near[pivot + strokes.near[DEGREES + number]].any():
                break
        else:
            return None
        before, last = drawn[-1]
        near[before + strokes.near[last]] = True
        far[before + strokes.far[last]] = True
        way, tip = DEGREES + number, pivot + int(strokes.ends[number])
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
        fitting = some[~near[some[:, None] + strokes.near[way]].any(1)]
        if len(fitting):
            return int(fitting[0])
    return None
