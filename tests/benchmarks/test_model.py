"""`measure_model` and `measure_decode`: rows, the base on SDPA, the states' sizes."""

import time

import pytest
import torch

from benchmarks import decode, model
from benchmarks import models as _models
from benchmarks.config import DecodeConfig, ModelConfig
from benchmarks.decode import measure_decode
from benchmarks.model import measure_model
from benchmarks.models import build_decoder
from subquad.testing import assert_same_maths

SIZES = {"layers": 2, "dim": 16, "heads": 2, "vocab": 17}
MODEL = {**SIZES, "repeats": 2, "peers": "none"}


def test_steps_and_prefill_of_every_model():
    names = ["full", "llp", "latte", "elita", "perceiver_ar"]
    config = ModelConfig(mechanisms=names, tokens=[24], batch=2, options={"llp": {"segment": 8}}, **MODEL)
    report = measure_model(config)
    lines = {(name, which) for name in ("sdpa", *names) for which in ("step", "prefill")}
    assert {(row["name"], row["pass"]) for row in report.rows} == lines
    base = {row["pass"]: row["median_s"] for row in report.rows if row["name"] == "sdpa"}
    for row in report.rows:
        assert row["status"] == "ok", row
        assert row["tokens_per_s"] == 2 * 24 / row["median_s"]
        assert row["times_faster"] == base[row["pass"]] / row["median_s"]
        assert row["peak_bytes"] > 0
    labels = {row["name"]: row["label"] for row in report.rows}
    assert labels["llp"] == "llp, segment 8"
    assert labels["perceiver_ar"] == "perceiver_ar, half latents"
    assert "| llp, segment 8 | 24 | 2 |" in report.table()


def test_a_model_that_does_not_fit_says_so_and_the_others_go_on(monkeypatch):
    build = model.build_decoder

    def greedy(name, **sizes):
        if name == "latte" and torch.get_default_device().type == "cpu":
            raise torch.OutOfMemoryError("no room")
        return build(name, **sizes)

    monkeypatch.setattr(model, "build_decoder", greedy)
    report = measure_model(ModelConfig(mechanisms=["latte", "linear"], tokens=[8], **MODEL))
    status = {row["name"]: row["status"] for row in report.rows}
    assert status == {"sdpa": "ok", "latte": "out of memory", "linear": "ok"}


def test_after_the_deadline_models_and_contexts_are_skipped():
    settings = {"mechanisms": ["linear"], **SIZES}
    for report in (
        measure_model(ModelConfig(tokens=[8], peers="none", **settings), deadline=time.monotonic() - 1),
        measure_decode(DecodeConfig(contexts=[8], **settings), deadline=time.monotonic() - 1),
    ):
        assert {row["status"] for row in report.rows} == {"skipped"}


def test_the_base_is_the_same_decoder():
    sizes = {**SIZES, "longest": 12, "options": {}}
    tokens = torch.randint(17, (2, 12))
    ours, base = (build_decoder(name, **sizes).double() for name in ("full", _models.BASE))
    assert_same_maths(base(tokens)[0], ours(tokens)[0])


def test_bfloat16_runs_under_autocast():
    report = measure_model(ModelConfig(mechanisms=["llp"], tokens=[8], dtype="bfloat16", **MODEL))
    assert {row["status"] for row in report.rows} == {"ok"}


@pytest.mark.parametrize(("measure", "config", "changes", "message"), [
    (measure_model, ModelConfig, {"mechanisms": ["linformer"]}, "no causal form of attention 'linformer'; did you"),
    (measure_model, ModelConfig, {"mechanisms": []}, "at least one mechanism"),
    (measure_model, ModelConfig, {"peers": ["flex"]}, "unknown peer 'flex' on cpu; valid: auto, none, perceiver-ar"),
    (measure_decode, DecodeConfig, {"contexts": []}, "contexts must have at least one value"),
    (measure_decode, DecodeConfig, {"piece": 0}, "piece must be at least 1, got 0"),
])  # fmt: skip
def test_mistakes_are_named(measure, config, changes, message):
    with pytest.raises(ValueError, match=message):
        measure(config(**{**SIZES, "mechanisms": ["llp"], **changes}))


def test_a_token_after_each_context_and_the_size_of_the_state():
    settings = {"mechanisms": ["full", "latte"], "contexts": [30, 9], "options": {"latte": {"num_latents": 4}}}
    config = DecodeConfig(**settings, piece=7, repeats=3, **SIZES)
    report = measure_decode(config)
    rows = {(row["name"], row["tokens"]): row for row in report.rows}
    assert list(rows) == [("full", 9), ("full", 30), ("latte", 9), ("latte", 30)]
    for (name, tokens), row in rows.items():
        assert row["status"] == "ok"
        decoder = decode.build_decoder(name, longest=31, options=config.options, **SIZES)
        assert row["state_bytes"] == decoder.cost(tokens).state_bytes
        assert row["of_shortest"] == row["median_s"] / rows[name, 9]["median_s"]
    assert "| latte, num_latents 4 | 9 |" in report.table()


def test_reading_in_pieces_is_reading_at_once():
    config = DecodeConfig(mechanisms=["llp"], contexts=[50], piece=7, options={"llp": {"segment": 8}}, **SIZES)
    decoder = decode._ready(config, "llp").double()
    tokens, token = decode._tokens(config, 50), decode._tokens(config, 1)
    with torch.no_grad():
        whole = decoder(torch.cat([tokens, token], 1))[0][:, -1:]
        read = decode._read(config, decoder, 50)
        logits, _ = decode._step(config, read).call(read.state)
    assert_same_maths(logits, whole)


def test_a_context_that_does_not_fit_says_so(monkeypatch):
    read = decode._read

    def greedy(config, decoder, tokens):
        if tokens > 10:
            raise MemoryError("too long")
        return read(config, decoder, tokens)

    monkeypatch.setattr(decode, "_read", greedy)
    report = measure_decode(DecodeConfig(mechanisms=["linear"], contexts=[8, 16], repeats=2, **SIZES))
    assert [row["status"] for row in report.rows] == ["ok", "out of memory"]
