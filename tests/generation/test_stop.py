"""Stop strings in a stream."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.generation.stream import StopStrings


def shown(stops, pieces):
    watch = StopStrings(stops)
    text = "".join([watch.push(piece) for piece in pieces] + [watch.finish()])
    return text, watch.stopped


def pieces_of(text, cuts):
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.text("ab", max_size=20),
    st.lists(st.integers(0, 20), max_size=8),
)
def test_the_text_ends_before_a_stop_string_wherever_the_pieces_are_cut(stops, text, cuts):
    pieces = pieces_of(text, cuts)
    got, stopped = shown(stops, pieces)
    if not any(stop in text for stop in stops):
        assert (got, stopped) == (text, None)
        return
    assert stopped in stops
    assert text.startswith(got + stopped)
    # nothing of a stop string that was complete when the last piece came is left
    assert not any(stop in got for stop in stops)


@given(st.text("ab", max_size=20))
def test_one_character_at_a_time_the_first_complete_one_wins(text):
    got, stopped = shown(["aab", "ba"], list(text))
    ends = {stop: text.find(stop) + len(stop) for stop in ("aab", "ba") if stop in text}
    assert stopped == (min(ends, key=lambda stop: ends[stop]) if ends else None)
    assert got == (text if stopped is None else text[: text.find(stopped)])


def test_nothing_of_a_stop_string_is_shown_early_and_the_rest_as_soon_as_it_can():
    watch = StopStrings(["###"])
    assert [watch.push(piece) for piece in ("one #", "# two", " #", "##", "more")] == ["one ", "## two", " ", "", ""]
    assert watch.stopped == "###"
    assert watch.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="a stop string must hold at least one character, got an empty one"):
        StopStrings(["a", ""])
