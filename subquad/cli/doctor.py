"""`subquad doctor`: what this machine has, which backend each engine takes on it, and which extras are missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from subquad import ops
from subquad.cli import NEEDED
from subquad.cli.parser import PlainParser
from subquad.cli.tables import print_table, print_text, size
from subquad.evaluation.provenance import machine, versions
from subquad.extras import INCLUDES, PACKAGES, included, is_installed
from subquad.memory import total_bytes
from subquad.ops.backends import defaults_taken, no_kernels
from subquad.program import install

SHOWN = ("safetensors", "tokenizers", "transformers", "accelerate", "peft")
"""Packages whose versions are shown beside those of `versions`."""
ENGINES: list[Callable[[Tensor, Tensor], object]] = [
    lambda x, beta: ops.gated_scan(x, x, x, None),
    lambda x, beta: ops.running_softmax(x, x, x),
    lambda x, beta: ops.delta_scan(x, x, x, beta, None),
    lambda x, beta: ops.block_attention(x, x, x, ops.patterns.Causal()),
]
"""A call of each engine on a tensor `[B, H, T, K]`, and one with a single channel."""
COMPILERS = {"C++ compiler, for torch.compile": ("c++", "g++", "clang++"), "C compiler, for Triton": ("gcc", "clang")}
USES = {
    "hf": "subquad.hf in your own program",
    "eval": "subquad eval --tasks",
    "datasets": "data of the Hub (hf:NAME)",
    "testing": "AttentionContract in tests of your own",
    "triton": "kernels on a GPU, or in Triton's interpreter",
}
"""What an extra is for beside whole commands."""


def run(arguments: Sequence[str]) -> int:
    """Parse, print, return the exit status."""
    parser = PlainParser("doctor", "What this machine has, which backend each engine takes on it, and what is missing.")
    parser.parse_args(arguments)
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    print_table("versions", ("package", "version"), list(versions(SHOWN).items()), justify="left")
    print_table("machine", ("what", "found"), list(found(devices)), text="found", justify="left")
    rows = [row for device in devices for row in engines(device)]
    print_table("engines, in float32", ("engine", "device", "backend", "why"), rows, text="why", justify="left")
    print_table("extras", ("extra", "for", "includes", "missing"), list(extras()), text="for", justify="left")
    print_text(f"An extra is installed by {install('subquad[EXTRA]')}", wraps=False)
    return 0


def found(devices: Sequence[torch.device]) -> Iterator[tuple[str, str]]:
    """Yield what the machine has: the processor, threads, memory, GPUs and compilers."""
    cpu = machine("cpu")
    yield "processor", f"{cpu['cpu']}, {cpu['cores']} cores, {torch.backends.cpu.get_cpu_capability()}"
    variable = os.environ.get("OMP_NUM_THREADS")
    yield "threads", f"{cpu['threads']}" + (f" (OMP_NUM_THREADS={variable})" if variable else "")
    if cpu["memory_bytes"] is not None:
        yield "memory", size(cpu["memory_bytes"])
    for device in devices[1:]:
        major, minor = torch.cuda.get_device_capability(device)
        memory = size(total_bytes(device) or 0)
        yield str(device), f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, {memory}"
    if len(devices) == 1:
        yield "GPUs", "none that PyTorch can use" if torch.version.cuda else "none: PyTorch is built without CUDA"
    for what, names in COMPILERS.items():
        paths = filter(None, map(shutil.which, names))
        yield what, next(paths, f"none of {', '.join(names)} is found")


def engines(device: torch.device) -> Iterator[tuple[str, str, str, str]]:
    """Yield each engine, the device, the backend that the engine itself takes there, and why."""
    with defaults_taken() as taken, FakeTensorMode():  # fake: nothing is computed or compiled
        x, beta = (torch.empty(1, 1, 16, channels, device=device) for channels in (16, 1))
        for call in ENGINES:
            call(x, beta)
    for engine, backend in taken.items():
        yield engine, str(device), backend, no_kernels(device) or "a GPU with tensor cores"


def extras() -> Iterator[tuple[str, str, str, str]]:
    """Yield each extra, what it is for, the one that it includes, and the packages of all that are missing."""
    for extra in PACKAGES:
        commands = [f"subquad {name}" for name, needed in NEEDED.items() if needed == extra]
        uses = [*commands, *filter(None, [USES.get(extra)])]
        lacks = [package for part in included(extra) for package in PACKAGES[part] if not is_installed(package)]
        yield extra, ", ".join(uses), INCLUDES.get(extra, ""), ", ".join(lacks) or "nothing"
