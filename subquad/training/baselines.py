"""Baselines for bits per byte of held-out text: compressors and n-grams, measured on the same text.

Like the model, most of them have read training text: bzip2 and xz compress the held-out text after the end of the
training text, and the n-grams of bytes are counted in it. gzip of the held-out text alone, which reports of language
models usually print, has not, and is the weakest baseline.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from subquad.config import Record, check_at_least

ORDERS = 6
"""Longest n-gram that is tried, in bytes: five bytes of context."""
_LONGEST = 8
"""Bytes of an n-gram that one 64-bit key holds."""
NGRAM_READ = 16_000_000
"""Most training bytes whose n-grams are counted: 0.5 GB of memory."""
BZIP2_BLOCK = 880_000
"""Bytes of text that one block of bzip2 holds: 900,000, less a reserve for what bzip2 adds to runs of four bytes."""
XZ_READ = 4_000_000
"""Most training bytes that xz compresses, twice."""


@dataclass(frozen=True)
class Baselines(Record):
    """Bits per held-out byte of compressors and n-grams, and how much of the training text's end each has read."""

    gzip_bits_per_byte: float
    """gzip, level 9, of the held-out text alone."""
    bzip2_after_bits_per_byte: float
    """bzip2, level 9: bits that the held-out text adds to the end of the training text."""
    xz_after_bits_per_byte: float
    """xz, preset 9 extreme: bits that the held-out text adds to the end of the training text."""
    ngram_bits_per_byte: float
    """The best order of `ngram_bits_by_order`, chosen on the held-out text, which favours the n-grams."""
    ngram_order: int
    """Bytes of the best n-gram, the predicted one included; if `ORDERS`, longer ones might do better, as in code."""
    ngram_bits_by_order: tuple[float, ...]
    """n-grams of 1, 2, ... bytes, Witten-Bell, counted in the training text's end and fixed after it."""
    held_out_bytes: int
    bzip2_read_bytes: int
    """Bytes of training text read, like the two below."""
    xz_read_bytes: int
    ngram_read_bytes: int

    def named(self) -> list[tuple[str, float]]:
        """Return the names of the baselines and their bits per byte, for a table."""
        return [
            (f"{self.ngram_order}-grams of bytes, same text", self.ngram_bits_per_byte),
            ("bzip2 -9 after the same text", self.bzip2_after_bits_per_byte),
            ("xz -9e after the same text", self.xz_after_bits_per_byte),
            ("gzip -9 alone", self.gzip_bits_per_byte),
        ]


def measure_baselines(
    train: bytes, held_out: bytes, /, *, ngram_read: int = NGRAM_READ, xz_read: int = XZ_READ
) -> Baselines:
    """Measure all baselines of `held_out`, the text that follows `train`; documents are one string.

    Of a long training text only the end is read: at most `ngram_read` bytes by the n-grams, `xz_read` by xz, and by
    bzip2 the rest of its first block. bzip2 starts anew after each block of about 900 kB, so it reads less than one
    block of training text, and codes held-out text beyond the first block without any. The n-grams and xz, which
    compresses twice, take about 0.4 and 1.6 seconds for each million bytes they read. Raises `ValueError` if a text is
    empty or a number is less than 1.
    """
    _check_text(training=train, held_out=held_out)
    check_at_least(1, ngram_read=ngram_read, xz_read=xz_read)
    block, window, counted = (_end(train, most) for most in (-len(held_out) % BZIP2_BLOCK, xz_read, ngram_read))
    by_order = ngram_bits(counted, held_out)
    best = min(by_order)
    return Baselines(
        gzip_bits_per_byte=gzip_bits(held_out),
        bzip2_after_bits_per_byte=bits_after(block, held_out, bz2.compress),
        xz_after_bits_per_byte=bits_after(window, held_out, xz_compress),
        ngram_bits_per_byte=best,
        ngram_order=1 + by_order.index(best),
        ngram_bits_by_order=by_order,
        held_out_bytes=len(held_out),
        bzip2_read_bytes=len(block),
        xz_read_bytes=len(window),
        ngram_read_bytes=len(counted),
    )


def gzip_bits(held_out: bytes, /) -> float:
    """Return the bits per byte of gzip, level 9, of the text alone. Raises `ValueError` for an empty text."""
    _check_text(held_out=held_out)
    return 8 * len(gzip.compress(held_out, 9)) / len(held_out)


