"""A tiny model with full attention, and a text."""

import pytest

from tests.adaptation.models import WORDS, save


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    return save(tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Sixty texts, of which some are held out."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(60):
        words = [WORDS[(number * 7 + place * (1 + number % 3)) % len(WORDS)] for place in range(30)]
        (folder / f"{number:02}.txt").write_text(" ".join(words))
    return folder
