"""What a pattern reports about ranges of positions, against its own predicate for every pair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.ops._torch import tiles
from subquad.ops._torch.tiles import ragged_groups, score_entries, static_groups, unmasked_entries
from subquad.ops.patterns import (
    Band,
    Blocks,
    Causal,
    Dilated,
    DilatedBand,
    Full,
    Globals,
    Pattern,
    Prefix,
    Random,
    Segments,
    Shifted,
    Sinks,
    SinkTokens,
    Strided,
    Suffix,
    Window,
)
from subquad.ops.patterns.sparse import Columns, Ranks
from tests.ops.cases import shared_patterns

SIZES = st.integers(1, 40)
UP_TO_2, UP_TO_3, UP_TO_9, UP_TO_20, UP_TO_40 = (st.integers(0, most) for most in (2, 3, 9, 20, 40))
KINDS = {
    "causal": st.builds(Causal),
    "full": st.builds(Full),
    "window": st.builds(Window, width=SIZES),
    "segments": st.builds(Segments, size=SIZES, back=UP_TO_3),
    "prefix": st.builds(Prefix, length=UP_TO_40),
    "suffix": st.builds(Suffix, start=UP_TO_40),
    "band": st.builds(Band, before=UP_TO_40, after=UP_TO_40),
    "shifted": st.builds(Shifted, size=st.integers(21, 40), shift=st.integers(1, 20), back=UP_TO_3),
    "blocks": st.builds(Blocks, size=SIZES, back=UP_TO_3, ahead_blocks=UP_TO_3),
    "sinks": st.builds(Sinks, count=UP_TO_20, back=UP_TO_20, size=st.integers(1, 9)),
    "sink tokens": st.builds(SinkTokens, count=UP_TO_20, back=UP_TO_3, size=st.integers(4, 9), offset=UP_TO_3),
    "globals": st.builds(Globals, count=UP_TO_20, back=UP_TO_20, ahead_blocks=UP_TO_9, size=SIZES),
    "random": st.builds(
        Random, size=st.integers(1, 9), index=st.integers(0, 1), of=st.integers(2, 3), skip=UP_TO_2, back=UP_TO_2,
        ahead_blocks=UP_TO_2, blocks=UP_TO_40, seed=UP_TO_9,
    ),
    "dilated": st.builds(Dilated, width=SIZES, dilation=st.integers(1, 5)),
    "dilated band": st.builds(DilatedBand, before=UP_TO_9, after=UP_TO_9, dilation=st.integers(1, 5)),
    "strided": st.builds(Strided, stride=SIZES),
    "columns": st.builds(Columns, size=st.integers(9, 40), last=st.integers(1, 9)),
    "ranks": st.builds(Ranks, size=st.integers(9, 40), last=st.integers(1, 9)),
}  # fmt: skip
DATA = st.data()


@pytest.fixture(params=KINDS, scope="module")
def patterns(request):
    """Each kind of pattern gets examples of its own."""
    return KINDS[request.param]


def table(pattern, q_start, q_stop, k_start, k_stop):
    return pattern.allowed(torch.arange(q_start, q_stop)[:, None], torch.arange(k_start, k_stop)[None])


@st.composite
def spans(draw, largest=60):
    start = draw(st.integers(0, largest))
    return start, draw(st.integers(start + 1, largest + 1))


BY_HAND = [
    (Causal(), "x..... xx.... xxx... xxxx.. xxxxx. xxxxxx"),
    (Full(), "xxxxxx xxxxxx xxxxxx xxxxxx xxxxxx xxxxxx"),
    (Window(width=2), "x..... xx.... .xx... ..xx.. ...xx. ....xx"),
    (Segments(size=2), "x..... xx.... xxx... xxxx.. ..xxx. ..xxxx"),
    (Segments(size=2, back=0), "x..... xx.... ..x... ..xx.. ....x. ....xx"),
    (Prefix(length=3), "xxx... xxx... xxx... xxxx.. xxxxx. xxxxxx"),
    (Suffix(start=4), "...... ...... ...... ...... xxxxx. xxxxxx"),
    (Band(before=1, after=2), "xxx... xxxx.. .xxxx. ..xxxx ...xxx ....xx"),
    (Shifted(size=3, shift=1), "x..... .x.... .xx... .xxx.. ....x. ....xx"),
    (Blocks(size=2, back=1), "xx.... xx.... xxxx.. xxxx.. ..xxxx ..xxxx"),
    (Sinks(count=2, back=2), "...... ...... ...... x..... xx.... xx...."),
    (Sinks(count=1, back=1, size=2), "...... ...... ...... ...... xx.... xx...."),
    (SinkTokens(count=3, back=0, size=2), "...... ...... xx.... xx.... xxx... xxx..."),
    (SinkTokens(count=2, back=1, size=3, offset=2), "...... ...... ...... ...... x..... x....."),
    (Globals(count=3, back=1, ahead_blocks=0), ".xx... ..x... x..... xx.... xxx... xxx..."),
    (Dilated(width=2, dilation=2), "x..... .x.... x.x... .x.x.. ..x.x. ...x.x"),
    (DilatedBand(before=0, after=1, dilation=3), "x..x.. .x..x. ..x..x ...x.. ....x. .....x"),
    (Strided(stride=3), "x..... .x.... ..x... x..x.. .x..x. ..x..x"),
    (Columns(size=3, last=1), "...... ...... ..x... ..x... ..x... ..x..x"),
    (Ranks(size=3, last=1), "...... ...... x..... x..... x..... xx...."),
]


@pytest.mark.parametrize(("pattern", "expected"), BY_HAND, ids=repr)
def test_allowed_by_hand(pattern, expected):
    rows = table(pattern, 0, 6, 0, 6).int().tolist()
    assert ["".join(".x"[cell] for cell in row) for row in rows] == expected.split()


def test_every_pattern_is_tested_here():
    assert {kind.__name__.lower() for kind in shared_patterns()} == {name.replace(" ", "") for name in KINDS}


@settings(max_examples=25)
@given(data=DATA, span=spans(), keys=spans())
def test_reports_about_a_span_are_true(patterns, data, span, keys):
    pattern = data.draw(patterns)
    allowed = table(pattern, *span, 0, 110)
    lo, hi = pattern.key_range(*span)
    assert not allowed[:, :lo].any()
    assert hi is None or not allowed[:, hi:].any()
    distance = torch.arange(*span)[:, None] - torch.arange(110)
    assert not (pattern.causal and allowed[distance < 0].any())
    assert pattern.reach is None or not allowed[distance > pattern.reach].any()
    assert pattern.ahead is None or not allowed[distance < -pattern.ahead].any()
    assert not pattern.sees_all(*span, *keys) or allowed[:, keys[0] : keys[1]].all()
    own = allowed[:, span[0] : span[1]]
    assert not pattern.is_triangle(*span) or torch.equal(own, torch.ones_like(own).tril())
    starts = pattern.tile_starts(*span)
    assert starts[0] == span[0]
    assert starts == sorted(set(starts))
    assert all(start < span[1] for start in starts)


@settings(max_examples=25)
@given(data=DATA, span=spans(), periods=st.integers(1, 5))
def test_moving_by_a_period_changes_nothing_but_at_the_first_keys(patterns, data, span, periods):
    pattern = data.draw(patterns)
    if pattern.reach is None:
        return  # tiles of these are not folded
    start, stop = span[0] + pattern.reach + 1, span[1] + pattern.reach + 1
    moved = periods * pattern.period
    assert torch.equal(
        table(pattern, start, stop, start - pattern.reach, stop),
        table(pattern, start + moved, stop + moved, start - pattern.reach + moved, stop + moved),
    )


def masks_of(groups, truth):
    """Yield each group's mask; together the groups hold every query once and every key that it sees."""
    held = []
    for group in groups:
        first = None
        for n in range(group.count):
            q, k = group.q + n * group.rows, group.places[n] if group.places else group.k + n * group.rows
            held += range(q, q + group.rows)
            block = truth[q : q + group.rows, k : k + group.keys] if group.keys else truth[q : q + group.rows, :0]
            assert block.sum() == truth[q : q + group.rows].sum(), "a key that a query sees lies outside the tile"
            assert block.shape == (group.rows, group.keys), "the tile reaches past the slots"
            first = block if first is None else first
            yield group, first, block
    assert held == list(range(len(truth)))


