"""The times of guessed texts: both ways are the same text, and the seconds are those of the clock."""

import itertools

import pytest

from benchmarks import drafts
from tests.generation.models import make, numbers


def test_the_ratio_is_that_of_the_seconds(monkeypatch):
    clock = itertools.accumulate([0, 4, 0, 1, 0, 3, 0, 4])  # 4 and 4 seconds without guesses, 1 and 3 with them
    monkeypatch.setattr("time.process_time", lambda: next(clock))
    found = drafts.compare(make("gated_delta_net"), numbers(9) * 2, 12)
    assert found.ratio == 2
    assert 0 <= found.right < found.made


def test_texts_that_differ_are_refused(monkeypatch):
    texts = itertools.count()

    class Other:
        guesses = (0, 1)

        def __init__(self, *arguments, **options):
            self.text = [next(texts)]

        def prefill(self):
            pass

        def __iter__(self):
            return iter(self.text)

    monkeypatch.setattr(drafts, "generate", Other)
    with pytest.raises(ValueError, match="the texts with and without guesses differ"):
        drafts.compare(make("linear"), [1], 4)
