"""benchmarks/scale.py, without what it measures."""

import pytest

from benchmarks.scale import make_decoder, sent_by_layer


@pytest.mark.parametrize("name", ["full", "window", "llp", "linear"])
def test_the_rank_that_sends_most_is_among_those_counted(name):
    (block,) = make_decoder(name, 1).blocks()
    for ranks in (1, 2, 4, 8, 16, 32):
        each = block.attention.communication(4096 * ranks, ranks)
        assert sent_by_layer(name, 4096 * ranks, ranks) == max(2 * sent.forward + sent.backward for sent in each)
