"""Contents of checkpoints and final models: whole after any crash, refused if a part is missing."""

import errno
import itertools
import os
import random
import resource
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from subquad.checksums import CHECKSUMS
from subquad.training import checkpoint, train
from subquad.training.errors import CheckpointError, SaveError
from subquad.training.processes import Processes
from subquad.training.saving import Checkpoints, TrainerState, load_rng, save_rng
from subquad.training.task import weights_file
from tests.training.helpers import assert_same_weights, raising, steps_of

MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors", "modeling_subquad.py"}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "base.json"}


class Crash(BaseException):
    """The process ends here."""


def crashes(work, number):
    """Run `work` until its call `number` that renames or deletes a file; return whether it came so far."""
    left = number

    def crashing(call):
        def counted(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash
            return call(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "unlink", "rmdir"):  # `shutil.rmtree` and `Path` call these
            patch.setattr(os, name, crashing(getattr(os, name)))
        try:
            work()
        except Crash:
            return True
    return False


def checkpoints_in(root, names=MODEL_FILES, keep=1):
    """Make the checkpoints of a model of one number."""

    def save_weights(model, folder, weights):
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).write_text(name)

    config = SimpleNamespace(run=SimpleNamespace(keep=keep))
    task: Any = SimpleNamespace(save_weights=save_weights, config=config, files={})
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Checkpoints(root, task, model, optimizer, scheduler, Processes(), {})


@pytest.mark.parametrize("again", [False, True])
def test_a_crash_at_any_moment_of_a_save_leaves_a_complete_checkpoint(tmp_path, again):
    """Of the next step, which then rotates the last one away, or of the same step, which replaces it."""
    last = 1 if again else 2
    for number in itertools.count(1):
        root = tmp_path / str(number)
        checkpoints = checkpoints_in(root)
        checkpoints.save(TrainerState(step=1))
        crashed = crashes(lambda saving=checkpoints: saving.save(TrainerState(step=last)), number)
        if not again:
            assert checkpoint.newest_complete(root) is not None
        checkpoint.sweep(root)
        assert checkpoint.newest_complete(root) is not None
        checkpoints.save(TrainerState(step=last))
        assert steps_of(root) == [last]
        if not crashed:
            break
    assert number > 8, "manifest, folder, and each file of the old one"


@pytest.mark.parametrize("names", [MODEL_FILES, ADAPTER_FILES])
def test_a_final_model_that_has_its_configuration_has_all_its_files_after_any_crash(tmp_path, names):
    configuration = names & {"config.json", "adapter_config.json"}
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        checkpoints = checkpoints_in(folder / "checkpoints", names)
        crashed = crashes(lambda saving=checkpoints, at=folder: saving.save_final(at), number)
        there = names & {path.name for path in folder.iterdir()}
        assert there == names if configuration <= there else crashed
        checkpoints.save_final(folder)
        assert {path.name for path in folder.iterdir()} == {*names, CHECKSUMS}
        if not crashed:
            break
    assert number > len(names)


@pytest.mark.parametrize("part", ["write_weights", "write_optimizer"])
def test_a_save_without_room_leaves_nothing_and_the_older_ones(make_config, tmp_path, finished, monkeypatch, part):
    save, limits = getattr(Checkpoints, part), resource.getrlimit(resource.RLIMIT_FSIZE)

    def without_room(self, folder, *args):
        largest_file = 5_000 if folder.name.endswith("checkpoint-4") else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, limits[1]))
        try:
            save(self, folder, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, part, without_room)
        with pytest.raises(SaveError, match=r"step 4 could not be written.*It was deleted;.*checkpoint-2"):
            train(make_config())
    assert steps_of(tmp_path / "run" / "checkpoints") == [2]
    assert train(make_config()).steps == 4
    assert_same_weights(finished.folder, tmp_path / "run")


def test_a_final_model_without_room_is_not_left_half_and_other_errors_are_not_called_a_full_disk(
    run_at_4, make_config, tmp_path, monkeypatch
):
    save, model = Checkpoints.write_weights, {"model.safetensors", "config.json"}
    for name in model:
        (run_at_4 / name).unlink()
    full = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(Checkpoints, "write_weights", lambda *args: (save(*args), full()))
    with pytest.raises(SaveError, match=r"the final model could not be written.*No space left.*checkpoint-4"):
        train(make_config())
    assert not {".saving-model", *model} & {path.name for path in run_at_4.iterdir()}
    monkeypatch.setattr(Checkpoints, "write_weights", raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        checkpoints_in(tmp_path / "checkpoints").save(TrainerState(step=1))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_checkpoint_without_one_of_its_files_is_not_loaded(tmp_path, name):
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(TrainerState(step=1))
    (tmp_path / "checkpoint-1" / name).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {name}, and resuming without it would change the run"):
        checkpoints.load(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        weights_file(tmp_path)


def test_random_generators_come_back(tmp_path):
    def draw():
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]

    draw()
    np.random.randn()  # leaves a cached second value
    save_rng(tmp_path / "rng.safetensors")
    expected = draw()
    load_rng(tmp_path / "rng.safetensors")
    assert draw() == expected
    (tmp_path / "rng.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_rng(tmp_path / "rng.safetensors")
    with pytest.raises(CheckpointError, match="use as many processes as made the checkpoint"):
        load_rng(tmp_path / "absent.safetensors")


def test_nothing_pickled_is_saved(finished):
    folder = finished.folder / "checkpoints" / "checkpoint-4"
    pickles = {"optimizer.pt", "scheduler.pt"}
    plain = MODEL_FILES | {"manifest.json", "rng_state_0.safetensors", "trainer_state.json"}
    plain |= {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == pickles | plain
    for name in pickles:
        torch.load(folder / name, weights_only=True)


def test_whoever_may_read_new_files_may_read_all_of_a_run(make_config, tmp_path):
    before = os.umask(0o027)
    try:
        train(make_config(steps=2, eval_every=0))
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"model.safetensors", "manifest.json", "optimizer.pt"} <= {path.name for path in files}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {p.name: "0o640" for p in files}
