"""Documents packed into windows: nothing is lost, nothing is predicted twice, little is padding."""

from itertools import pairwise
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data import packing
from subquad.data.packing import pack


def offsets(lengths):
    return np.cumsum([0, *lengths])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(2, 20), st.integers(1, 5))
def test_nothing_is_lost_and_nothing_is_predicted_twice(lengths, length, open_windows):
    documents = offsets(lengths)
    with mock.patch.object(packing, "OPEN_WINDOWS", open_windows):
        found = pack(documents, length)
    for first, last in pairwise(found.firsts):
        assert first < last, "no window is empty"
        assert (found.stops[first:last] - found.starts[first:last]).sum() <= length
        assert (np.diff(found.starts[first:last]) > 0).all(), "in order of their tokens"
    spans = list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))
    firsts = {start for start, stop in pairwise(documents) if stop > start}
    assert {token for start, stop in spans for token in range(start, stop)} == set(range(documents[-1]))
    short = {(start, stop) for start, stop in pairwise(documents.tolist()) if 0 < stop - start <= length}
    assert short <= set(spans), "short documents stay whole"
    predicted = sorted(token for start, stop in spans for token in range(start + 1, stop))
    assert predicted == [token for token in range(documents[-1]) if token not in firsts]


def test_neighbours_fill_windows_and_little_is_padding():
    found = pack(offsets([5, 3, 9, 2, 8]), 8)
    spans = list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))
    windows = [spans[first:last] for first, last in pairwise(found.firsts)]
    assert windows == [[(0, 5), (5, 8)], [(8, 16)], [(15, 17), (17, 19)], [(19, 27)]]
    lengths = np.exp(np.random.default_rng(0).normal(5, 1, 2000)).astype(int) + 1
    found = pack(offsets(lengths), 512)
    assert (found.stops - found.starts).sum() > 0.98 * 512 * (len(found.firsts) - 1)
