"""`measure_model` and `measure_decode`: rows, the base on SDPA, the states' sizes."""

import time

import pytest
import torch

from benchmarks import decode, decoding, model
from benchmarks import models as _models
from benchmarks.by_hand import ByHand
from benchmarks.config import DecodeConfig, ModelConfig
from benchmarks.decode import measure_decode
from benchmarks.model import measure_model
from benchmarks.models import build_decoder
from subquad.testing import assert_exact, assert_same_maths

SIZES = {"layers": 2, "dim": 16, "heads": 2, "vocab": 17}
MODEL = {**SIZES, "repeats": 2, "peers": "none", "batch": 1, "dtype": "float32"}
DECODE = {**SIZES, "repeats": 2, "peers": "none"}


def test_steps_and_prefill_of_every_model():
    names = ["full", "llp", "latte", "elita", "perceiver_ar"]
    config = ModelConfig(mechanisms=names, tokens=[24], options={"llp": {"segment": 8}}, **{**MODEL, "batch": 2})
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
        measure_decode(DecodeConfig(contexts=[8], peers="none", **settings), deadline=time.monotonic() - 1),
    ):
        assert {row["status"] for row in report.rows} == {"skipped"}


def test_the_base_is_the_same_decoder():
    sizes = {**SIZES, "longest": 12, "options": {}}
    tokens = torch.randint(17, (2, 12))
    ours, base = (build_decoder(name, **sizes).double() for name in ("full", _models.BASE))
    assert_same_maths(base(tokens)[0], ours(tokens)[0])


def test_bfloat16_runs_under_autocast():
    report = measure_model(ModelConfig(mechanisms=["llp"], tokens=[8], **{**MODEL, "dtype": "bfloat16"}))
    assert {row["status"] for row in report.rows} == {"ok"}


def test_transformers_llama_has_the_same_parameters_and_may_have_our_attention():
    asked = ["transformers", "transformers-llp"]
    report = measure_model(ModelConfig(mechanisms=["full"], tokens=[12], **{**MODEL, "peers": asked}))
    rows = {(row["name"], row["pass"]): row for row in report.rows}
    assert {row["status"] for row in report.rows} == {"ok"}
    assert len({row["parameters"] for row in report.rows}) == 1
    for name in ("full", *asked):
        for which in ("step", "prefill"):
            times = rows["transformers", which]["median_s"] / rows[name, which]["median_s"]
            assert rows[name, which]["over_transformers"] == times
    assert "transformers' Llama, subquad_llp, 256" in report.table()


def test_the_loss_of_transformers_llama_is_that_of_the_given_labels():
    llama = _models.Llama(**SIZES, longest=12, attention=None).double()
    tokens, labels = torch.randint(17, (2, 2, 12))
    logits = torch.cat([llama.prefill(tokens[:, : n + 1])[0] for n in range(12)], 1)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(llama.loss(tokens, labels), expected, check_dtype=False)


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
    config = DecodeConfig(**settings, piece=7, **{**DECODE, "repeats": 1, "peers": ["transformers"]})
    report = measure_decode(config)
    assert [(row["name"], row["form"], row["tokens"]) for row in report.rows] == [
        (name, form, tokens)
        for name in ("transformers", "full", "latte")
        for form in (["call"] if name == "transformers" else ["call", "recorded"])
        for tokens in (9, 30)
    ]
    rows = {(row["name"], row["tokens"]): row for row in report.rows if row["form"] == "call"}
    for (name, tokens), row in rows.items():
        assert row["status"] == "ok", row
        assert row["of_shortest"] == row["median_s"] / rows[name, 9]["median_s"]  # of one round
        assert row["over_transformers"] == rows["transformers", tokens]["median_s"] / row["median_s"]
        assert row["tokens_per_s"] == 1 / row["median_s"]
        same = "full" if name == "transformers" else name
        decoder = decode.build_decoder(same, longest=31, options=config.options, **SIZES)
        assert row["state_bytes"] == decoder.cost(tokens).state_bytes
        assert row["events"] > 100
    assert "| latte, num_latents 4 | 9 |" in report.table()


