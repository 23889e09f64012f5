"""Pathfinder: the labels from the geometry, which strokes may meet, balanced classes, the pixels of all sizes."""

import itertools
import math

import numpy as np
import pytest

from subquad.data.lra.pathfinder import SEGMENTS, draw
from subquad.data.lra.strokes import DEGREES, MEETS, PADDING, RULES, TAKEN


@pytest.fixture(scope="module")
def drawn():
    """Images of each kind that is quick to make."""
    rng, counts = np.random.default_rng(0), {(32, "hard"): 20, (32, "easy"): 20, (64, "easy"): 10, (128, "easy"): 10}
    return {kind: draw(*kind, count, rng) for kind, count in counts.items()}


def points(drawing, places) -> np.ndarray:
    """The rows and columns of places on the canvas."""
    return np.stack(np.divmod(np.asarray(places), drawing.strokes.stride), -1) - drawing.strokes.rim


def line(drawing, snake) -> np.ndarray:
    """The corners of a snake, `[strokes + 1, 2]`: its tail and the far end of each stroke."""
    strokes, places = drawing.strokes, [snake.origin]
    for place, way in snake.strokes:
        places.append(place + int(strokes.reaches[way] if way < DEGREES else strokes.ends[way - DEGREES]))
    assert places[-1] == snake.tip
    return points(drawing, places)


def joined(image: np.ndarray, start: np.ndarray, end: np.ndarray, gap: float) -> bool:
    """Whether a walk over bright pixels, in steps of at most `gap`, leads from one place to the other."""
    bright = np.argwhere(image > 0).astype(float)
    reached = np.linalg.norm(bright - start, axis=1) <= gap
    edge = reached.copy()
    while edge.any():
        near = (np.linalg.norm(bright[:, None] - bright[edge][None], axis=-1) <= gap).any(1)
        edge = near & ~reached
        reached |= near
    return bool((np.linalg.norm(bright[reached] - end, axis=1) <= gap).any())


