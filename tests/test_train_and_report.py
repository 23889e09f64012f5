"""What `subquad train` measures at its end, from Python."""

import json
from types import SimpleNamespace

import pytest

from subquad.data import load_tokenizer
from subquad.models.build import build_model
from subquad.train_and_report import RunReport, train_and_report, write_samples
from subquad.training import TrainConfig
from tests.training.configs import config_of, write_text
from tests.training.helpers import stop_at_once


def test_a_report_is_what_the_files_of_the_run_say_and_an_interrupted_run_has_none(tmp_path, monkeypatch):
    config = config_of(write_text(tmp_path), tmp_path, sample_tokens=2, prompt="def ")
    with monkeypatch.context() as stopped:
        stop_at_once(stopped)
        made = train_and_report(config)
    assert made.run.interrupted
    assert made == RunReport(made.run)
    made = train_and_report(config)
    assert [file.name for file in made.files] == ["evaluation.json", "samples.txt", "report.json"]
    evaluation, samples, report = (file.read_text() for file in made.files)
    assert json.loads(evaluation) == json.loads(json.dumps(made.evaluation.to_dict()))
    assert json.loads(report) == json.loads(json.dumps(made.report.to_dict()))
    assert samples == made.samples
    assert samples.count(f"\n{made.prompt}") == 3
    assert made.prompt == "def "


@pytest.mark.parametrize(("model", "prompt", "count", "reason"), [
    ({"position": "learned", "max_positions": 50, "attention": "full"}, "import ", 44, "the model has 50 positions"),
    ({"position": "learned", "max_positions": 9, "attention": "full"}, "a long prompt", 1, "the model has 9 positions"),
    ({"attention": "perceiver_ar", "options": {"perceiver_ar": {"latents": 6, "decode": "frozen"}}}, "import ", 3,
     "decode=frozen has no latents for more"),
])  # fmt: skip
def test_samples_end_where_positions_and_latents_do(tmp_path, caplog, model, prompt, count, reason):
    shape = {"vocab_size": 256, "dim": 8, "num_layers": 1, "num_heads": 1}
    run = {"sample_tokens": 60}
    config = TrainConfig.from_dict({"model": shape | model, "batch": {"length": 8}, "run": run})
    decoder = build_model(config.model).eval()
    result = SimpleNamespace(config=config, decoder=decoder, folder=tmp_path, steps=1_000)
    samples = write_samples(result, load_tokenizer("bytes"), prompt)
    assert f"samples are cut to {count} tokens: {reason}" in caplog.text
    assert (tmp_path / "samples.txt").read_text() == samples
    assert samples.count("--- ") == 3


@pytest.mark.parametrize(("token", "shown"), [("<|endoftext|>", 0), ("<|other|>", 5)])
def test_a_sample_ends_at_the_end_token(tmp_path, token, shown):
    shape = {"vocab_size": 257, "dim": 8, "num_layers": 1, "num_heads": 1, "attention": "linear", "head_bias": True}
    config = TrainConfig.from_dict({"model": shape, "batch": {"length": 8}, "run": {"sample_tokens": 5}})
    decoder, tokenizer = build_model(config.model).eval(), load_tokenizer("bytes")
    decoder.head.bias.data[256] = 1e6  # it writes nothing else
    tokenizer.add_tokens([token])  # no special token: a decoded text shows it
    result = SimpleNamespace(config=config, decoder=decoder, folder=tmp_path, steps=1_000)
    assert write_samples(result, tokenizer, "import ").count(f"import {token * shown}\n") == 3
