"""The training configuration: strict, and refusing what can't be trained before anything is read."""

from typing import Any

import pytest

from subquad import training
from subquad.data import DataConfig
from subquad.models.config import DecoderConfig
from subquad.training import BatchConfig, ClassifyConfig, LoraConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from subquad.training.config import ParallelConfig

LORA, CONTEXT = {"rank": 2, "base": "x"}, {"context": 2}
TOO_LONG = {"model": {"position": "learned", "max_positions": 128}, "batch": {"length": 256}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"modle": {}}, "no key 'modle'; did you mean 'model'"),
    ({"task": "label"}, "task must be one of its choices, got 'label'; valid: classify, image, language"),
    (TOO_LONG, r"batch.length=256 is longer than the 128 positions of .*raise model.max_positions"),
    ({"optimizer": {"lr": 0.0}}, "optimizer.lr must be a positive number, got 0.0"),
    ({"optimizer": {"lr": float("nan")}}, "optimizer.lr must be a number, got nan"),
    ({"optimizer": {"eps": -1.0}}, "optimizer.eps must be a positive number"),
    ({"optimizer": {"matrix_lr": -1.0}}, "optimizer.matrix_lr must be a positive number"),
    ({"optimizer": {"weight_decay": -0.1}}, "optimizer.weight_decay must be at least 0, got -0.1"),
    ({"optimizer": {"clip": -1.0}}, "optimizer.clip must be at least 0"),
    ({"optimizer": {"betas": [0.9]}}, "optimizer.betas must be two numbers"),
    ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas must be two numbers"),
    ({"optimizer": {"momentum": 1.0}}, "optimizer.momentum must be at least 0 and below 1"),
    ({"schedule": {"warmup": -1}}, "schedule.warmup must be at least 0, got -1"),
    ({"schedule": {"min_ratio": 1.5}}, "schedule.min_ratio must lie between 0 and 1, got 1.5"),
    ({"schedule": {"decay_fraction": -0.1}}, "schedule.decay_fraction must lie between 0 and 1, got -0.1"),
    ({"schedule": {"warmup": 10, "hold": 5}}, "schedule.hold must be at least 10, got 5"),
    ({"run": {"steps": 10}, "schedule": {"warmup": 10}}, "schedule.warmup must be below run.steps=10, got 10"),
    ({"batch": {"length": 1}}, "batch.length must be at least 2, got 1"),
    ({"batch": {"size": 0}}, "batch.size must be at least 1, got 0"),
    ({"batch": {"accumulation": 0}}, "batch.accumulation must be at least 1, got 0"),
    ({"run": {"stepz": 10}}, "no key 'run.stepz'; did you mean 'steps'"),
    ({"run": {"steps": 0}}, "run.steps must be at least 1, got 0"),
    ({"run": {"keep": 0}}, "run.keep must be at least 1, got 0"),
    ({"run": {"max_minutes": 0.0}}, "run.max_minutes must be a positive number"),
    ({"run": {"prompt": ""}}, "run.prompt must not be empty, got ''"),
    ({"run": {"threads": 0}}, "run.threads must be at least 1, got 0"),
    ({"run": {"sample_temperature": 0.0}}, "run.sample_temperature must be a positive number"),
    ({"run": {"folder": ""}}, "run.folder must name a folder"),
    ({"run": {"nonfinite_limit": 0}}, "run.nonfinite_limit must be at least 1, got 0"),
    ({"run": {"trackers": ["comet"]}}, r"run\.trackers\[0\] must be one of its choices, got 'comet'"),
    ({"data": {"workers": -1}}, "workers must be at least 0, got -1"),
    ({"data": {"worker_timeout": 0.0}}, "worker_timeout must be a positive number of seconds, got 0.0"),
    # processes
    ({"parallel": {"context": 0}}, "parallel.context must be at least 1, got 0"),
    ({"parallel": {"timeout": 0.0}}, "parallel.timeout must be a positive number of seconds, got 0.0"),
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
    ({"lora": {"base": "runs/x"}}, "lora.base='runs/x' has no effect with lora.rank=0"),
    ({"lora": {"targets": ["query"]}}, r"lora.targets=\['query'\] has no effect"),
    ({"lora": {"rank": -1}}, "lora.rank must be at least 0, got -1"),
    ({"lora": {"rank": 2}}, "lora.rank=2 needs lora.base"),
    ({"lora": LORA | {"alpha": 0}}, "lora.alpha must be at least 1, got 0"),
    ({"lora": LORA | {"dropout": 1.0}}, "lora.dropout must be at least 0 and below 1, got 1.0"),
    ({"task": "classify", "lora": LORA, "pretrain": {"kind": "denoise"}}, "can't be combined with pretraining"),
    # tasks
    ({"task": "classify", "data": {"path": "x"}}, "data.path='x' has no effect with task=classify; leave it out"),
    ({"task": "classify", "probe": {"pairs": 4}}, "probe.pairs=4 has no effect with task=classify; leave it out"),
    ({"task": "probe", "classify": {"seed": 1}}, "classify.seed=1 has no effect with task=probe; leave it out"),
    ({"image": {"path": "x"}}, "image.path='x' has no effect with task=language; leave it out"),
    ({"pretrain": {"kind": "denoise"}}, "pretrain.kind='denoise' has no effect with task=language; leave it out"),
    ({"task": "pretrain"}, "task=pretrain needs pretrain.kind=denoise or causal, got none"),
    ({"task": "classify", "model": {"loops": 2}}, "an encoder has neither loops nor a look-up head"),
    ({"task": "classify", "classify": {"held_out": 0}}, "classify.held_out must be at least 1, got 0"),
    ({"task": "classify", "classify": {"seed": -1}}, "classify.seed must be at least 0, got -1"),
    ({"task": "classify", "pretrain": {"steps": 0}}, "pretrain.steps must be at least 1, got 0"),
    ({"task": "classify", "pretrain": {"lr": 0.0}}, "pretrain.lr must be a positive number, got 0.0"),
    ({"task": "classify", "pretrain": {"mask_fraction": 0.0}}, "mask_fraction must be above 0 and below 1, got 0.0"),
    ({"task": "classify", "pretrain": {"mask_fraction": 1.0}}, "mask_fraction must be above 0 and below 1, got 1.0"),
    ({"task": "classify", "pretrain": {"random_fraction": 1.5}}, "random_fraction must lie between 0 and 1, got 1.5"),
    ({"task": "classify", "pretrain": {"joint_weight": -1.0}}, "pretrain.joint_weight must be at least 0, got -1.0"),
    ({"task": "image", "image": {"mixtures": 0}}, "image.mixtures must be at least 1, got 0"),
    ({"task": "image", "image": {"near": -1}}, "image.near must be at least 0, got -1"),
    ({"task": "image", "image": {"test_images": 0}}, "image.test_images must be at least 1, got 0"),
    ({"task": "image", "image": {"samples": -1}}, "image.samples must be at least 0, got -1"),
    ({"task": "probe", "batch": {"length": 24}}, "mqar with pairs=8 needs sequences of at least 25 tokens"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_settings_that_cannot_be_trained_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


def test_settings_at_the_limits_are_accepted():
    model = DecoderConfig(position="learned", max_positions=128)
    assert TrainConfig(model=model, batch=BatchConfig(length=128)).batch.length == 128
    assert TrainConfig(lora=LoraConfig(**LORA), parallel=ParallelConfig(timeout=5.0)).parallel.timeout == 5.0
    given = DataConfig(cache="here").to_dict()  # the cache may be set for any task
    assert TrainConfig.from_dict({"task": "classify", "data": given}).classify == ClassifyConfig()
    assert TrainConfig(batch=BatchConfig(length=64, size=3, accumulation=2)).step_tokens == 384


def test_a_configuration_survives_yaml(tmp_path):
    optimizer = OptimizerConfig(name="muon", betas=[0.8, 0.99])
    config = TrainConfig(optimizer=optimizer, schedule=ScheduleConfig(kind="wsd"))
    config.to_file(tmp_path / "config.yaml")
    assert TrainConfig.from_file(tmp_path / "config.yaml") == config


def test_unknown_names_of_the_package_are_answered():
    with pytest.raises(AttributeError, match=r"has no attribute 'trian'; it has .*train"):
        training.trian  # noqa: B018 (the attribute access is what is tested)
