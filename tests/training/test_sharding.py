"""Files of shared-out models that do not fit are refused. What fits is in test_distributed.py."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from subquad.testing import assert_exact
from subquad.training import sharding
from subquad.training.errors import CheckpointError


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


def test_weights_of_another_model_are_refused(model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in model.state_dict().items()}, file)
    sharding.load_weights(nn.Linear(3, 2), file)
    with pytest.raises(CheckpointError, match=r"holds other weights than the model: bias"):
        sharding.load_weights(nn.Linear(3, 2, bias=False), file)
    with pytest.raises(
        CheckpointError, match=r"has the shape \[2\], the model \[4\]|has the shape \[2, 3\], the model \[4, 3\]"
    ):
        sharding.load_weights(nn.Linear(3, 4), file)


def write_states(folder: Path, states: dict[str, torch.Tensor], listed: list[str]) -> None:
    (folder / "optimizer").mkdir()
    save_file(states, folder / "optimizer" / "states.safetensors")
    (folder / "optimizer" / "names.json").write_text(json.dumps(listed))


def test_states_are_read_by_the_names_of_their_parameters(model: nn.Module, tmp_path: Path) -> None:
    states = {"weight.exp_avg": torch.rand(2, 3), "weight.step": torch.tensor(3.0), "bias.exp_avg": torch.rand(2)}
    write_states(tmp_path, states, sorted(states))
    optimizer = optimizer_of(model)
    sharding.load_optimizer(model, optimizer, tmp_path)
    named = {"weight": model.weight, "bias": model.bias}
    for key, value in states.items():
        name, _, part = key.partition(".")
        assert_exact(optimizer.state[named[name]][part], value, key)


def test_states_of_other_parameters_are_refused(model: nn.Module, tmp_path: Path) -> None:
    write_states(tmp_path, {"gate.exp_avg": torch.rand(2)}, ["gate.exp_avg"])
    with pytest.raises(CheckpointError, match="holds the state of gate, which the model has not"):
        sharding.load_optimizer(model, optimizer_of(model), tmp_path)


def test_states_that_lack_one_are_refused(model: nn.Module, tmp_path: Path) -> None:
    write_states(tmp_path, {"bias.exp_avg": torch.rand(2)}, ["bias.exp_avg", "weight.exp_avg"])
    with pytest.raises(CheckpointError, match=r"does not hold the states that its names\.json lists"):
        sharding.load_optimizer(model, optimizer_of(model), tmp_path)


def test_a_state_that_is_no_number_and_not_its_weights_shape_is_refused(model: nn.Module, tmp_path: Path) -> None:
    write_states(tmp_path, {"bias.exp_avg": torch.rand(5)}, ["bias.exp_avg"])
    with pytest.raises(CheckpointError, match=r"has bias\.exp_avg of the shape \[5\], and the weight has \[2\]"):
        sharding.load_optimizer(model, optimizer_of(model), tmp_path)


def test_a_share_that_cannot_be_read_is_named(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_states(tmp_path, {"bias.exp_avg": torch.rand(2)}, ["bias.exp_avg"])

    def fail(*args: object, **kwargs: object) -> None:
        raise CheckpointException("it is cut short", {1: (ValueError("it is cut short"), [])})  # type: ignore[dict-item]

    monkeypatch.setattr(sharding.dcp, "load", fail)
    with pytest.raises(CheckpointError, match=r"optimizer cannot be read: in process 1: it is cut short"):
        sharding.load_optimizer(model, optimizer_of(model), tmp_path)


def test_whole_states_are_shared_out_by_place(model: nn.Module, tmp_path: Path) -> None:
    made = optimizer_of(model)
    model(torch.rand(1, 3)).sum().backward()
    made.step()
    torch.save(made.state_dict(), tmp_path / "optimizer.pt")
    fresh = optimizer_of(model)
    sharding.spread_optimizer(fresh, tmp_path / "optimizer.pt")
    for parameter in model.parameters():
        for key, value in made.state[parameter].items():
            assert_exact(fresh.state[parameter][key], value, key)
    with pytest.raises(CheckpointError, match="holds the states of 2 parameters, the model has 1"):
        sharding.spread_optimizer(optimizer_of(nn.Linear(3, 2, bias=False)), tmp_path / "optimizer.pt")


def test_what_fails_in_torchs_saving_is_an_error_of_the_system(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise CheckpointException("write", {1: (OSError(28, "No space left on device"), None)})  # type: ignore[dict-item]

    monkeypatch.setattr("torch.distributed.checkpoint.save", fail)
    with pytest.raises(OSError, match=r"in process 1: \[Errno 28\] No space left on device"):
        sharding.save_optimizer(model, optimizer_of(model), tmp_path)