@settings(max_examples=25)
@given(
    data=DATA,
    q_start=st.integers(0, 50),
    queries=st.integers(1, 150),
    before=st.integers(-20, 60),
    after=st.integers(-20, 20),
    rows=st.sampled_from([4, 16, 256]),
)
def test_static_groups_hold_every_query_once_and_every_key_it_sees(
    patterns, data, q_start, queries, before, after, rows
):
    pattern = data.draw(patterns)
    k_start = q_start - before
    keys = max(1, queries + before + after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MASKED_ROWS", rows)
        groups = static_groups.__wrapped__(pattern, q_start, queries, k_start, keys)
    truth = table(pattern, q_start, q_start + queries, k_start, k_start + keys)
    for group, first, block in masks_of(groups, truth & (torch.arange(k_start, k_start + keys) >= 0)):
        assert torch.equal(block, first), "folded tiles have different masks"
        assert group.kind != "empty" or not first.any()
        assert group.kind != "full" or first.all()
        assert group.kind != "causal" or torch.equal(first, torch.ones_like(first).tril())


@settings(max_examples=25)
@given(data=DATA, queries=st.integers(1, 150), old=st.integers(0, 60), start=st.integers(-60, 60))
def test_ragged_groups_hold_every_query_once_and_every_key_it_sees_wherever_rows_start(
    patterns, data, queries, old, start
):
    pattern = data.draw(patterns)
    position = torch.arange(queries + old) + start
    truth = pattern.allowed(position[old:, None], position[None]) & (position >= 0) & (position[old:, None] >= 0)
    assert list(masks_of(ragged_groups(pattern, queries, queries + old), truth))


@pytest.mark.parametrize(("pattern", "tokens", "groups"), [
    (Segments(size=16), 1600, 2), (Window(width=64), 6400, 2),  # the first tile, then all others
    (Sinks(count=1, back=4095), 8192, 2), (Globals(count=1, back=2048, ahead_blocks=2047), 8192, 18),
])  # fmt: skip
def test_long_sequences_have_few_groups(pattern, tokens, groups):
    assert len(static_groups(pattern, 0, tokens, 0, tokens)) == groups


@given(data=DATA)
@settings(max_examples=10)
def test_a_key_names_its_pattern(patterns, data):
    pattern = data.draw(patterns)
    again = Pattern.from_key(pattern.key())
    assert (again, hash(again), type(again)) == (pattern, hash(pattern), type(pattern))
    assert again.key() == pattern.key() == repr(pattern)


@pytest.mark.parametrize("key", ["Windo(width=3)", "", "window(width=3)"])
def test_an_unknown_key_is_answered_with_the_patterns(key):
    with pytest.raises(ValueError, match=r"unknown pattern .*valid: Band, Blocks, Causal, .*, Suffix, Window"):
        Pattern.from_key(key)


@pytest.mark.parametrize("value", [3.0, "3", None, True, torch.tensor(3)])
def test_a_field_that_is_no_int_is_refused(value):
    with pytest.raises(TypeError, match=r"Window\.width must be an int, got "):
        Window(width=value)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Window(width=0), r"Window\.width must be at least 1, got 0"),
    (lambda: Segments(size=4, back=-1), r"Segments\.back must be at least 0, got -1"),
    (lambda: Shifted(size=4, shift=4), r"Shifted\.shift must be below its size 4, got 4"),
    (lambda: SinkTokens(count=2, back=1, size=3, offset=3), r"SinkTokens\.offset must be below its size 3, got 3"),
    (lambda: Columns(size=4, last=5), r"Columns\.last must be at most its size 4, got 5"),
])  # fmt: skip
def test_fields_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pattern_must_define_allowed():
    with pytest.raises(NotImplementedError, match=r"Pattern must define allowed \(Pattern is abstract\)"):
        Pattern().allowed(torch.zeros(1), torch.zeros(1))
    assert not Pattern().sees_all(0, 1, 0, 1)
    assert not Pattern().is_triangle(0, 1)


