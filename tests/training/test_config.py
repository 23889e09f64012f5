"""The training configuration: strict, and refusing what can't be trained before anything is read."""

from typing import Any

import pytest

from subquad.data import DataConfig
from subquad.models.config import DecoderConfig
from subquad.training import BatchConfig, ClassifyConfig, LoraConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from subquad.training.config import ParallelConfig

LORA, CONTEXT = {"rank": 2, "base": "x"}, {"context": 2}
TOO_LONG = {"model": {"position": "learned", "max_positions": 128}, "batch": {"length": 256}}

RANGES = [
    ("be at least 2", 1, "batch.length"),
    ("be at least 1", 0, "run.steps run.keep run.threads run.nonfinite_limit batch.size batch.accumulation"),
    ("be at least 1", 0, "parallel.context classify.held_out pretrain.steps image.mixtures image.test_images"),
    ("be at least 0", -1, "optimizer.weight_decay optimizer.clip schedule.warmup lora.rank"),
    ("be at least 0", -1, "classify.seed pretrain.joint_weight image.near image.position_channels image.samples"),
    ("be a positive number", 0, "optimizer.lr optimizer.eps optimizer.matrix_lr run.minutes"),
    ("be a positive number", 0, "run.sample_temperature parallel.timeout pretrain.lr"),
    ("be at least 0 and below 1", 1, "optimizer.momentum"),
    ("lie between 0 and 1", 1.5, "schedule.min_ratio schedule.decay_fraction pretrain.random_fraction"),
]
"""What settings must be, a value that is not, and their names."""
TASKS = {"classify": "classify", "pretrain": "classify", "image": "image"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"modle": {}}, "no key 'modle'; did you mean 'model'"),
    ({"task": "label"}, "task must be one of its choices, got 'label'; valid: classify, image, language"),
    (TOO_LONG, r"batch.length=256 is longer than the 128 positions of .*raise model.max_positions"),
    ({"optimizer": {"lr": float("nan")}}, "optimizer.lr must be a number, got nan"),
    ({"optimizer": {"betas": [0.9]}}, "optimizer.betas must be two numbers"),
    ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas must be two numbers"),
    ({"schedule": {"warmup": 10, "hold": 5}}, "schedule.hold must be at least 10, got 5"),
    (
        {"run": {"steps": 10}, "schedule": {"warmup": 10}},
        "schedule.warmup must be below run.steps=10, got 10",
    ),
    ({"run": {"prompt": ""}}, "run.prompt must not be empty, got ''"),
    ({"run": {"folder": ""}}, "run.folder must name a folder"),
    ({"run": {"trackers": ["comet"]}}, r"run\.trackers\[0\] must be one of its choices, got 'comet'"),
    ({"data": {"workers": -1}}, "workers must be at least 0, got -1"),
    ({"data": {"worker_timeout": 0.0}}, "worker_timeout must be a positive number of seconds, got 0.0"),
    # processes
    ({"parallel": {"timeout": float("inf")}}, "parallel.timeout must be a .*number"),
    ({"task": "probe", "parallel": CONTEXT}, "parallel.context=2 needs task=language, got task=probe"),
    ({"batch": {"length": 33}, "parallel": CONTEXT}, "batch.length=33 must be a multiple of parallel.context=2"),
    ({"lora": LORA, "parallel": {"shard": True}}, "parallel.shard=true doesn't support LoRA"),
    ({"lora": LORA, "parallel": CONTEXT}, "parallel.context=2 doesn't support LoRA"),
    ({"data": {"pack": "documents"}, "parallel": CONTEXT}, "doesn't support packed documents: set data.pack=stream"),
    ({"model": {"dropout": 0.1}, "parallel": CONTEXT}, "doesn't support dropout.*set model.dropout=0"),
    ({"model": {"attention_dropout": 0.1}, "parallel": CONTEXT}, "set model.attention_dropout=0, got 0.1"),
    # LoRA
    ({"lora": {"alpha": 3}}, "lora.alpha=3 has no effect with lora.rank=0"),
    ({"lora": {"targets": ["query"]}}, r"lora.targets=\['query'\] has no effect"),
    ({"lora": {"rank": 2}}, "lora.rank=2 needs lora.base"),
    ({"lora": LORA | {"alpha": 0}}, "lora.alpha must be at least 1, got 0"),
    ({"lora": LORA | {"dropout": 1.0}}, "lora.dropout must be at least 0 and below 1, got 1.0"),
    ({"task": "classify", "lora": LORA, "pretrain": {"kind": "denoise"}}, "can't be combined with pretraining"),
    # tasks
    ({"task": "classify", "data": {"path": "x"}}, "data.path='x' has no effect with task=classify; leave it out"),
    ({"task": "probe", "classify": {"seed": 1}}, "classify.seed=1 has no effect with task=probe; leave it out"),
    ({"image": {"path": "x"}}, "image.path='x' has no effect with task=language; leave it out"),
    ({"pretrain": {"kind": "denoise"}}, "pretrain.kind='denoise' has no effect with task=language; leave it out"),
    ({"task": "pretrain"}, "task=pretrain needs pretrain.kind=denoise or causal, got none"),
    ({"task": "classify", "model": {"loops": 2}}, "loops=2 has no meaning for an encoder"),
    ({"task": "classify", "pretrain": {"mask_fraction": 0.0}}, "mask_fraction must be above 0 and below 1, got 0.0"),
    ({"task": "probe", "batch": {"length": 24}}, "mqar with pairs=8 needs sequences of at least 25 tokens"),
]
for rule, value, settings in RANGES:
    for group, _, name in (setting.partition(".") for setting in settings.split()):
        case = {"task": TASKS.get(group, "language"), group: {name: value}}
        REFUSED.append((case, f"{group}.{name} must {rule}.*, got {value}"))


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_settings_that_cannot_be_trained_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


def test_settings_at_the_limits_are_accepted_and_survive_yaml(tmp_path):
    model = DecoderConfig(position="learned", max_positions=128)
    assert TrainConfig(model=model, batch=BatchConfig(length=128)).batch.length == 128
    assert TrainConfig(lora=LoraConfig(**LORA), parallel=ParallelConfig(timeout=5.0)).parallel.timeout == 5.0
    given = DataConfig(cache="here").to_dict()  # the cache may be set for any task
    assert TrainConfig.from_dict({"task": "classify", "data": given}).classify == ClassifyConfig()
    assert TrainConfig(batch=BatchConfig(length=64, size=3, accumulation=2)).step_tokens == 384
    optimizer = OptimizerConfig(name="muon", betas=[0.8, 0.99])
    config = TrainConfig(optimizer=optimizer, schedule=ScheduleConfig(kind="wsd"))
    config.to_file(tmp_path / "config.yaml")
    assert TrainConfig.from_file(tmp_path / "config.yaml") == config
