"""The random number generators of a process in one safetensors file, which can hold nothing that runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from subquad.parsing import parse_json
from subquad.training.errors import CheckpointError


def rng_file(folder: Path, process: int) -> Path:
    """The file that holds the generators of one process."""
    return folder / f"rng_state_{process}.safetensors"


def rng_files(folder: Path) -> list[Path]:
    """Those files of all processes."""
    return sorted(folder.glob("rng_state_*.safetensors"))


def begin_rng(seed: int, process: int, step: int = 0) -> None:
    """Set all generators to numbers of their own for a process and a step; process 0 at step 0 begins with `seed`."""
    words = np.random.SeedSequence((seed, process, step)).generate_state(1)
    number = int(words[0]) if process or step else seed
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def save_rng(path: Path) -> None:
    """Write the states of Python's, NumPy's and PyTorch's generators."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors: dict[str, Tensor] = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    numbers = {"python": [version, gauss], "numpy": [str(name), int(position), int(has_gauss), float(cached)]}
    save_file(tensors, path, metadata={"numbers": json.dumps(numbers)})


def load_rng(path: Path) -> None:
    """Set all generators to what `save_rng` wrote; `CheckpointError` where the file is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: this process can't go on with the same random numbers; "
            "resume with as many processes as made the checkpoint"
        )
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
            numbers: dict[str, Any] = parse_json(file.metadata()["numbers"], "its numbers")
        version, gauss = numbers["python"]
        name, position, has_gauss, cached = numbers["numpy"]
        random.setstate((version, tuple(tensors["python"].tolist()), gauss))
        np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(tensors["torch"])
        if torch.cuda.is_available() and "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"])
    except Exception as error:  # each generator checks its own state, in its own way
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