def test_random_blocks_are_disjoint_and_keep_their_distance():
    for blocks in (0, 30):
        drawn = [Random(size=2, index=i, of=3, skip=1, back=1, ahead_blocks=1, blocks=blocks, seed=5) for i in range(3)]
        tables = torch.stack([table(pattern, 0, 60, 0, 60) for pattern in drawn])
        assert (tables.sum(0) <= 1).all(), "two patterns drew one block"
        allowed = tables.any(0)
        assert not allowed[:, :2].any(), "the first block is skipped"
        distance = torch.arange(60) // 2 - torch.arange(60)[:, None] // 2
        assert not allowed[distance.abs() <= 1].any(), "neighbours are skipped"
        assert allowed[distance > 0].any() == (blocks > 0)
        assert (tables.sum(-1) == 2).all() or blocks == 0, "every query has its three blocks"
        assert (tables[:, 20:].sum(-1) == 2).all()


def test_random_blocks_of_a_long_sequence_are_gathered_into_one_group():
    groups = static_groups(Random(size=8, index=0, of=1, skip=1, back=1), 0, 8 * 100, 0, 8 * 100)
    assert [g.count for g in groups if g.kind == "full"] == [97]


def test_draws_are_random():
    def draws(seed, index=0):
        pattern = Random(size=1, index=index, of=2, skip=0, back=0, blocks=201, seed=seed)
        return pattern.chosen(torch.arange(101, 201))

    for other in (draws(1), draws(2), draws(0, 1) - 50):
        assert len((draws(0) - other).unique()) > 20, "other seeds and numbers are not shifts of these"
    steps = draws(0).diff()
    assert len(steps.unique()) > 40, "a draw is no step from the one before"
    assert len(draws(0).unique()) > 25


@settings(max_examples=25)
@given(data=DATA, block=st.integers(0, 60))
def test_draws_in_whole_numbers_are_those_in_tensors(data, block):
    pattern = data.draw(KINDS["random"])
    assert pattern.chosen_by(block) == int(pattern.chosen(torch.tensor([block])))


def test_a_random_pattern_is_causal_without_a_number_of_blocks():
    shape = {"size": 2, "index": 0, "of": 1, "skip": 0, "back": 0}
    assert Random(**shape).causal
    assert not Random(**shape, blocks=9).causal


@settings(max_examples=25)
@given(data=DATA, tokens=st.integers(0, 100))
def test_entries_are_counted_as_they_are(patterns, data, tokens):
    pattern = data.draw(patterns)
    allowed = table(pattern, 0, tokens, 0, tokens)
    assert unmasked_entries(pattern, tokens) == allowed.sum()
    assert score_entries(pattern, tokens) >= allowed.sum()
