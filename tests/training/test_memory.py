"""Steps that run out of memory: the error names what was tried and what would fit."""

import functools
import re
from pathlib import Path

import pytest
import torch

from subquad.memory import is_out_of_memory
from subquad.models import build_model
from subquad.training import train
from subquad.training.config import LoraConfig, ParallelConfig
from subquad.training.errors import StepMemoryError
from subquad.training.loop import Loop
from subquad.training.memory import check_fits, explained, free_bytes, largest_fit, part_bytes
from subquad.training.tasks_text import LanguageTask
from tests.training.helpers import python, raising

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


def test_a_step_out_of_memory_says_what_was_tried_and_what_fits(make_config, monkeypatch):
    error = OUT_OF_MEMORY[1]
    monkeypatch.setattr(Loop, "loss", raising(error))
    with pytest.raises(StepMemoryError) as caught:
        train(make_config())
    text = str(caught.value)
    assert text.startswith("out of memory in a step of batch.size=4 windows of batch.length=32 tokens ([enforce fail")
    assert "batch.size=2 with batch.accumulation=4 sees the same windows in each step and should fit" in text
    assert "run.activation_checkpointing=true" in text
    assert caught.value.__cause__ is error
    assert not Path(make_config().run.folder).exists()

    assert all(is_out_of_memory(error) for error in OUT_OF_MEMORY)
    assert not is_out_of_memory(ValueError("out of memory"))
    monkeypatch.setattr(Loop, "loss", raising(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train(make_config())
    monkeypatch.setattr(Loop, "loss", raising(error))
    with pytest.raises(StepMemoryError):
        train(make_config())
    assert (Path(make_config().run.folder) / "config.yaml").is_file()  # of an earlier run


def test_a_model_larger_than_the_machine_is_refused_before_any_text_is_read(make_config, monkeypatch):
    config = make_config()
    with torch.device("meta"):
        model = build_model(config.model)
    need = 8 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr("subquad.memory.total_bytes", lambda device: need - 1)
    with pytest.raises(ValueError, match=r"out of memory: [\d,]+ parameters take .* lower model.dim=16 or"):
        check_fits(model, config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_fits(model, config.replace(parallel=ParallelConfig(shard=True)))
    check_fits(model, config.replace(lora=LoraConfig(rank=2, base="x")))
    for total in (need, None):
        monkeypatch.setattr("subquad.memory.total_bytes", lambda device, total=total: total)
        check_fits(model, config)


def test_the_estimate_is_the_models_own_and_the_largest_equal_part_that_fits_is_named(make_config, monkeypatch):
    assert [largest_fit(12, 1, free) for free in (0.5, 1, 2.5, 5, 100)] == [None, 1, 2, 4, 6]
    assert largest_fit(1, 1, 100) is None
    config = make_config({"model.dropout": 0.0})
    kept = functools.cache(lambda length: LanguageTask.window_bytes(config, length))

    def account(config, length):
        return kept(length)

    need, longer = (part_bytes(config, length, account) for length in (32, 64))
    assert longer > need > 0
    assert part_bytes(config.replace(parallel=ParallelConfig(context=2)), 32, account) == need / 2
    assert part_bytes(make_config(activation_checkpointing=True), 32, account) is None
    assert free_bytes(torch.device("cpu")) > 0
    alone = make_config({"batch.size": 1}, activation_checkpointing=True)
    for left, given, said in (
        (3 * need, config, "batch.size=2 with batch.accumulation=4 sees the same windows in each step and should fit"),
        (need, config, "batch.size=1 with batch.accumulation=8"),
        (0, config, "Fewer windows at a time don't help: try run.activation_checkpointing=true, a shorter"),
        (need / 1.5, config, "true, batch.length=16, which should fit, or more"),
        (None, config, "batch.size=2 with batch.accumulation=4 sees the same windows in each step and needs less"),
        (None, alone, "MemoryError). Try a shorter batch.length"),
    ):
        monkeypatch.setattr("subquad.training.memory.free_bytes", lambda device, left=left: left)
        assert said in str(explained(MemoryError(), given, torch.device("cpu"), account))


@pytest.mark.slow
def test_a_process_with_little_memory_says_what_fits(make_config, tmp_path):
    make_config({"batch.length": 128, "batch.size": 4096, "model.dim": 64}).to_file(tmp_path / "config.yaml")
    code = (
        "import resource, torch, subquad.training.loop, torch.utils.tensorboard\n"
        "from subquad.cli import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))\n"
        "raise SystemExit(main(['train', '--config', 'config.yaml']))"
    )
    result = python("-c", code, timeout=150, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "error: out of memory in a step of batch.size=4096 windows of batch.length=128 tokens" in result.stderr
    assert re.search(r"batch.size=\d+ with batch.accumulation=\d+ sees the same windows", result.stderr)
