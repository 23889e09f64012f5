"""Pathfinder: the labels from the geometry, nothing meets, the classes in balance, the pixels of all sizes."""

import math

import numpy as np
import pytest

from subquad.data.lra._strokes import DEGREES, RULES
from subquad.data.lra.pathfinder import SEGMENTS, draw, make_block

FALSE_ALARM = 1e-6


@pytest.fixture(scope="module")
def drawn():
    """Images of each kind that is quick to make."""
    rng = np.random.default_rng(0)
    counts = {(32, "hard"): 60, (32, "easy"): 60, (64, "easy"): 30, (128, "easy"): 30}
    return {kind: draw(*kind, count, rng) for kind, count in counts.items()}


def line(drawing, snake) -> np.ndarray:
    """The corners of a snake, `[strokes + 1, 2]`: its tail and the far end of each stroke."""
    strokes, places = drawing.strokes, [snake.origin]
    for place, way in snake.strokes:
        places.append(place + int(strokes.reaches[way] if way < DEGREES else strokes.ends[way - DEGREES]))
    assert places[-1] == snake.tip
    return np.array([divmod(place, strokes.stride) for place in places]) - strokes.rim


def crossings(first: np.ndarray, second: np.ndarray) -> int:
    """How often two chains of lines cross."""

    def side(a, b, c):
        return (b[..., 0] - a[..., 0]) * (c[..., 1] - a[..., 1]) - (b[..., 1] - a[..., 1]) * (c[..., 0] - a[..., 0])

    a, b, c, d = first[:-1, None], first[1:, None], second[None, :-1], second[None, 1:]
    return int(((side(a, b, c) * side(a, b, d) < 0) & (side(c, d, a) * side(c, d, b) < 0)).sum())


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
    for (size, difficulty), drawings in drawn.items():
        for drawing in drawings:
            lines = [line(drawing, snake) for snake in drawing.targets]
            start, end = (
                np.array(divmod(disc, drawing.strokes.stride)) - drawing.strokes.rim for disc in drawing.discs
            )
            starts = [(corners[0] == start).all() for corners in lines]
            ends = [(corners[-1] == end).all() for corners in lines]
            assert sum(starts) == sum(ends) == 1
            assert (starts == ends) == bool(drawing.label)
            assert len(drawing.targets[0].strokes) == len(drawing.targets[1].strokes) == SEGMENTS[difficulty]
            assert {len(snake.strokes) for snake in drawing.distractors} <= {SEGMENTS[difficulty] // 3}
            assert len(drawing.distractors) <= RULES[size].distractor_factor // (SEGMENTS[difficulty] // 3)


def test_no_line_crosses_another_or_itself(drawn):
    for drawings in drawn.values():
        for drawing in drawings:
            lines = [line(drawing, snake) for snake in (*drawing.targets, *drawing.distractors)]
            assert sum(crossings(a, b) for a in lines for b in lines) == 0


def test_the_pixels_alone_show_the_label_where_snakes_keep_apart(drawn):
    """A walk over the picture of the two long snakes, with steps just above the gaps between strokes."""
    agree = total = 0
    for drawing in drawn[128, "easy"]:
        image = drawing.image(distractors=False, discs=False)
        start, end = (np.array(divmod(disc, drawing.strokes.stride)) - drawing.strokes.rim for disc in drawing.discs)
        found = joined(image, start, end, 2 * drawing.strokes.margin + 1)
        agree += found == bool(drawing.label)
        total += 1
        if drawing.label:
            assert found  # whoever walks along a snake arrives
    assert agree > total / 2


def test_turns_and_steps_are_those_of_the_rules(drawn):
    for drawings in drawn.values():
        for drawing in drawings:
            rules, margin = drawing.strokes.rules, drawing.strokes.margin
            for snake in (*drawing.targets, *drawing.distractors):
                ways = drawing.strokes.ways[[way for _, way in snake.strokes]]
                turns = np.arccos((ways[1:] * ways[:-1]).sum(1).clip(-1, 1))
                assert (turns * rules.continuity <= np.pi / 2 + 1e-9).all()
                steps = np.linalg.norm(np.diff(line(drawing, snake)[1:], axis=0), axis=1)
                rounded = 3 * math.sqrt(0.5)  # the pivot before, the pivot after and the end are whole pixels
                assert (abs(steps - rules.length - 2 * margin) <= rounded + 2 * margin).all()
            tails = [line(drawing, snake)[0] for snake in drawing.targets]
            assert abs(np.linalg.norm(tails[0] - tails[1]) - rules.seed_distance) <= math.sqrt(0.5)
            assert 2 * rules.seed_distance <= tails[0].min()
            assert tails[0].max() < rules.size - 2 * rules.seed_distance


def test_images_have_bright_discs_a_dark_ground_and_grey_strokes(drawn):
    for (size, _), drawings in drawn.items():
        for drawing in drawings:
            image = drawing.image()
            assert image.shape == (size, size)
            assert image.dtype == np.uint8
            for disc in drawing.discs:
                row, column = np.array(divmod(disc, drawing.strokes.stride)) - drawing.strokes.rim
                assert image[row, column] > 250
            assert 0.3 < (image == 0).mean() < 0.99
            without = drawing.image(distractors=False)
            assert (without <= image).all()
            assert bool((without < image).any()) == bool(drawing.distractors)


def test_the_classes_are_in_balance():
    labels = np.concatenate([make_block({"size": 32, "difficulty": "easy"}, 0, number).labels for number in range(2)])
    allowed = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * len(labels)))
    assert abs(labels.mean() - 0.5) < allowed


def test_a_block_depends_on_its_seed_and_number_alone():
    options = {"size": 32, "difficulty": "easy"}
    first, again = make_block(options, 1, 2), make_block(options, 1, 2)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert (first.tokens != make_block(options, 1, 3).tokens).any()
    assert (first.tokens != make_block(options, 2, 2).tokens).any()
    assert set(first.lengths) == {1024}
