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


@pytest.fixture
def flags(original, texts, tmp_path):
    """The command of a conversion that takes a second."""

    def make(attention="llp", *more, model=original, out="out", option="segment=8"):
        sizes = {
            "batch.length": 32,
            "batch.size": 2,
            "match.steps": 6,
            "lora.steps": 6,
            "lora.rank": 2,
            "measure.windows": 4,
            "measure.contexts": "[8,64]",
            "measure.repeats": 2,
            "data.cache": tmp_path / "cache",
            "data.held_out": 0.2,
        }
        words = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)]
        chosen = [f"--options.{attention}.{option}"] if option else []
        return [
            "convert", str(model), "--attention", attention, "--data", str(texts), "--out", str(tmp_path / out),
            *chosen, *words, *more,
        ]  # fmt: skip

    return make
