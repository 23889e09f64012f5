"""n-grams against fractions worked out by hand and against dictionaries; compressors against themselves."""

import bz2
import gzip
import importlib.util
import json
import lzma
import math
import sys
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.testing import assert_same_maths
from subquad.training import baselines
from subquad.training.baselines import BZIP2_BLOCK, bits_after, gzip_bits, measure_baselines, ngram_bits, xz_compress

BY_HAND = {
    # "abab": a and b twice each, so c = 4 and n = 2.
    1: (Fraction(257, 768), Fraction(1, 768)),  # a: (2 + 2/256) / 6; c: (0 + 2/256) / 6
    # a is followed by b twice, b by a once.
    2: (Fraction(1025, 1536), Fraction(1, 2304)),  # a after b: (1 + 257/768) / 2; c after a: (0 + 1/768) / 3
    # "aba" and "bab".
    3: (Fraction(2561, 3072), Fraction(1, 4608)),  # a after ab: (1 + 1025/1536) / 2; c after ba: (0 + 1/2304) / 2
    # "abab": nothing was seen after bab, so a is as after ab.
    4: (Fraction(2561, 3072), Fraction(1, 9216)),  # c after aba: (0 + 1/4608) / 2
    # There are no runs of five bytes, and before a there are only four.
    5: (Fraction(2561, 3072), Fraction(1, 9216)),
    6: (Fraction(2561, 3072), Fraction(1, 9216)),
}
"""Order: the probabilities of the two bytes of "ac" after "abab"."""


def close(actual, expected):
    assert_same_maths(torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


def draw(seed, size, letters=256):
    """Return bytes drawn from as many letters, 0 and 255 among them."""
    rng = np.random.default_rng(seed)
    return np.linspace(0, 255, letters).astype(np.uint8)[rng.integers(0, letters, size)].tobytes()


def by_dictionaries(train, held_out, orders):
    """Bits per byte of each order, one byte at a time."""
    after = defaultdict(Counter)
    for order in range(1, orders + 1):
        for i in range(len(train) - order + 1):
            after[train[i : i + order - 1]][train[i + order - 1]] += 1

    def probability(context, byte):
        lower = probability(context[1:], byte) if context else 1 / 256
        if not (seen := after.get(context)):
            return lower
        return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen))

    text, bits = train + held_out, []
    for order in range(1, orders + 1):
        p = [probability(text[max(0, i - order + 1) : i], text[i]) for i in range(len(train), len(text))]
        bits.append(-sum(map(math.log2, p)) / len(p))
    return tuple(bits)


def check_by_hand(module):
    bits = [-(math.log2(a) + math.log2(c)) / 2 for a, c in BY_HAND.values()]
    close(module.ngram_bits(b"abab", b"ac"), bits)


def check_by_dictionaries(module, train, held_out, orders=6):
    close(module.ngram_bits(train, held_out, orders), by_dictionaries(train, held_out, orders))


def test_a_tiny_text_has_the_probabilities_worked_out_by_hand():
    check_by_hand(baselines)


@pytest.mark.parametrize("letters", [1, 2, 3, 20, 256])
@pytest.mark.parametrize(("train", "held_out"), [(1, 1), (1, 9), (3, 2), (4, 40), (7, 3), (300, 50), (3_000, 1_000)])
def test_ngrams_are_those_of_dictionaries(train, held_out, letters):
    for orders in (1, 2, 6, 8):
        check_by_dictionaries(baselines, draw(0, train, letters), draw(1, held_out, letters), orders)


def test_probabilities_after_any_context_sum_to_one():
    train = draw(2, 400, 3)
    for context in (train[-5:], b"\x00\xff\x05", b"\x01\x02\x03\x04\x05"):  # seen, partly seen, never seen
        before, size = np.array(ngram_bits(train, context)) * len(context), len(context) + 1
        both = [np.array(ngram_bits(train, context + bytes([byte]))) * size for byte in range(256)]
        sums = np.exp2(before - both).sum(0)
        close(sums.tolist(), [1.0] * 6)


