"""Settings that are refused."""

import pytest

from subquad.adaptation import ConvertConfig, ExtendConfig
from subquad.adaptation.config import (
    FactorsConfig,
    LongBatchConfig,
    MatchConfig,
    MeasureConfig,
    PositionsConfig,
    TuneConfig,
)


@pytest.mark.parametrize(("config", "values", "match"), [
    (ConvertConfig, {"out": ""}, "out must name a folder, got ''"),
    (ConvertConfig, {"attention": "luna"}, "attention must be one of its choices, got 'luna'; .*valid: latte_macch"),
    (ConvertConfig, {"keep_every": 1}, r"keep_every must be 0 \(replace all layers\) or at least 2, got 1"),
    (ConvertConfig, {"keep_every": -2}, r"keep_every must be 0 \(replace all layers\) or at least 2, got -2"),
    (ConvertConfig, {"seed": -1}, "seed must be at least 0, got -1"),
    (ConvertConfig, {"threads": 0}, "threads must be at least 1, got 0"),
    (ConvertConfig, {"options": {"window": {}}}, "options.window has no effect with attention=llp; leave it out"),
    (ConvertConfig, {"match": {"train": "new"}}, "match.train=new trains nothing: llp has no new parameters; choose"),
    (ConvertConfig, {"match": {"window_dropout": 0.5}}, "match.window_dropout has no effect: llp has no window branch"),
    (ConvertConfig, {"lora": {"window_dropout": 0.5}}, "lora.window_dropout has no effect: llp has no window branch"),
    (ConvertConfig, {"data": {"tokenizer": "bytes"}}, "a conversion uses the model's tokenizer: leave out data.token"),
    (MatchConfig, {"steps": 0}, "match.steps must be at least 1, got 0"),
    (MatchConfig, {"lr": 0.0}, "match.lr must be a positive number, got 0.0"),
    (MatchConfig, {"window_dropout": 1.5}, "match.window_dropout must lie between 0 and 1, got 1.5"),
    (TuneConfig, {"rank": 0}, "lora.rank must be at least 1, got 0"),
    (TuneConfig, {"steps": 0}, "lora.steps must be at least 1, got 0"),
    (TuneConfig, {"alpha": 0}, "lora.alpha must be at least 1, got 0"),
    (TuneConfig, {"lr": -1.0}, "lora.lr must be a positive number, got -1.0"),
    (TuneConfig, {"window_dropout": -0.1}, "lora.window_dropout must lie between 0 and 1, got -0.1"),
    (MeasureConfig, {"windows": 0}, "measure.windows must be at least 1, got 0"),
    (MeasureConfig, {"passkeys": -1}, "measure.passkeys must be at least 0, got -1"),
    (MeasureConfig, {"contexts": [0]}, "measure.contexts must be at least 1, got 0"),
    (ExtendConfig, {"length": 3}, "length must be at least 4, got 3"),
    (ExtendConfig, {"attention": "full", "keep_attention": True}, "keep_attention=true has no effect with attention=f"),
    (ExtendConfig, {"schedule": {"warmup": 200}}, "schedule.warmup must be below run.steps=200, got 200"),
    (ExtendConfig, {"data": {"tokenizer": "bytes"}}, "data.tokenizer='bytes' has no effect: an extension uses"),
    (ExtendConfig, {"run": {"steps": 200, "prompt": "x"}}, "run.prompt='x' has no effect: an extension draws no sampl"),
    (ExtendConfig, {"rope": "alibi"}, "rope must be one of its choices, got 'alibi'; .*valid: dynamic, linear, ntk"),
    (FactorsConfig, {"rank": 0}, "lora.rank must be at least 1, got 0"),
    (FactorsConfig, {"alpha": 0}, "lora.alpha must be at least 1, got 0"),
    (FactorsConfig, {"dropout": 1.0}, "lora.dropout must be at least 0 and below 1, got 1"),
    (LongBatchConfig, {"size": 0}, "batch.size must be at least 1, got 0"),
    (PositionsConfig, {"tokens": 0}, "eval.tokens must be at least 1, got 0"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(config, values, match):
    with pytest.raises(ValueError, match=match):
        config.from_dict(values)


def test_the_settings_of_an_extension_are_written_and_read_back(tmp_path):
    config = ExtendConfig(model="m", length=32, options={"group": 8})
    config.to_file(tmp_path / "c.yaml")
    assert ExtendConfig.from_file(tmp_path / "c.yaml") == config
