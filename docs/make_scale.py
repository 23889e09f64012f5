"""Write the cost tables of docs/scale.md: measured constants, and their prediction for 10^6 to 10^9 tokens.

python docs/make_scale.py --measure    # measures first (two free cores, minutes)
python docs/make_scale.py              # from benchmarks/results/cpu_scale.json
"""

from __future__ import annotations

import argparse
import math
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pages
import torch
import torch.distributed as distributed
from torch import multiprocessing

from benchmarks.memory import peak_bytes
from benchmarks.report import described
from benchmarks.timing import Run, Timing, interleave
from subquad.cli.tables import size
from subquad.evaluation.provenance import machine, versions
from subquad.memory import keep_freed_memory
from subquad.models import Decoder, DecoderConfig
from subquad.parallel import ContextGroup, context_parallel

RESULT = pages.RESULTS / "cpu_scale.json"
MECHANISMS = ("full", "window", "llp", "linear", "latte", "elita")
DIM, HEADS, VOCAB = 256, 4, 256
LENGTHS, DEPTHS = (2048, 8192), (1, 3)
LAYERS = 12
"""Layers of the model in the tables."""
SIZES = (2**20, 2**23, 2**27, 2**30)
ROOM = 16 * 2**30
"""Memory of one process in bytes."""
PROOF = 2**14
"""Tokens of the step that is both predicted and measured."""
STATE = 16
"""Bytes per parameter: weight, gradient and Adam's two moments, in float32."""


def main() -> None:
    """Measure if `--measure` is given, then write the page."""
    parser = argparse.ArgumentParser(description="Write the cost tables of docs/scale.md.")
    parser.add_argument("--measure", action="store_true", help="measure the constants first")
    if parser.parse_args().measure:
        pages.keep(RESULT, measured())
    pages.rewrite("scale.md", blocks(pages.read(RESULT)))


def blocks(found: dict[str, Any]) -> dict[str, Callable[[], str]]:
    """Return a function for each block of the page."""
    return {make.__name__: partial(make, found) for make in (constants, alone, together, proof)}


def make_decoder(name: str, layers: int) -> Decoder:
    """Build a byte model that keeps only the input of each layer for the backward pass."""
    torch.manual_seed(0)
    position = "rope" if name in ("full", "window", "llp") else "none"
    options = {"elita": {"horizon": PROOF}} if name == "elita" else {}
    shape = {"vocab_size": VOCAB, "dim": DIM, "num_layers": layers, "num_heads": HEADS, "position": position}
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
    timed = interleave({key: Run(lambda _, f=step: f()) for key, step in steps.items()}, repeats=3)
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


def _step(decoder: Decoder, tokens: int) -> Any:
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
    """Return the seconds of a step on the slowest of `ranks` processes, without communication.

    On one process a token of causal attention reads half of the text on average; on the last of many it reads nearly
    all of it.
    """
    last = 2 - 1 / ranks
    layer = of["layer_s"] + of["layer_s_per_token"] * tokens * last
    return tokens / ranks * (layers * layer + of["rest_s"])


def bytes_of(of: dict[str, float], tokens: int, ranks: int, layers: int) -> float:
    """Return the bytes of activations that one process holds in a step."""
    return tokens / ranks * (layers * of["layer_bytes"] + of["rest_bytes"])


def ranks_for(of: dict[str, float], tokens: int) -> int:
    """Return the smallest power of two of processes whose memory suffices."""
    static = STATE * sum(parameter.numel() for parameter in make_decoder("full", LAYERS).parameters())
    return 2 ** max(0, math.ceil(math.log2(bytes_of(of, tokens, 1, LAYERS) / (ROOM - static))))


def constants(found: dict[str, Any]) -> str:
    """Return the table of measured constants."""
    lines = []
    for name, of in found["mechanisms"].items():
        grows = f"{1e9 * of['layer_s_per_token']:.3f} T" if of["layer_s_per_token"] else "-"
        layer, rest = f"{1e9 * of['layer_s']:,.0f}", f"{1e9 * of['rest_s']:,.0f}"
        lines.append([f"`{name}`", layer, grows, rest, f"{of['layer_bytes']:,.0f}", f"{of['rest_bytes']:,.0f}"])
    headers = ["", "layer: ns per token", "growth with T: ns per token", "rest of the model: ns per token"]
    headers += ["layer: bytes per token", "rest: bytes per token"]
    link = found["link"]
    return (
        f"{pages.table(headers, lines)}\n\n"
        f"Measured on {described(found['machine'])}, PyTorch {found['versions']['torch']}: one thread per process, "
        f"width {DIM}, {HEADS} heads, float32, activation checkpointing. Two processes exchange "
        f"{link['bytes_per_s'] / 2**30:.1f} GiB/s with a latency of {1e6 * link['latency_s']:.0f} µs (gloo, one "
        "machine)."
    )


def _by_size(found: dict[str, Any], cell: Callable[[str, int], str]) -> str:
    lines = [[f"`{name}`", *(cell(name, tokens) for tokens in SIZES)] for name in found["mechanisms"]]
    return pages.table(["", *(f"2^{tokens.bit_length() - 1} ({tokens / 1e6:,.0f} M)" for tokens in SIZES)], lines)


def _both(seconds: float, held: float) -> str:
    return f"{_time(seconds)}, {size(round(held))}"


def alone(found: dict[str, Any]) -> str:
    """Return the time and memory of a step on one process, as if its memory were unlimited."""

    def cell(name: str, tokens: int) -> str:
        of = found["mechanisms"][name]
        return _both(seconds_of(of, tokens, 1, LAYERS), bytes_of(of, tokens, 1, LAYERS))

    return _by_size(found, cell)


def together(found: dict[str, Any]) -> str:
    """Return the processes needed, the time of a step, and the bytes and seconds of communication."""

    def cell(name: str, tokens: int) -> str:
        of = found["mechanisms"][name]
        ranks = ranks_for(of, tokens)
        each = make_decoder(name, 1).communication(tokens, ranks)
        sent = LAYERS * max(2 * part.forward + part.backward for part in each)  # computed again: forward twice
        moving = sent / found["link"]["bytes_per_s"]
        return f"{ranks:,} × {_time(seconds_of(of, tokens, ranks, LAYERS))}; {size(sent)} in {_time(moving)}"

    return _by_size(found, cell)


def proof(found: dict[str, Any]) -> str:
    """Return the predicted and the measured step on two processes."""
    lines = []
    for name, seen in found["proof"].items():
        of = found["mechanisms"][name]
        expected = _both(seconds_of(of, PROOF, 2, DEPTHS[1]), bytes_of(of, PROOF, 2, DEPTHS[1]))
        lines.append([f"`{name}`", expected, _both(seen["seconds"], seen["bytes"])])
    return pages.table(["", "predicted", "measured"], lines)


def _time(seconds: float) -> str:
    for unit, length in (("years", 31557600.0), ("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 1.5 * length:
            number = seconds / length
            return f"{number:,.0f} {unit}" if number >= 9.95 else f"{number:.1f} {unit}"
    return f"{1000 * seconds:.2g} ms"


if __name__ == "__main__":
    main()
