"""What experiments measure with code of their own: which tokens are scored, and when a training ends."""

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.harness.claims import judged, read_expected
from experiments.harness.noise import FAILS, HOLDS, UNRESOLVED
from experiments.harness.units import code
from subquad.models import Decoder, DecoderConfig
from subquad.testing import assert_same_maths

HOME = Path(__file__).resolve().parents[2] / "experiments"
LENGTHS, RECALL, LEAK = (code(HOME / name) for name in ("length_extrapolation", "recall", "llp_leak"))


def test_every_document_has_a_cipher_of_its_own(tmp_path):
    (tmp_path / "a.txt").write_text("The cat.\nTHE CAT?\n" * 40)
    found_NT = LENGTHS.ciphered(str(tmp_path), 17, 3, 0)  # the question mark is left out
    assert found_NT.shape == (3, 17)
    assert set(found_NT.ravel()) <= set(LENGTHS.SYMBOLS)
    patterns = [[list(tokens_T).index(token) for token in tokens_T] for tokens_T in found_NT]
    again = LENGTHS.ciphered(str(tmp_path), 17, 3, 0)
    assert np.array_equal(found_NT, again)
    assert not np.array_equal(found_NT[0], found_NT[1])
    text = "the cat.\nthe cat\n"
    assert patterns[0] == [text.index(letter) for letter in text]


@pytest.mark.parametrize("length", [4, 8, 16, 32])
def test_the_same_tokens_are_scored_with_any_context(length, monkeypatch):
    read = []

    def places(model, tokens_T, windows):
        """Return the place of each predicted token."""
        read.extend(windows)
        return np.stack([np.arange(window.start + 1, window.stop + 1) for window in windows])

    monkeypatch.setattr(LENGTHS, "losses", places)
    assert LENGTHS.nats(None, np.zeros((2, 33)), length, 8).tolist() == [list(range(25, 33))] * 2
    assert {window.stop - window.start for window in read} == {length}


@pytest.mark.parametrize(
    ("looks", "still"),
    [
        ([], False),
        ([0.125] * 9, False),  # at chance there is no plateau
        ([0.3, 0.3, 0.3, 0.305, 0.31, 0.305], True),
        ([0.3, 0.3, 0.3, 0.32, 0.31, 0.32], False),
        ([0.3, 0.999], True),
    ],
)
def test_a_training_of_recall_ends_when_its_accuracy_stands_still(looks, still):
    assert RECALL.stands_still(looks, 0.125) is still


def test_the_leak_is_shown_and_decoded_on_the_same_bytes():
    torch.manual_seed(0)
    options = {"llp": {"segment": 4}}
    model = Decoder(DecoderConfig(vocab_size=16, dim=8, num_layers=1, num_heads=2, attention="llp", options=options))
    text_BT = torch.randint(16, (3, 13))
    model.double()
    decoded_B, shown_B = (torch.from_numpy(of(model, text_BT)) for of in (LEAK.decoded_loss, LEAK.shown_loss))
    assert_same_maths(decoded_B, shown_B)
    LEAK.unmask(model)
    decoded_B, leaked_B = (torch.from_numpy(of(model, text_BT)) for of in (LEAK.decoded_loss, LEAK.shown_loss))
    with pytest.raises(AssertionError, match="not close"):
        assert_same_maths(decoded_B, leaked_B)


@pytest.mark.parametrize(
    ("claim", "times", "verdict"),
    [
        ("constant_is_flat", {"latte": [1.0, 1.01, 0.99], "linear": [1.0, 1.02, 0.98]}, HOLDS),
        ("constant_is_flat", {"latte": [1.2, 1.21, 1.19], "linear": [1.0, 1.02, 0.98]}, FAILS),
        ("constant_is_flat", {"latte": [1.0, 1.3, 0.8], "linear": [1.0, 1.2, 0.8]}, UNRESOLVED),
        ("constant_is_flat", {"latte": [1.0], "linear": [1.0]}, UNRESOLVED),
        ("full_grows", {"full": [8.0, 8.5, 8.2], "bigbird": [1.0, 1.1, 0.9]}, HOLDS),
        ("full_grows", {"full": [1.3, 1.35, 1.32], "bigbird": [9.0, 9.1, 9.2]}, FAILS),
        ("recurrent_faster", {"full": [4.0, 4.1, 4.2], "latte": [1.0, 1.01, 1.02], "linear": [1.0, 1.02, 0.98]}, HOLDS),
        ("recurrent_faster", {"full": [4.0, 4.1, 4.2], "latte": [8.0, 8.2, 8.3], "linear": [1.0, 1.1, 1.2]}, FAILS),
    ],
)
def test_claims_about_decoding_are_judged_by_the_spread_between_runs(claim, times, verdict):
    """Each run has 1 ms after the shortest context and `times` after the longest."""
    rows = [
        {"arm": "a", "seed": seed, "mechanism": name, "context": context, "ms": ms, "of_shortest": ms}
        for name, taken in times.items()
        for seed, last in enumerate(taken)
        for context, ms in ((1024, 1.0), (65536, last))
    ]
    claims = {one.id: one for one in read_expected(HOME / "decode").claims}
    assert judged(HOME / "decode", claims[claim], rows, "cpu").verdict == verdict
