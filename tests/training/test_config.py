"""The training configuration: strict, light to import, and refusing what can't be trained."""

import subprocess
import sys

import pytest

from subquad.models.config import DecoderConfig
from subquad.training import BatchConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": {"lr": 0.0}}, "optimizer.lr must be a positive number, got 0.0"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr must be a number, got nan"),
        ({"optimizer": {"eps": -1.0}}, "optimizer.eps must be a positive number"),
        ({"optimizer": {"matrix_lr": -1.0}}, "optimizer.matrix_lr must be a positive number"),
        ({"optimizer": {"weight_decay": -0.1}}, "optimizer.weight_decay must be at least 0, got -0.1"),
        ({"optimizer": {"clip": -1.0}}, "optimizer.clip must be at least 0"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas must be two numbers"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas must be two numbers"),
        ({"optimizer": {"momentum": 1.0}}, "optimizer.momentum must be at least 0 and below 1"),
        ({"optimizer": {"name": "adamm"}}, "did you mean 'adam"),
        ({"batch": {"length": 1}}, "batch.length must be at least 2, got 1"),
        ({"batch": {"size": 0}}, "batch.size must be at least 1, got 0"),
        ({"batch": {"accumulation": 0}}, "batch.accumulation must be at least 1, got 0"),
        ({"run": {"steps": 0}}, "run.steps must be at least 1, got 0"),
        ({"run": {"keep": 0}}, "run.keep must be at least 1, got 0"),
        ({"run": {"max_minutes": 0.0}}, "run.max_minutes must be a positive number"),
        ({"run": {"prompt": ""}}, "run.prompt must hold some text for the samples to go on from, got ''"),
        ({"run": {"threads": 0}}, "run.threads must be at least 1, got 0"),
        ({"run": {"sample_temperature": 0.0}}, "run.sample_temperature must be a positive number"),
        ({"run": {"folder": ""}}, "run.folder must name a folder"),
        ({"run": {"steps": 10}, "schedule": {"warmup": 10}}, "schedule.warmup must be below run.steps=10, got 10"),
        ({"run": {"stepz": 10}}, "no key 'run.stepz'; did you mean 'steps'"),
        ({"modle": {}}, "no key 'modle'; did you mean 'model'"),
    ],
)
def test_bad_values_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


def test_windows_longer_than_learned_positions_are_refused_before_training() -> None:
    model = DecoderConfig(position="learned", max_positions=128)
    with pytest.raises(
        ValueError, match=r"batch.length 256 is longer than the model can take.*model.max_positions=128"
    ):
        TrainConfig(model=model, batch=BatchConfig(length=256))
    assert TrainConfig(model=model, batch=BatchConfig(length=128)).batch.length == 128


def test_it_survives_yaml(tmp_path) -> None:
    config = TrainConfig(
        optimizer=OptimizerConfig(name="muon", betas=[0.8, 0.99]),
        schedule=ScheduleConfig(kind="wsd"),
        run=RunConfig(folder=str(tmp_path / "run"), max_minutes=1.5),
    )
    config.to_file(tmp_path / "config.yaml")
    assert TrainConfig.from_file(tmp_path / "config.yaml") == config


def test_step_tokens_count_the_accumulation() -> None:
    assert TrainConfig(batch=BatchConfig(length=64, size=3, accumulation=2)).step_tokens == 384


def test_importing_the_configuration_loads_nothing_heavy() -> None:
    code = "import sys, subquad.training; print(sorted({'accelerate', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_unknown_names_of_the_package_are_answered() -> None:
    import subquad.training

    with pytest.raises(AttributeError, match=r"has no attribute 'trian'; it has .*train"):
        subquad.training.trian  # noqa: B018 (the attribute access is what is tested)
