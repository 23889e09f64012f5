"""`subquad generate`: continue a prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Literal

from subquad.generation.config import SamplingConfig
from subquad.tools.arguments import Parser

DEVICE_HELP = "auto: a GPU where PyTorch finds one; cpu: never."


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        "generate RUN --prompt TEXT", "Continue a prompt with a trained model, carrying its state from token to token."
    )
    parser.add_argument(
        "run", type=str, help="The folder of a run, or another that transformers' from_pretrained reads."
    )
    parser.add_argument("--prompt", type=str, required=True, help="Text to go on from; - reads it from standard input.")
    parser.add_yes_no("stream", "Whether to print each word as it comes instead of everything at the end.")
    parser.add_argument("--device", type=Literal["auto", "cpu"], default="auto", help=DEVICE_HELP)
    parser.add_class_arguments(SamplingConfig, None, as_group=False)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, generate, return the exit status."""
    values = make_parser().parse_args(arguments).as_dict()
    folder, prompt, stream, device = (values.pop(name) for name in ("run", "prompt", "stream", "device"))
    sampling = SamplingConfig(**values)
    if prompt == "-":
        prompt = sys.stdin.read()
    _generate(folder, prompt, sampling, stream=stream, device=device)
    return 0


def _generate(folder: str, prompt: str, sampling: SamplingConfig, *, stream: bool, device: str) -> None:
    """Print the prompt and what follows it; the speed and the state's size go to standard error."""
    from subquad.data.tokenizers import separator_id
    from subquad.generation import Generation, TextStream
    from subquad.tools.runs import load_run

    loaded = load_run(folder, device)
    tokens = loaded.tokenizer.encode(prompt, add_special_tokens=False).ids
    if not tokens:
        raise ValueError("the prompt must hold at least one token, got an empty text; give one by --prompt")
    generation = Generation(loaded.decoder, tokens, sampling, stop_token=separator_id(loaded.tokenizer))
    begin = time.perf_counter()
    generation.prefill()
    read = time.perf_counter()
    text = TextStream(loaded.tokenizer, tokens)
    sys.stdout.write(prompt)
    held, count = "", 0
    for token in generation:
        piece = text.push(token)
        count += 1
        if stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        else:
            held += piece
    sys.stdout.write(held + text.finish() + "\n")
    sys.stdout.flush()
    seconds = time.perf_counter() - read
    state_bytes = generation.state.nbytes if generation.state else 0
    sys.stderr.write(
        f"prompt: {len(tokens)} tokens in {read - begin:.2f} s; "
        f"generated: {count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s); "
        f"state: {state_bytes:,} bytes\n"
    )
