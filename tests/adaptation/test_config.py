"""Settings that are refused."""

import pytest

from subquad.adaptation import ConvertConfig, ExtendConfig

CONVERT = [
    ({"out": ""}, "out must name a folder, got ''"),
    ({"attention": "luna"}, "attention must be one of its choices, got 'luna'; .*valid: latte_macch"),
    ({"keep_every": 1}, r"keep_every must be 0 \(replace all layers\) or at least 2, got 1"),
    ({"seed": -1}, "seed must be at least 0, got -1"),
    ({"threads": 0}, "threads must be at least 1, got 0"),
    ({"options": {"window": {}}}, "options.window has no effect with attention=llp; leave it out"),
    ({"match": {"train": "new"}}, "match.train=new trains nothing: llp has no new parameters; choose attention"),
    ({"match": {"window_dropout": 0.5}}, "match.window_dropout has no effect: llp has no window branch to close"),
    ({"data": {"tokenizer": "bytes"}}, "a conversion uses the model's tokenizer: leave out data"),
    *(({section: {name: value}}, f"{section}.{name} must {rule}, got") for section, name, value, rule in (
        ("match", "steps", 0, "be at least 1"), ("match", "lr", 0.0, "be a positive number"),
        ("match", "window_dropout", 1.5, "lie between 0 and 1"), ("lora", "rank", 0, "be at least 1"),
        ("lora", "steps", 0, "be at least 1"), ("lora", "alpha", 0, "be at least 1"),
        ("lora", "lr", -1.0, "be a positive number"), ("lora", "window_dropout", -0.1, "lie between 0 and 1"),
        ("measure", "windows", 0, "be at least 1"), ("measure", "passkeys", -1, "be at least 0"),
        ("measure", "contexts", [0], "be at least 1"),
    )),
]  # fmt: skip
EXTEND = [
    ({"length": 3}, "length must be at least 4, got 3"),
    ({"attention": "full", "keep_attention": True}, "keep_attention=true has no effect with attention=full"),
    ({"schedule": {"warmup": 200}}, "schedule.warmup must be below run.steps=200, got 200"),
    ({"data": {"tokenizer": "bytes"}}, "data.tokenizer='bytes' has no effect: an extension uses the model's tokenizer"),
    ({"run": {"steps": 200, "prompt": "x"}}, "run.prompt='x' has no effect: an extension draws no samples"),
    ({"rope": "alibi"}, "rope must be one of its choices, got 'alibi'; .*valid: dynamic, linear, ntk"),
    *(({section: {name: value}}, f"{section}.{name} must be at least {least}, got") for section, name, value, least in (
        ("lora", "rank", 0, 1), ("lora", "alpha", 0, 1), ("batch", "size", 0, 1), ("eval", "tokens", 0, 1),
    )),
    ({"lora": {"dropout": 1.0}}, "lora.dropout must be at least 0 and below 1, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "values", "match"),
    [*((ConvertConfig, *case) for case in CONVERT), *((ExtendConfig, *case) for case in EXTEND)],
)
def test_settings_out_of_range_are_refused(config, values, match):
    with pytest.raises(ValueError, match=match):
        config.from_dict(values)


def test_an_extension_trains_at_a_constant_rate_after_twenty_steps():
    schedule = ExtendConfig(model="m").schedule
    assert [schedule.factor(step, 1000) for step in (9, 20, 1000)] == [10 / 21, 1.0, 1.0]
