"""Compare decoding of many requests one at a time with decoding in the slots of a BatchDecoder.

    python benchmarks/continuous_batching.py [--requests 200] [--slots 16] [--mechanisms latte,llp] [--out FILE.json]

Both ways get the same prompts of mixed lengths and decode greedily. Each round times both, one after the other; the
figures are the median and the 20th and 80th percentile over rounds. On a GPU add `--device cuda`, and `--compile` to
compile the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Timing
from subquad import attention
from subquad.evaluation.provenance import provenance
from subquad.generation import BatchDecoder, SamplingConfig, generate
from subquad.models import Decoder, DecoderConfig

Asked = list[tuple[list[int], int]]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line per mechanism and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mechanisms = "mechanisms to time, separated by commas"
    parser.add_argument("--mechanisms", default="llp,window,linear,latte,elita,full", help=mechanisms)
    for name, value, text in (
        ("requests", 200, "number of requests"),
        ("slots", 16, "slots of the batch"),
        ("prompt", 128, "most tokens in a prompt"),
        ("tokens", 128, "most generated tokens per request"),
        ("dim", 128, "model width"),
        ("layers", 4, "number of layers"),
        ("rounds", 3, "rounds, each timing both ways"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--compile", action="store_true", help="compile the batch's step")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the results")
    asked = parser.parse_args(arguments)
    names = asked.mechanisms.split(",")
    causal = [name for name in attention.names() if "causal" in attention.mechanism(name).forms]
    if unknown := set(names) - set(causal):
        parser.error(f"unknown {', '.join(sorted(unknown))}; valid: {', '.join(causal)}")
    for name in ("requests", "slots", "prompt", "tokens", "dim", "layers", "rounds"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(asked, name)}")
    rows: list[dict[str, Any]] = []
    origin = provenance(asked.device) if asked.out is not None else {}
    settings = {key: str(value) if key == "out" else value for key, value in vars(asked).items()}
    for name in names:
        rows.append(measure(name, asked))
        if asked.out is not None:  # after each mechanism, so that an interrupted run keeps its results
            asked.out.write_text(json.dumps({"settings": settings, **origin, "rows": rows}, indent=1) + "\n")
    return 0


def measure(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Time one mechanism both ways, print its line and return it as a row."""
    model, requests = build(name, asked), mixed(asked)
    tokens = sum(count for _, count in requests)
    alone, together, same = [], [], []
    list(generate(model, [1, 2], max_tokens=2))  # warm up
    for _ in range(asked.rounds):
        start = time.perf_counter()
        expected = [list(generate(model, prompt, max_tokens=count, temperature=0)) for prompt, count in requests]
        alone.append(time.perf_counter() - start)
        decoder = BatchDecoder(model, slots=asked.slots, max_context=asked.prompt + asked.tokens, compile=asked.compile)
        if asked.compile:
            decoder.add([0], SamplingConfig(max_tokens=2, temperature=0))
            decoder.run()
        start = time.perf_counter()
        made = [decoder.add(prompt, SamplingConfig(max_tokens=count, temperature=0)) for prompt, count in requests]
        decoder.run()
        together.append(time.perf_counter() - start)
        same.append(sum(request.tokens == own for request, own in zip(made, expected, strict=True)))
    ratio = Timing(tuple(a / b for a, b in zip(alone, together, strict=True)))
    low, middle, high = ratio.p20, ratio.median, ratio.p80
    row = {
        "name": name,
        "tokens": tokens,
        "alone_tokens_per_s": tokens / statistics.median(alone),
        "batch_tokens_per_s": tokens / statistics.median(together),
        "ratio": (low, middle, high),
        "same_tokens_as_alone": f"{min(same)} of {len(requests)}",
        "state_bytes": decoder.state_bytes,
    }
    sys.stdout.write(
        f"{name:16} one at a time {row['alone_tokens_per_s']:8,.0f} tokens/s   {asked.slots} slots "
        f"{row['batch_tokens_per_s']:8,.0f} tokens/s   {middle:5.1f}x ({low:.1f} to {high:.1f})   same tokens: "
        f"{row['same_tokens_as_alone']}   state: {row['state_bytes']:,} bytes\n"
    )
    sys.stdout.flush()
    return row


def build(name: str, asked: argparse.Namespace) -> Decoder:
    """Return a model whose random weights are large enough for its greedy tokens to vary."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "dim": asked.dim, "num_layers": asked.layers, "num_heads": 4, "init_std": 0.3}
    position = "rope" if attention.mechanism(name).rotates else "sinusoidal"
    config = DecoderConfig.from_dict({**sizes, "attention": name, "position": position})
    return Decoder(config).eval().to(asked.device)


def mixed(asked: argparse.Namespace) -> Asked:
    """Draw the prompts and the numbers of tokens to generate, uniform up to `asked.prompt` and `asked.tokens`."""
    random = torch.Generator().manual_seed(0)

    def draw(most: int) -> int:
        return int(torch.randint(1, most + 1, (1,), generator=random))

    lengths = [(draw(asked.prompt), draw(asked.tokens)) for _ in range(asked.requests)]
    return [(torch.randint(256, (n,), generator=random).tolist(), count) for n, count in lengths]


if __name__ == "__main__":
    raise SystemExit(main())
