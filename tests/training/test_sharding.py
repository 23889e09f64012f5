"""Files of sharded models that do not fit are refused. What fits is in test_distributed.py."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from subquad.training import sharding
from subquad.training.errors import CheckpointError
from tests.training.helpers import raising


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters())


def test_weights_of_another_model_are_refused(model, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    with pytest.raises(CheckpointError, match=r"doesn't match the model's weights: bias"):
        sharding.load_weights(nn.Linear(3, 2, bias=False), file)
    with pytest.raises(CheckpointError, match=r"has the shape \[2(, 3)?\], but the model needs \[4(, 3)?\]"):
        sharding.load_weights(nn.Linear(3, 4), file)


def write_states(folder, states, listed):
    (folder / "optimizer").mkdir()
    save_file(states, folder / "optimizer" / "states.safetensors")
    (folder / "optimizer" / "names.json").write_text(json.dumps(listed))


@pytest.mark.parametrize(("states", "listed", "message"), [
    ({"gate.exp_avg": 2}, ["gate.exp_avg"], "has a state of gate, which the model lacks"),
    ({"bias.exp_avg": 2}, ["bias.exp_avg", "x"], r"does not have the states that its names\.json lists"),
    ({"bias.exp_avg": 5}, ["bias.exp_avg"], r"bias\.exp_avg of shape \[5\], but the weight has shape \[2\]"),
])  # fmt: skip
def test_states_of_other_parameters_are_refused(model, tmp_path, states, listed, message):
    write_states(tmp_path, {name: torch.rand(size) for name, size in states.items()}, listed)
    with pytest.raises(CheckpointError, match=message):
        sharding.load_optimizer(model, optimizer_of(model), tmp_path)


def test_whole_states_of_other_parameters_are_refused(model, tmp_path):
    made = optimizer_of(model)
    model(torch.rand(1, 3)).sum().backward()
    made.step()
    torch.save(made.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="has states of 2 parameters, but the model has 1"):
        sharding.spread_optimizer(optimizer_of(nn.Linear(3, 2, bias=False)), tmp_path / "optimizer.pt")


def test_errors_of_torchs_checkpoints_name_the_process(model, tmp_path, monkeypatch):
    write_states(tmp_path, {"bias.exp_avg": torch.rand(2)}, ["bias.exp_avg"])
    short, full = ValueError("it is cut short"), OSError(28, "No space left on device")
    monkeypatch.setattr(sharding.dcp, "load", raising(CheckpointException("load", {1: (short, [])})))
    with pytest.raises(CheckpointError, match=r"optimizer cannot be read: in process 1: it is cut short"):
        sharding.load_optimizer(model, optimizer_of(model), tmp_path)
    monkeypatch.setattr(sharding.dcp, "save", raising(CheckpointException("save", {1: (full, None)})))
    with pytest.raises(OSError, match=r"in process 1: \[Errno 28\] No space left on device"):
        sharding.save_optimizer(model, optimizer_of(model), tmp_path)
