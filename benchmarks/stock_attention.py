"""Compare training steps of transformers' Llama with its own attention (sdpa) and with this library's.

    python benchmarks/stock_attention.py [--tokens 1024,4096,16384] [--device cuda --dtype bfloat16] [--out FILE.json]

Random weights and tokens, batch 1; segments, groups and windows of 256 tokens. The implementations take turns in each
round, and each figure is the best round. On a CPU it is processor time summed over threads, which other programs
hardly affect; on a GPU it is wall time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from subquad import hf
from subquad.evaluation.provenance import provenance

OPTIONS = {"llp": {"segment": 256}, "shifted": {"group": 256}, "window": {"width": 256}}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line per length and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,4096,16384", help="sequence lengths, separated by commas")
    for name, value, text in (
        ("rounds", 2, "rounds, each timing every implementation"),
        ("dim", 256, "model width"),
        ("layers", 2, "number of layers"),
        ("heads", 8, "number of query heads; there are half as many key heads"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the results")
    asked = parser.parse_args(arguments)
    lengths = [int(tokens) for tokens in asked.tokens.split(",")]
    if min(*lengths, asked.rounds, asked.layers) < 1 or asked.heads % 2 or asked.dim % asked.heads:
        parser.error("sizes must be at least 1, --heads even, and --dim a multiple of --heads")
    model = build(asked, max(lengths))
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        rows.append({"tokens": tokens, "seconds": measure(model, tokens, asked)})
        figures = "   ".join(f"{name} {seconds:.3g} s" for name, seconds in rows[-1]["seconds"].items())
        sys.stdout.write(f"{tokens:,} tokens   {figures}\n")
        sys.stdout.flush()
    if asked.out is not None:
        settings = {key: str(value) if key == "out" else value for key, value in vars(asked).items()}
        report = {"settings": settings, **provenance(asked.device), "rows": rows}
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def build(asked: argparse.Namespace, tokens: int) -> LlamaForCausalLM:
    """Return the model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=asked.dim,
        intermediate_size=2 * asked.dim,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.heads,
        num_key_value_heads=asked.heads // 2,
        max_position_embeddings=tokens,
    )
    return LlamaForCausalLM(config).to(asked.device, getattr(torch, asked.dtype))


def measure(model: LlamaForCausalLM, tokens: int, asked: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a forward and backward pass by implementation."""
    x_BT = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(0)).to(asked.device)
    best: dict[str, float] = {}
    clock = time.perf_counter if asked.device == "cuda" else time.process_time
    for number in range(asked.rounds + (asked.device == "cuda")):  # on a GPU the first round compiles
        for name in (None, *OPTIONS):
            hf.set_attention(model, name, **(OPTIONS[name] if name else {}))
            start = clock()
            model(x_BT, labels=x_BT, use_cache=False).loss.backward()
            if asked.device == "cuda":
                torch.cuda.synchronize()
            seconds = clock() - start
            model.zero_grad()
            if number or asked.device != "cuda":
                key = model.config._attn_implementation
                best[key] = min(seconds, best.get(key, seconds))
    return best


if __name__ == "__main__":
    raise SystemExit(main())