def bits_after(train: bytes, held_out: bytes, compress: Callable[[bytes], bytes], /) -> float:
    """Return 8 (|compress(train + held_out)| - |compress(train)|) / |held_out|: bits per held-out byte.

    `train` may be empty. Raises `ValueError` for an empty held-out text.
    """
    _check_text(held_out=held_out)
    return 8 * (len(compress(train + held_out)) - len(compress(train))) / len(held_out)


def xz_compress(text: bytes, /) -> bytes:
    """Compress by xz, preset 9 extreme, without its container. Its dictionary holds the last 64 MiB of text."""
    settings = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}
    return lzma.compress(text, lzma.FORMAT_RAW, filters=[settings])


def ngram_bits(train: bytes, held_out: bytes, /, orders: int = ORDERS) -> tuple[float, ...]:
    """Return the bits per held-out byte of n-grams of 1 to `orders` bytes, counted in `train` alone.

    P(w | h) = (c(h w) + n(h) P(w | h')) / (c(h) + n(h)), interpolated Witten-Bell: c(h w) is how often the byte w was
    seen after the context h, c(h) how often any byte was and n(h) how many different ones were; h' is h without its
    first byte, and before the empty context P is 1/256. After a context that was never seen, P is P(w | h'). The first
    held-out bytes have the training text's end as their context. Raises `ValueError` if a text is empty or `orders` is
    not 1 to 8.

    Source: Witten and Bell, "The zero-frequency problem", IEEE Transactions on Information Theory 37(4), 1991, their
    method C, interpolated as by Chen and Goodman, "An empirical study of smoothing techniques for language modeling",
    1998, section 2.6.
    """
    _check_text(training=train, held_out=held_out)
    if not 1 <= orders <= _LONGEST:
        raise ValueError(f"orders must be between 1 and {_LONGEST}, got {orders}")
    train_N, text_N = (np.frombuffer(text, np.uint8) for text in (train, _end(train, orders - 1) + held_out))
    p_T = np.full(len(held_out), 1 / 256)
    bits = []
    for order in range(1, orders + 1):
        keys_T = _grams(text_N, order)[-len(held_out) :]
        seen_T, total_T, different_T = _counts(np.sort(_grams(train_N, order)), keys_T)
        ending_T = p_T[len(p_T) - len(keys_T) :]  # a view: after a very short text the first bytes have no such context
        weight_T = np.maximum(different_T, 1)  # for a context that was never seen, whose counts are 0
        ending_T[:] = (seen_T + weight_T * ending_T) / (total_T + weight_T)
        bits.append(float(-np.log2(p_T).mean()))
    return tuple(bits)


def _grams(text_N: np.ndarray, order: int) -> np.ndarray:
    """Return each run of `order` bytes as one number, the last byte lowest."""
    keys_N = np.zeros(max(0, len(text_N) - order + 1), np.uint64)
    for i in range(order):
        keys_N <<= np.uint64(8)
        keys_N |= text_N[i : i + len(keys_N)]
    return keys_N


def _counts(sorted_N: np.ndarray, keys_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return c(h w), c(h) and n(h) of each key h w among the sorted ones."""
    first_N = np.ones(len(sorted_N), bool)  # the first of equal keys
    np.not_equal(sorted_N[1:], sorted_N[:-1], out=first_N[1:])
    different_N = np.zeros(len(sorted_N) + 1, np.int32)  # among the first i keys
    np.cumsum(first_N, out=different_N[1:])
    keys_U, back_T = np.unique(keys_T, return_inverse=True)  # sorted, so that neighbours are looked up together
    last = np.uint64(255)
    begin_U, end_U = np.searchsorted(sorted_N, keys_U & ~last), np.searchsorted(sorted_N, keys_U | last, "right")
    seen_U = np.searchsorted(sorted_N, keys_U, "right") - np.searchsorted(sorted_N, keys_U)
    return seen_U[back_T], (end_U - begin_U)[back_T], (different_N[end_U] - different_N[begin_U])[back_T]


def _end(text: bytes, most: int) -> bytes:
    return text[max(0, len(text) - most) :]


def _check_text(**texts: bytes) -> None:
    for name, text in texts.items():
        if not text:
            raise ValueError(f"the {name.replace('_', '-')} text must have at least 1 byte, got 0")
