import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.sources import cut, hold_out

KEYS = [f"{i}.txt".encode() for i in range(1000)]


def test_the_split_is_the_same_on_every_machine():
    assert [i for i, out in enumerate(hold_out(KEYS[:100], 0.05)) if out] == [1, 24, 25, 36, 48, 67, 93, 96]


def test_the_fraction_is_about_kept():
    assert 0.08 < sum(hold_out(KEYS, 0.1)) / 1000 < 0.12


def test_other_documents_do_not_move_one():
    whole = dict(zip(KEYS, hold_out(KEYS, 0.1), strict=True))
    half = dict(zip(KEYS[::-2], hold_out(KEYS[::-2], 0.1), strict=True))
    assert half.items() <= whole.items()


def test_another_seed_holds_out_others():
    assert hold_out(KEYS, 0.1, 1) != hold_out(KEYS, 0.1)


@given(st.lists(st.binary(), min_size=2, unique=True), st.floats(0.001, 0.999))
def test_each_side_has_a_document(keys, fraction):
    assert set(hold_out(keys, fraction)) == {False, True}


def test_one_document_cannot_be_split_by_document():
    with pytest.raises(ValueError, match="a split by document needs at least two documents, got 1"):
        hold_out([b"a"], 0.5)


def test_a_single_text_is_cut_where_its_last_part_begins():
    assert cut(b"0123456789", 0.1) == 9
    assert cut(b"0123456789", 0.25) == 7


@given(st.text(min_size=4), st.floats(0.01, 0.99))
def test_a_cut_never_falls_inside_a_character(text, fraction):
    data = text.encode()
    try:
        place = cut(data, fraction)
    except ValueError:
        return
    assert data[:place].decode() + data[place:].decode() == text
    assert 0 <= place - int(len(data) * (1 - fraction)) <= 3


@pytest.mark.parametrize("text", [b"a", "漢".encode(), b"ab"])
def test_a_text_that_is_too_short_to_cut(text):
    with pytest.raises(ValueError, match=rf"a document of {len(text)} bytes is too short to hold out 0\.9 of it"):
        cut(text, 0.9)
