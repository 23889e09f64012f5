"""The table at the end of a run."""

import gzip
import io
import json
import lzma
from pathlib import Path

import pytest
import torch
from rich.console import Console

from subquad.models import Decoder, DecoderConfig
from subquad.training.report import decode_speed, measure, state_sizes, write_report


def make(attention: str, **changes: object) -> Decoder:
    values = {"vocab_size": 50, "dim": 16, "num_layers": 2, "num_heads": 2, "attention": attention, **changes}
    torch.manual_seed(0)
    return Decoder(DecoderConfig.from_dict(values))


TOKENS = list(range(50))


def state_bytes(decoder: Decoder, tokens: int) -> int:
    """The state's size after really reading all tokens at once."""
    with torch.no_grad():
        _, state = decoder.hidden(torch.arange(tokens)[None] % 50)
    return state.nbytes


def test_a_bounded_state_is_read_to_the_end() -> None:
    decoder = make("llp", options={"llp": {"segment": 16}})
    small, large = state_sizes(decoder, TOKENS, after=(100, 2_000), chunk=64)
    assert (small.tokens, large.tokens) == (100, 2_000)
    assert small.measured
    assert large.measured
    assert small.bytes == state_bytes(decoder, 100)
    assert large.bytes == state_bytes(decoder, 2_000)
    assert large.bytes <= 2 * small.bytes


def test_a_growing_state_is_computed_and_says_so() -> None:
    decoder = make("full")
    small, large = state_sizes(decoder, TOKENS, after=(100, 600), chunk=64)
    assert (small.measured, large.measured) == (True, False)
    assert small.bytes == state_bytes(decoder, 100)
    assert large.bytes == state_bytes(decoder, 600)


def test_counts_past_learned_positions_are_left_out() -> None:
    decoder = make("window", position="learned", max_positions=128)
    assert [size.tokens for size in state_sizes(decoder, TOKENS, after=(100, 1_000))] == [100]


@pytest.mark.parametrize("rows", [2, 3, 100, 191])
def test_the_speed_of_decoding_is_measured_within_learned_positions(rows: int) -> None:
    decoder = make("window", position="learned", max_positions=rows)
    assert decode_speed(decoder, TOKENS * 2) > 0


def test_modes_are_restored() -> None:
    decoder = make("window").train()
    assert decode_speed(decoder, TOKENS, tokens=3) > 0
    state_sizes(decoder, TOKENS, after=(10,))
    assert decoder.training


def test_the_report_compares_with_the_compressors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.training.report.state_sizes", lambda *args: state_sizes(*args, after=(10, 20)))
    text = b"".join(b"def function_%d(a):\n    return a\n" % number for number in range(300))
    report = measure(
        make("window"), text, TOKENS, bits_per_byte=1.25, files_hash="abc", steps=7, train_tokens_per_second=123.0
    )
    assert report.gzip_bits_per_byte == 8 * len(gzip.compress(text, 9)) / len(text)
    assert report.xz_bits_per_byte == 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    assert report.xz_bits_per_byte < report.gzip_bits_per_byte
    screen = io.StringIO()
    Console(file=screen, width=100).print(report.table())
    for part in ("1.250 bits per byte", "gzip -9", "xz -9e", "abc", "after 20 tokens", "123 tokens/s"):
        assert part in screen.getvalue()
    write_report(report, tmp_path)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["held_out_bytes"] == len(text)
    assert [state["tokens"] for state in saved["states"]] == [10, 20]


@pytest.mark.parametrize(("text", "tokens"), [(b"", [1]), (b"x", [])])
def test_a_report_needs_text(text: bytes, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="the report needs held-out text"):
        measure(make("window"), text, tokens, bits_per_byte=1.0, files_hash="", steps=1, train_tokens_per_second=1.0)


def test_a_growing_state_grows_in_every_pass_of_a_loop() -> None:
    decoder = make("full", loops=3)
    small, large = state_sizes(decoder, TOKENS, after=(100, 600), chunk=64)
    assert small.bytes == state_bytes(decoder, 100)
    assert large.bytes == state_bytes(decoder, 600)
