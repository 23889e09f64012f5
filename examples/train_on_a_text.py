"""Train a small language model on text files and report its loss on the part that was held out.

Run it: python examples/train_on_a_text.py ["TEXTS/*.txt"] [RUN_FOLDER] [STEPS]
By default it reads Python's asyncio and writes to runs/example.
"""

import asyncio
import math
import sys
from pathlib import Path

import subquad
from subquad.data import DataConfig
from subquad.models import DecoderConfig
from subquad.training import BatchConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig, train

SOURCE = str(Path(asyncio.__file__).parent / "*.py")


def main(texts: str = SOURCE, folder: str = "runs/example", steps: str = "300") -> None:
    """Train for `steps` steps. The same call with more steps resumes from the last checkpoint."""
    subquad.keep_freed_memory()  # faster training on a CPU; call it before the first large tensor is made
    config = TrainConfig(
        data=DataConfig(path=texts, tokenizer="bytes"),
        model=DecoderConfig(dim=64, num_layers=2, num_heads=4, attention="llp", options={"llp": {"segment": 64}}),
        batch=BatchConfig(length=256, size=4),
        optimizer=OptimizerConfig(lr=5e-3),
        schedule=ScheduleConfig(warmup=10),
        run=RunConfig(folder=folder, steps=int(steps), eval_every=100, eval_windows=8, sample_tokens=40),
    )
    result = train(config)
    if result.best_loss is not None:
        print(f"held-out loss {result.best_loss / math.log(2):.2f} bits a byte at step {result.best_step}")
    print(f"{result.parameters:,} parameters, {result.tokens_per_second:,.0f} tokens a second, saved in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