def test_the_label_says_whether_one_line_has_both_discs(drawn):
    for (size, difficulty), some in drawn.items():
        for drawing in some:
            lines = [line(drawing, snake) for snake in drawing.targets]
            start, end = points(drawing, drawing.discs)
            starts = [(corners[0] == start).all() for corners in lines]
            ends = [(corners[-1] == end).all() for corners in lines]
            assert sum(starts) == 1
            assert ends[starts.index(True) if drawing.label else starts.index(False)]
            tips = {snake.tip for snake in drawing.targets}
            assert sum(ends) == 3 - len(tips)  # at 32 pixels one image in 250 has both far ends in one place
            assert [len(snake.strokes) for snake in drawing.targets] == [SEGMENTS[difficulty]] * 2
            assert {len(snake.strokes) for snake in drawing.distractors} <= {SEGMENTS[difficulty] // 3}
            assert len(drawing.distractors) <= RULES[size].distractor_factor // (SEGMENTS[difficulty] // 3)


def test_a_stroke_meets_none_that_is_in_its_way(drawn):
    """Each stroke in the order in which they grew, against all that its rule says, drawn from the beginning."""

    def covered(drawing, strokes) -> np.ndarray:
        """How much of each pixel these strokes and their surroundings cover, and the border."""
        canvas, near = drawing.strokes.blank().astype(int), drawing.strokes.near
        for place, way in strokes:
            np.maximum.at(canvas, place + near.pixels[way], near.levels[way])
        return canvas

    for drawing in (drawing for some in drawn.values() for drawing in some[:8]):
        near = drawing.strokes.near
        first, second = (snake.strokes for snake in drawing.targets)
        grown = [(first[n], first[: n - 1] + second[: n - 1]) for n in range(1, len(first))]
        grown += [(second[n], first[:n] + second[: n - 1]) for n in range(1, len(first))]
        before = first[:-1] + second
        for snake in drawing.distractors:
            place, way = snake.strokes[0]
            inner = near.pixels[way][near.levels[way] == 255]
            assert covered(drawing, before)[place + inner].max() <= TAKEN
            grown += [(snake.strokes[n], before + snake.strokes[: n - 1]) for n in range(1, len(snake.strokes))]
            before = before + snake.strokes
        for stroke, others in grown:
            own = covered(drawing, [stroke]) - drawing.strokes.blank()
            assert (own + covered(drawing, others)).max(where=own > 0, initial=0) < MEETS


def test_turns_steps_and_starts_are_those_of_the_rules(drawn):
    for drawing in itertools.chain(*drawn.values()):
        strokes, (rules, margin) = drawing.strokes, (drawing.strokes.rules, drawing.strokes.margin)
        for snake in (*drawing.targets, *drawing.distractors):
            ways = strokes.ways[[way for _, way in snake.strokes]]
            turns = np.arccos((ways[1:] * ways[:-1]).sum(1).clip(-1, 1))
            assert (turns * rules.continuity <= np.pi / 2 + 1e-9).all()
            steps = np.linalg.norm(np.diff(line(drawing, snake)[1:], axis=0), axis=1)
            rounded = 3 * math.sqrt(0.5)  # the pivot before, the pivot after and the end are whole pixels
            assert (abs(steps - rules.length - 2 * margin) <= rounded + 2 * margin).all()
        tails = points(drawing, [snake.origin for snake in drawing.targets])
        assert abs(np.linalg.norm(tails[0] - tails[1]) - rules.seed_distance) <= math.sqrt(0.5)
        place, way = drawing.targets[0].strokes[0]
        whole = points(drawing, place + strokes.near.pixels[way][strokes.near.levels[way] == 255])
        for inside in (whole, tails[0]):  # the first stroke lies in the middle
            assert 2 * rules.seed_distance <= inside.min()
            assert inside.max() < rules.size - 2 * rules.seed_distance


def test_the_pixels_alone_show_the_label_if_snakes_keep_apart(drawn):
    """A walk over the picture of the two long snakes, with steps just above the gaps between strokes."""
    agree = []
    for drawing in drawn[128, "easy"]:
        image = drawing._replace(distractors=(), discs=()).image()
        found = joined(image, *points(drawing, drawing.discs), 2 * drawing.strokes.margin + 1)
        assert found or not drawing.label, "whoever walks along a snake arrives"
        agree.append(found == bool(drawing.label))
    assert np.mean(agree) > 0.5


def test_images_have_bright_discs_a_dark_ground_and_grey_strokes(drawn):
    for (size, _), some in drawn.items():
        for drawing in some:
            image, without = drawing.image(), drawing._replace(distractors=()).image()
            assert (image.shape, image.dtype) == ((size, size), np.uint8)
            discs = tuple(points(drawing, drawing.discs).T)
            assert (image[discs] > 240).all()
            assert image.max() == 255
            assert 0.3 < (image == 0).mean() < 0.99
            # At 32 pixels short snakes may be too bright for an image: then all of it is scaled, and rounded again.
            scaled = without * (image[discs][1] / without[discs][1])
            assert (scaled <= image + (2.0 if size == 32 else 0.0)).all()
            assert bool((without < image).any()) == bool(drawing.distractors)


def test_short_snakes_are_as_bright_as_the_rules_say(drawn):
    """At 32 pixels they are 2 / 1.5 times as bright as the long ones; elsewhere all are 0.8 or 0.9 of a disc."""
    for (size, _), some in drawn.items():
        rules = RULES[size]
        short = max(drawing._replace(targets=(), discs=()).image().max() for drawing in some)
        long = max(drawing._replace(distractors=(), discs=()).image().max() for drawing in some)
        assert abs(short / long - min(255 / long, rules.short_contrast / rules.contrast)) <= 1 / long


def test_strokes_are_as_thick_as_the_rules_say_and_free_up_to_the_border(drawn):
    for (size, _), some in drawn.items():
        strokes, rules = some[0].strokes, RULES[size]
        covered = np.mean([cover.levels.sum() / 255 / rules.contrast for cover in strokes.drawn])
        assert rules.thickness * rules.length <= covered <= rules.thickness * (rules.length + 1)
        free = strokes.crop(strokes.blank()) == 0
        assert free.sum() == free[PADDING:-PADDING, PADDING:-PADDING].size


def test_the_classes_are_in_balance():
    labels = [drawing.label for drawing in draw(32, "easy", 600, np.random.default_rng(1))]
    allowed = math.sqrt(math.log(2 / 1e-6) / (2 * len(labels)))  # exceeded with a probability of 1e-6 (Hoeffding)
    assert abs(np.mean(labels) - 0.5) < allowed
