"""The table at the end of a run."""

import io
import json

import pytest
import torch
from rich.console import Console

from subquad.models import DecoderConfig
from subquad.models.build import build_model
from subquad.training.baselines import measure_baselines
from subquad.training.report import decode_speed, measure, state_sizes, write_report

TOKENS = list(range(50))


def make(attention, **changes):
    values = {"vocab_size": 50, "dim": 16, "num_layers": 1, "num_heads": 2, "attention": attention, **changes}
    torch.manual_seed(0)
    return build_model(DecoderConfig.from_dict(values))


def state_bytes(decoder, tokens):
    """Return the state's size after reading all tokens at once."""
    with torch.no_grad():
        _, state = decoder.hidden(torch.arange(tokens)[None] % 50)
    return state.nbytes


@pytest.mark.parametrize(("attention", "options", "measured"), [
    ("llp", {"options": {"llp": {"segment": 8}}}, True), ("full", {}, False), ("full", {"loops": 2}, False),
])  # fmt: skip
def test_a_bounded_state_is_measured_and_a_growing_one_extrapolated(attention, options, measured):
    decoder = make(attention, **options).train()
    sizes = state_sizes(decoder, TOKENS, after=(40, 200), chunk=32)
    assert [(size.tokens, size.measured) for size in sizes] == [(40, True), (200, measured)]
    assert [size.bytes for size in sizes] == [state_bytes(decoder, 40), state_bytes(decoder, 200)]
    assert decoder.training


@pytest.mark.parametrize("rows", [2, 3, 100])
def test_states_and_speed_are_measured_within_learned_positions(rows):
    decoder = make("window", position="learned", max_positions=rows).train()
    assert [size.tokens for size in state_sizes(decoder, TOKENS, after=(rows, rows + 1))] == [rows]
    assert decode_speed(decoder, TOKENS * 2) > 0
    assert decoder.training


@pytest.mark.parametrize(("decode", "latents"), [("exact", 2), ("exact", 6), ("refill", 6), ("frozen", 6)])
@pytest.mark.parametrize("history_tokens", [None, 9])
def test_the_state_and_speed_of_perceiver_ar_follow_how_it_decodes(decode, latents, history_tokens):
    options = {"latents": latents, "history": "self", "decode": decode, "history_tokens": history_tokens}
    model = make("perceiver_ar", options={"perceiver_ar": options}).train()
    sizes = state_sizes(model, TOKENS, after=(10, 24, 5_000))
    assert [(size.tokens, size.measured) for size in sizes] == [(10, True), (24, False), (5_000, False)]
    _, state = model(torch.zeros(1, 24, dtype=torch.int64))
    assert sizes[1].bytes == state.nbytes
    assert (sizes[2].bytes > sizes[1].bytes) == (history_tokens is None)
    assert decode_speed(model, TOKENS, tokens=8) > 0
    assert model.training


def test_the_report_compares_with_the_compressors(tmp_path, monkeypatch):
    monkeypatch.setattr("subquad.training.report.STATE_AFTER", (10, 20))
    text = b"".join(b"def function_%d(a):\n    return a\n" % number for number in range(300))
    given = {"bits_per_byte": 1.25, "files_hash": "abc", "steps": 7, "tokens": 80}
    given |= {"train_tokens_per_second": 123.0, "skipped": 2}
    report = measure(make("window"), text[: len(text) // 2], text, TOKENS, **given)
    assert report.baselines == measure_baselines(text[: len(text) // 2], text)
    screen = io.StringIO()
    Console(file=screen, width=100).print(report.table())
    for part in (
        "1.250 bits per byte",
        "gzip -9 alone",
        "xz -9e after the same text",
        "2, not finite",
        "after 20 tokens",
        "123 tokens/s",
    ):
        assert part in screen.getvalue()
    write_report(report, tmp_path)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["held_out_bytes"] == len(text)
    assert [state["tokens"] for state in saved["states"]] == [10, 20]
    assert [state["measured"] for state in saved["states"]] == [True, True]


def test_a_short_run_reads_and_decodes_little_for_its_report(monkeypatch):
    monkeypatch.setattr("subquad.training.report.STATE_AFTER", (10, 20, 30))
    decoded = []
    monkeypatch.setattr("subquad.training.report.decode_speed", lambda *given: decoded.append(given[-1]) or 1.0)
    given = {"bits_per_byte": 1.25, "files_hash": "abc", "train_tokens_per_second": 123.0}
    decoder = make("window", options={"window": {"width": 25}})
    for steps, tokens in ((1, 8), (40, 80), (1_000, 10_000)):
        states = measure(decoder, b"train", b"text", TOKENS, steps=steps, tokens=tokens, **given).states
        assert [state.measured for state in states] == [True, tokens >= 80, tokens >= 120]
        assert [state.bytes for state in states] == [state_bytes(decoder, count) for count in (10, 20, 30)]
    assert decoded == [1, 20, 128]


@pytest.mark.parametrize(("text", "tokens"), [(b"", [1]), (b"x", [])])
def test_a_report_needs_text(text, tokens):
    with pytest.raises(ValueError, match="the report needs held-out text"):
        measure(
            make("window"),
            b"train",
            text,
            tokens,
            bits_per_byte=1.0,
            files_hash="",
            steps=1,
            tokens=1,
            train_tokens_per_second=1,
        )
