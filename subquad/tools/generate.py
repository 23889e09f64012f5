"""`subquad generate`: continue a prompt."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from subquad.generation.config import SamplingConfig
from subquad.models.perceiver_options import Decode
from subquad.tools.arguments import Parser

if TYPE_CHECKING:
    from subquad.models import Decoder
    from subquad.tools.runs import LoadedRun

logger = logging.getLogger(__name__)

DECODE_HELP = "How a perceiver_ar goes on when all latents are used (null: as it was trained); see `subquad list`."
REFILL_HELP = "Latents that a prompt and a refill leave, for --decode refill and frozen (null: half of them)."
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
    parser.add_argument("--decode", type=Decode | None, default=None, help=DECODE_HELP)
    parser.add_argument("--refill", type=int | None, default=None, help=REFILL_HELP)
    parser.add_argument("--device", type=Literal["auto", "cpu"], default="auto", help=DEVICE_HELP)
    parser.add_class_arguments(SamplingConfig, None, as_group=False)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, generate, return the exit status."""
    parser = make_parser()
    values = parser.parse_args(arguments).as_dict()
    folder, prompt, stream, device = (values.pop(name) for name in ("run", "prompt", "stream", "device"))
    decode, refill = values.pop("decode"), values.pop("refill")
    with parser.checking():
        sampling = SamplingConfig(**values)
    if prompt == "-":
        prompt = sys.stdin.read()
    from subquad.tools.runs import load_run

    with parser.checking():
        loaded = load_run(folder, device)
        _set_decode(loaded.decoder, decode, refill)
        tokens = _tokens(loaded, prompt)
    _generate(loaded, prompt, tokens, sampling, stream=stream)
    return 0


def _tokens(loaded: LoadedRun, prompt: str) -> list[int]:
    """The prompt's tokens; `ValueError` where there is none."""
    tokens = loaded.tokenizer.encode(prompt, add_special_tokens=False).ids
    if not tokens:
        raise ValueError("the prompt must hold at least one token, got an empty text; give one by --prompt")
    return tokens


def _set_decode(decoder: Decoder, decode: Decode | None, refill: int | None) -> None:
    """Change how a perceiver_ar decodes where one of the two is given."""
    from subquad.models import PerceiverAR

    if decode is None and refill is None:
        return
    if not isinstance(decoder, PerceiverAR):
        name = "decode" if decode is not None else "refill"
        raise ValueError(f"--{name} is for perceiver_ar, and this model has attention={decoder.config.attention!r}")
    decoder.set_decode(decode or decoder.options.decode, refill)


def _within_latents(decoder: Decoder, prompt: int, sampling: SamplingConfig) -> SamplingConfig:
    """As many tokens as decode=frozen has latents for after a prompt of so many tokens."""
    from subquad.models import PerceiverAR

    most = decoder.most_new_tokens(prompt) if isinstance(decoder, PerceiverAR) else None
    if most is None or sampling.max_tokens <= most:
        return sampling
    logger.warning(
        "the text ends after %d tokens instead of max_tokens=%d: decode=frozen has no latents for more; a lower "
        "--refill leaves more, --decode exact or refill has no limit", most, sampling.max_tokens,
    )  # fmt: skip
    return sampling.replace(max_tokens=most)


def _generate(loaded: LoadedRun, prompt: str, tokens: list[int], sampling: SamplingConfig, *, stream: bool) -> None:
    """Print the prompt and what follows it; the speed and the state's size go to standard error."""
    from subquad.data.tokenizers import separator_id
    from subquad.generation import Generation, TextStream

    sampling = _within_latents(loaded.decoder, len(tokens), sampling)
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
