"""Measure what a token costs in a layer and in the rest of a model, and the link; predict other sizes from it.

The tables of docs/scale.md show both.

python -m benchmarks.scale    # two free cores, minutes; writes benchmarks/results/cpu_scale.json
"""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as distributed
from torch import multiprocessing

from benchmarks.memory import peak_bytes
from benchmarks.timing import Run, Timing, interleave
from subquad.evaluation.provenance import machine, versions
from subquad.memory import keep_freed_memory
from subquad.models import Decoder, DecoderConfig
from subquad.parallel import ContextGroup, context_parallel

RESULT = Path(__file__).parent / "results" / "cpu_scale.json"
MECHANISMS = ("full", "window", "llp", "linear", "latte", "elita")
DIM, HEADS, VOCAB = 256, 4, 256
LENGTHS, DEPTHS = (2048, 8192), (1, 3)
LAYERS = 12
"""Layers of the model whose cost is predicted."""
ROOM = 16 * 2**30
"""Memory of one process in bytes."""
STATE = 16
"""Bytes per parameter: weight, gradient and Adam's two moments, in float32."""
PROOF = 2**14
"""Tokens of the step that is both predicted and measured."""


def make_decoder(name: str, layers: int) -> Decoder:
    """Build a byte model that keeps only the input of each layer for the backward pass."""
    torch.manual_seed(0)
    position = "rope" if name in ("full", "window", "llp") else "none"
    options: dict[str, Any] = {"elita": {"horizon": PROOF}} if name == "elita" else {}
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "dim": DIM,
        "num_layers": layers,
        "num_heads": HEADS,
        "position": position,
    }
    decoder = Decoder(DecoderConfig(**shape, attention=name, options=options)).train()
    decoder.gradient_checkpointing = True
    return decoder


def measured() -> dict[str, Any]:
    """Measure everything that the tables need."""
    torch.set_num_threads(1)
    found = {name: of_mechanism(name) for name in MECHANISMS}
    link, proofs = together_measured()
    return {
        "machine": machine("cpu"),
        "versions": versions(),
        "mechanisms": found,
        "link": link,
        "proof": proofs,
    }


def of_mechanism(name: str) -> dict[str, float]:
    """Measure seconds and bytes per token, for one layer and for the rest of the model.

    The difference between two depths gives the cost of a layer. For full attention the difference between two lengths
    gives the part that grows with the length.
    """
    steps = {(depth, tokens): _step(make_decoder(name, depth), tokens) for depth in DEPTHS for tokens in LENGTHS}
    timed = interleave({key: Run(_run(step)) for key, step in steps.items()}, repeats=3)
    seconds = {key: found.median for key, found in timed.items() if isinstance(found, Timing)}
    peaks = {key: peak_bytes(step, "cpu") for key, step in steps.items()}
    sys.stderr.write(f"{name}: {seconds} {peaks}\n")
    few, many = DEPTHS
    short, long = LENGTHS
    layer = [(seconds[many, tokens] - seconds[few, tokens]) / (many - few) / tokens for tokens in LENGTHS]
    grows = max(0.0, (layer[1] - layer[0]) / (long - short)) if name == "full" else 0.0
    slopes = {depth: (peaks[depth, long] - peaks[depth, short]) / (long - short) for depth in DEPTHS}
    layer_bytes = (slopes[many] - slopes[few]) / (many - few)
    return {
        "layer_s": layer[1] - grows * long,
        "layer_s_per_token": grows,
        "rest_s": seconds[few, long] / long - layer[1],
        "layer_bytes": layer_bytes,
        "rest_bytes": slopes[few] - layer_bytes,
    }


def _run(step: Callable[[], None]) -> Callable[[Any], None]:
    return lambda _: step()