FAULTS = {
    "no weight for the shorter context": ("weight_T * ending_T) / (total_T + weight_T)", "ending_T) / (total_T + 1)"),
    "the weight counts bytes, not different ones": (
        "(different_N[end_U] - different_N[begin_U])[back_T]",
        "(end_U - begin_U)[back_T]",
    ),
    "an n-gram is a byte too long": (
        "_grams(text_N, order)[-len(held_out) :]",
        "_grams(text_N, min(order + 1, orders))[-len(held_out) :]",
    ),
    "orders begin at two": ("for order in range(1, orders + 1):", "for order in range(2, orders + 2):"),
    "held-out bytes are counted": (
        "np.sort(_grams(train_N, order))",
        "np.sort(_grams(np.concatenate((train_N, text_N)), order))",
    ),
    "the first bytes have no context": ("_end(train, orders - 1) + held_out)", 'b"\\0" * (orders - 1) + held_out)'),
    "a byte is its own context": ("keys_U & ~last", "keys_U"),
    "a uniform byte is one of 255": ("1 / 256", "1 / 255"),
    "nats, not bits": ("-np.log2(p_T)", "-np.log(p_T)"),
    "the last n-gram is forgotten": ("len(text_N) - order + 1)", "len(text_N) - order)"),
    "bytes in the wrong order": ("text_N[i : i + len(keys_N)]", "text_N[order - 1 - i :][: len(keys_N)]"),
    "equal n-grams are counted once": ("np.sort(_grams(train_N, order))", "np.unique(_grams(train_N, order))"),
}
"""Source before, and after."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, tmp_path, monkeypatch):
    before, after = FAULTS[fault]
    source = Path(baselines.__file__).read_text()
    assert source.count(before) == 1
    (tmp_path / "planted.py").write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location("planted", tmp_path / "planted.py")
    planted = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "planted", planted)
    spec.loader.exec_module(planted)
    with pytest.raises((AssertionError, ValueError)):
        check_by_hand(planted)
    with pytest.raises((AssertionError, ValueError)):
        check_by_dictionaries(planted, draw(0, 300, 3), draw(1, 50, 3))


def test_compressors_code_what_the_held_out_text_adds():
    train, held_out = draw(0, 5_000, 20), draw(1, 700, 20)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    xz = [len(lzma.compress(text, lzma.FORMAT_RAW, filters=filters)) for text in (train, train + held_out)]
    bzip2 = [len(bz2.compress(text, 9)) for text in (train, train + held_out)]
    found = measure_baselines(train, held_out)
    assert found.gzip_bits_per_byte == gzip_bits(held_out) == 8 * len(gzip.compress(held_out, 9)) / 700
    assert found.xz_after_bits_per_byte == 8 * (xz[1] - xz[0]) / 700
    assert found.bzip2_after_bits_per_byte == 8 * (bzip2[1] - bzip2[0]) / 700
    assert bits_after(b"", held_out, bz2.compress) == 8 * (len(bz2.compress(held_out)) - len(bz2.compress(b""))) / 700
    assert lzma.decompress(xz_compress(train), lzma.FORMAT_RAW, filters=filters) == train
    assert (found.bzip2_read_bytes, found.xz_read_bytes, found.ngram_read_bytes) == (5_000,) * 3
    assert found.held_out_bytes == 700


def test_the_best_order_is_reported():
    train = b"the cat sat on the mat. " * 20
    found = measure_baselines(train, b"the cat sat on the dog. ")
    assert found.ngram_bits_by_order == ngram_bits(train, b"the cat sat on the dog. ")
    assert found.ngram_bits_per_byte == min(found.ngram_bits_by_order)
    assert found.ngram_bits_by_order[found.ngram_order - 1] == found.ngram_bits_per_byte
    assert measure_baselines(draw(0, 50), draw(1, 50)).ngram_order == 1  # longer contexts of noise teach nothing
    assert json.loads(json.dumps(found.to_dict()))["ngram_order"] == found.ngram_order > 2


def test_of_a_long_text_the_end_is_read():
    train, held_out = draw(0, 900), draw(1, 100)
    found = measure_baselines(train, held_out, ngram_read=300, xz_read=200)
    assert (found.ngram_read_bytes, found.xz_read_bytes, found.bzip2_read_bytes) == (300, 200, 900)
    assert found.ngram_bits_by_order == ngram_bits(train[600:], held_out)
    assert found.xz_after_bits_per_byte == bits_after(train[700:], held_out, xz_compress)


def test_bzip2_reads_what_its_block_holds_and_xz_farther():
    repeated, other = draw(0, 30_000), draw(1, BZIP2_BLOCK)
    near = measure_baselines(other + repeated, repeated, ngram_read=1, xz_read=1)
    far = measure_baselines(repeated + other, repeated, ngram_read=1)
    assert near.bzip2_read_bytes == far.bzip2_read_bytes == BZIP2_BLOCK - 30_000
    assert near.bzip2_after_bits_per_byte < 7 < 7.9 < far.bzip2_after_bits_per_byte
    assert far.xz_after_bits_per_byte < 0.1


@pytest.mark.parametrize(("held_out", "read"), [(1_000, 0), (1_005, 995), (995, 5), (1_999, 1), (1, 999)])
def test_bzip2_fills_its_blocks_up(held_out, read, monkeypatch):
    monkeypatch.setattr(baselines, "BZIP2_BLOCK", 1_000)
    assert measure_baselines(draw(0, 3_000), draw(1, held_out)).bzip2_read_bytes == read


def test_empty_texts_and_numbers_out_of_range_are_refused():
    for measured in (measure_baselines, ngram_bits):
        with pytest.raises(ValueError, match="the training text must have at least 1 byte, got 0"):
            measured(b"", b"a")
        with pytest.raises(ValueError, match="the held-out text must have at least 1 byte, got 0"):
            measured(b"a", b"")
    with pytest.raises(ValueError, match="the held-out text"):
        gzip_bits(b"")
    with pytest.raises(ValueError, match="the held-out text"):
        bits_after(b"a", b"", bz2.compress)
    for orders in (0, 9):
        with pytest.raises(ValueError, match=f"orders must be between 1 and 8, got {orders}"):
            ngram_bits(b"a", b"a", orders)
    with pytest.raises(ValueError, match="xz_read must be at least 1, got 0"):
        measure_baselines(b"a", b"a", xz_read=0)
