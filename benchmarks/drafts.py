"""Time generated code with and without guesses of n-grams: `python -m benchmarks.drafts RUN...`.

Each run continues pieces of the standard library, 512 tokens of a prompt by 256 greedy ones. Both ways alternate in one
process, in CPU seconds without the prompt's.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from subquad.generation import generate
from subquad.generation.speculative import MakeDraft, NgramDraft
from subquad.models import Decoder
from subquad.training.runs import load_run

FILES = ("argparse.py", "tarfile.py", "unittest/mock.py", "pathlib.py", "typing.py", "ast.py")
PIECE = slice(8_000, 11_000)
"""The characters of a file that are its prompt."""


class Speed(NamedTuple):
    """Seconds of a text without guesses over those with them, and how many guesses were right."""

    ratio: float
    right: int
    made: int


def compare(model: Decoder, prompt: Sequence[int], tokens: int) -> Speed:
    """Generate a text in the order plain, guessed, guessed, plain; `ValueError` if the texts differ."""
    texts, seconds = list[list[int]](), {False: 0.0, True: 0.0}
    for guesses in (False, True, True, False):
        draft: MakeDraft | None = NgramDraft if guesses else None
        generation = generate(model, prompt, max_new_tokens=tokens, temperature=0, draft=draft)
        generation.prefill()
        begin = time.process_time()
        texts.append(list(generation))
        seconds[guesses] += time.process_time() - begin
        if guesses:
            right, made = generation.guesses
    if any(text != texts[0] for text in texts):
        raise ValueError("the texts with and without guesses differ: in float32 a tie may be broken by rounding")
    return Speed(seconds[False] / seconds[True], right, made)


def main(folders: Sequence[str]) -> None:
    """Print a line for each run."""
    torch.set_num_threads(1)
    library = Path(sysconfig.get_paths()["stdlib"])
    for folder in folders:
        run = load_run(folder)
        prompts = [run.tokenizer.encode((library / file).read_text()[PIECE]).ids[:512] for file in FILES]
        speeds = [compare(run.decoder, prompt, 256) for prompt in prompts]
        ratios = [speed.ratio for speed in speeds]
        low, *_, high = statistics.quantiles(ratios, n=5)
        right, made = sum(speed.right for speed in speeds), sum(speed.made for speed in speeds)
        sys.stdout.write(
            f"{folder}: {statistics.median(ratios):.2f} times as fast (p20 {low:.2f}, p80 {high:.2f}), "
            f"{right} of {made} guesses right\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