def _step(decoder: Decoder, tokens: int) -> Callable[[], None]:
    ids = torch.randint(0, VOCAB, (1, tokens + 1), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        decoder.zero_grad()
        decoder.loss(ids[:, :-1], ids[:, 1:]).backward()

    return step


def together_measured() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Measure the link between two processes, and a step of `PROOF` tokens on both for each mechanism."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_share, args=(rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    link, proofs = answers.get(timeout=3600)
    for process in processes:
        process.join()
    return link, proofs


def _share(rank: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = ContextGroup()
    large, small = 2**26, 8
    link = {"bytes_per_s": large / _there_and_back(rank, large), "latency_s": _there_and_back(rank, small)}
    proofs = {}
    for name in MECHANISMS:
        decoder = make_decoder(name, DEPTHS[1])
        ids = torch.randint(0, VOCAB, (1, PROOF + 1), generator=torch.Generator().manual_seed(1))
        part, labels = group.part(ids[:, :-1]), group.part(ids[:, 1:])

        def step(decoder: Decoder = decoder, part: torch.Tensor = part, labels: torch.Tensor = labels) -> None:
            decoder.zero_grad()
            with context_parallel(group):
                loss = decoder.loss(part, labels, reduction="sum") / PROOF
            loss.backward()

        taken = []
        for _ in range(3 if name != "full" else 2):  # the first step is slower: it allocates memory
            distributed.barrier()
            start = time.perf_counter()
            step()
            distributed.barrier()
            taken.append(time.perf_counter() - start)
        seconds = min(taken[1:])
        proofs[name] = {"seconds": seconds, "bytes": float(peak_bytes(step, "cpu"))}
        sys.stderr.write(f"process {rank}, {name}: {proofs[name]}\n")
    if rank == 1:  # the last rank has the most work in causal full attention
        answers.put((link, proofs))
    distributed.destroy_process_group()


def _there_and_back(rank: int, count: int) -> float:
    """Return the seconds that `count` bytes take from one process to the other."""
    message, taken = torch.zeros(count, dtype=torch.uint8), []
    for _ in range(9):
        distributed.barrier()
        start = time.perf_counter()
        for sender in (0, 1):
            distributed.send(message, 1) if rank == sender == 0 else None
            distributed.recv(message, 0) if rank == 1 and sender == 0 else None
            distributed.send(message, 0) if rank == sender == 1 else None
            distributed.recv(message, 1) if rank == 0 and sender == 1 else None
        taken.append((time.perf_counter() - start) / 2)
    return median(taken)


def seconds_of(of: dict[str, float], tokens: int, ranks: int, layers: int) -> float:
    """Return the seconds of a step on the slowest of `ranks` processes, without communication."""
    last = (
        2 - 1 / ranks
    )  # a token of full attention reads half of the text on one process, nearly all on the last of many
    layer = of["layer_s"] + of["layer_s_per_token"] * tokens * last
    return tokens / ranks * (layers * layer + of["rest_s"])


def bytes_of(of: dict[str, float], tokens: int, ranks: int, layers: int) -> float:
    """Return the bytes of activations that one process holds in a step."""
    return tokens / ranks * (layers * of["layer_bytes"] + of["rest_bytes"])


def ranks_for(of: dict[str, float], tokens: int) -> int:
    """Return the smallest power of two of processes whose memory suffices."""
    static = STATE * sum(parameter.numel() for parameter in make_decoder("full", LAYERS).parameters())
    return 2 ** max(0, math.ceil(math.log2(bytes_of(of, tokens, 1, LAYERS) / (ROOM - static))))


def sent_by_layer(name: str, tokens: int, ranks: int) -> int:
    """Return the most bytes that one of `ranks` processes, a power of two, sends for a layer in a training step."""
    (block,) = make_decoder(name, 1).blocks()
    busiest = sorted({0, min(1, ranks - 1), (ranks - 1) // 2, ranks // 2, ranks - 1})  # all would take hours to count
    each = block.attention.communication(tokens, ranks, busiest)
    return max(2 * sent.forward + sent.backward for sent in each)  # computed again: forward twice


if __name__ == "__main__":
    RESULT.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