def test_an_imported_qwen_is_timed_beside_its_own():
    settings = {**DECODE, "layers": 4, "peers": [_models.THEIRS]}
    report = measure_decode(DecodeConfig(mechanisms=["gla"], contexts=[9, 20], piece=7, **settings))
    assert {row["status"] for row in report.rows} == {"ok"}
    rows = {(row["label"], row["tokens"]): row for row in report.rows}
    assert {label for label, _ in rows} == {
        "gla", "gla, recorded", "transformers' Qwen3.5", "Qwen3.5, imported", "Qwen3.5, imported, recorded",
    }  # fmt: skip
    for (label, tokens), row in rows.items():
        times = rows["transformers' Qwen3.5", tokens]["median_s"] / row["median_s"]
        assert row["over_transformers"] == (times if "Qwen" in label else None)
    assert {row["kind"] for row in report.rows if row["name"] == _models.THEIRS} == {"peer"}


def test_a_repeat_of_transformers_qwen_has_the_same_states():
    config = DecodeConfig(contexts=[20], piece=7, **{**DECODE, "layers": 4})
    qwen, heard = decode._ready(config, _models.THEIRS), []
    assert {*qwen.config.layer_types} == {"linear_attention", "full_attention"}
    read = decoding.read(config, qwen, 20)
    qwen.model.register_forward_hook(lambda *given: heard.append(given[2].logits))
    for _ in range(2):
        read.step(read.step(read.begin()))
    assert_exact(torch.stack(heard[:2]), torch.stack(heard[2:]))


@pytest.mark.parametrize("name", ["linear", "window", "transformers"])
def test_a_repeat_goes_on_from_the_context_read_in_pieces(name):
    """Each repeat decodes after the same 50 tokens, whatever was decoded before it."""
    config = DecodeConfig(mechanisms=[name], contexts=[50], piece=7, options={"window": {"width": 8}}, **DECODE)
    decoder = decode._ready(config, name).double()
    read = decoding.read(config, decoder, 50)
    tokens = torch.cat([decoding.tokens_of(config, 50), *[decoding.tokens_of(config, 1)] * 3], 1)
    heard = []
    decoder.register_forward_hook(lambda *given: heard.append(given[2][0])) if name != "transformers" else (
        decoder.model.register_forward_hook(lambda *given: heard.append(given[2].logits))
    )
    for _ in range(2):
        memory = read.begin()
        for _ in range(3):
            memory = read.step(memory)
    with torch.no_grad():
        whole = (decoder.model(tokens).logits if name == "transformers" else decoder(tokens)[0])[:, 50:]
    for first in (0, 3):
        assert_same_maths(torch.cat(heard[first : first + 3], 1), whole)


@pytest.mark.parametrize("name", ["linear", "window"])
def test_the_step_by_hand_is_that_of_the_decoder(name):
    decoder = build_decoder(name, longest=30, options={"window": {"width": 5}}, **SIZES).double()
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight)
    tokens, written = torch.randint(17, (3, 12)), ByHand(decoder, 3)
    logits = torch.stack([written.step(tokens[:, n : n + 1]) for n in range(12)], 1)
    assert_same_maths(logits, decoder(tokens)[0].detach())
    config = DecodeConfig(mechanisms=[name], contexts=[9], **DECODE)
    call, recorded, by_hand = measure_decode(config).rows
    assert (by_hand["name"], by_hand["form"], by_hand["status"]) == (f"by hand: {name}", "by hand", "ok")
    assert recorded["events"] < by_hand["events"] < call["events"]


@pytest.mark.slow
def test_the_compiled_step_is_timed_too():
    config = DecodeConfig(mechanisms=["latte"], contexts=[9], compile=True, batch=2, **DECODE)
    _, recorded, compiled = measure_decode(config).rows
    assert (compiled["label"], compiled["status"]) == ("latte, compiled", "ok")
    assert compiled["events"] < recorded["events"]


def test_a_context_that_does_not_fit_says_so_in_every_form(monkeypatch):
    read = decode.read

    def greedy(config, decoder, tokens):
        if tokens > 10:
            raise MemoryError("too long")
        return read(config, decoder, tokens)

    monkeypatch.setattr(decode, "read", greedy)
    report = measure_decode(DecodeConfig(mechanisms=["linear"], contexts=[8, 16], **DECODE))
    status = {(row["form"], row["tokens"]): row["status"] for row in report.rows}
    assert status == {
        (form, tokens): "ok" if tokens == 8 else "out of memory"
        for form in ("call", "recorded", "by hand")
        for tokens in (8, 16)
    }
