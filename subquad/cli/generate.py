"""`subquad generate`: continue a prompt."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from subquad.cli import _generate_images
from subquad.cli._generate_ask import Ask
from subquad.cli.arguments import Parser
from subquad.generation.config import SamplingConfig
from subquad.generation.stop import StopStrings
from subquad.models.stacks import Decode

if TYPE_CHECKING:
    from subquad.generation import Generation
    from subquad.models import Decoder
    from subquad.state import State
    from subquad.training.runs import LoadedRun

logger = logging.getLogger(__name__)

DECODE_HELP = "How a perceiver_ar goes on when all latents are used (null: as it was trained); see `subquad list`."
REFILL_HELP = "Latents that a prompt and a refill leave, for --decode refill and frozen (null: half of them)."
ADAPTER_HELP = "The folder of a LoRA adapter, to put on the model in RUN, its base."
DEVICE_HELP = "auto: a GPU where PyTorch finds one; cpu: never."


PROMPT_HELP = "Text to go on from; - reads it from standard input."
STATE_IN_HELP = "A file that --state-out wrote with this model: the prompt goes on from the text that made it."
STATE_OUT_HELP = (
    "Keep what was read in a file: the prompt and all that was generated, a stop string too; with --max_tokens 0 the "
    "prompt alone."
)
STOP_HELP = "Text that ends the generation and is not printed; may be given several times."
SAMPLES_HELP = "How many texts to generate; each has its own random numbers (seed, seed + 1, ...)."
TEXTS_HELP = (
    "Write so many texts to --out-file instead of printing one; without a prompt they begin where the model begins a "
    "text. Text i has the seed seed + i."
)
OUT_FILE_HELP = "A .zip for --texts, each a document in it: what `subquad train --data.path` reads."
BEAMS_HELP = "Search for the likeliest text with so many beams, instead of drawing tokens (1: no search)."


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        "generate RUN --prompt TEXT",
        "Continue a prompt with a trained model, carrying its state from token to token; or, with --images, draw "
        "images with a model of them.",
    )
    parser.add_argument(
        "run", type=str, help="The folder of a run, or another that transformers' from_pretrained reads."
    )
    parser.add_argument("--prompt", type=str, default=None, help=PROMPT_HELP)
    parser.add_argument("--prompt-file", type=str, default=None, help="A text file to go on from.")
    parser.add_argument("--state-in", type=str, default=None, help=STATE_IN_HELP)
    parser.add_argument("--state-out", type=str, default=None, help=STATE_OUT_HELP)
    parser.add_argument("--stop", type=str, action="append", default=[], help=STOP_HELP)
    parser.add_argument("--samples", type=int, default=1, help=SAMPLES_HELP)
    parser.add_argument("--beams", type=int, default=1, help=BEAMS_HELP)
    parser.add_argument("--texts", type=int | None, default=None, help=TEXTS_HELP)
    parser.add_argument("--out-file", type=str | None, default=None, help=OUT_FILE_HELP)
    parser.add_yes_no("stream", "Whether to print each word as it comes instead of everything at the end.")
    parser.add_argument("--decode", type=Decode | None, default=None, help=DECODE_HELP)
    parser.add_argument("--refill", type=int | None, default=None, help=REFILL_HELP)
    parser.add_argument("--adapter", type=str | None, default=None, help=ADAPTER_HELP)
    parser.add_argument("--device", type=Literal["auto", "cpu"], default="auto", help=DEVICE_HELP)
    parser.add_class_arguments(SamplingConfig, None, as_group=False)
    _generate_images.add_arguments(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, generate, return the exit status."""
    parser = make_parser()
    values = parser.parse_args(arguments).as_dict()
    if values["images"] is not None:
        _generate_images.run(values, parser)
        return 0
    with parser.checking():
        _generate_images.refuse_with_text(values, parser)
        ask = Ask.of(values)
        text, file = values.pop("prompt"), values.pop("prompt_file")
        prompt = None if ask.texts is not None and text is None and file is None else _prompt(text, file)
    from subquad.training.runs import load_run

    with parser.checking():
        loaded = load_run(values["run"], values["device"], values["adapter"])
        if values["decode"] is not None or values["refill"] is not None:
            loaded.decoder.set_decode(values["decode"], values["refill"])
        state = _state(loaded.decoder, ask.state_in)
        tokens = _start(loaded) if prompt is None else _tokens(loaded, prompt, goes_on=state is not None)
        ask = _within_model(loaded.decoder, len(tokens), state, ask)
    if ask.texts is not None:
        from subquad.cli._generate_texts import write_texts

        write_texts(loaded, tokens, ask)
        return 0
    assert prompt is not None
    if ask.samples > 1 or ask.beams > 1:
        from subquad.cli._generate_several import generate_several

        generate_several(loaded, prompt, tokens, state, ask)
    else:
        _generate(loaded, prompt, tokens, state, ask)
    return 0


def _prompt(text: str | None, file: str | None) -> str:
    """The prompt's text, from one of three places; `ValueError` where none or two are given."""
    if (text is None) == (file is None):
        given = "both" if text is not None else "none"
        raise ValueError(f"give one of --prompt TEXT, --prompt - (standard input) and --prompt-file FILE, got {given}")
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {file}")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    try:
        prompt = sys.stdin.read() if text == "-" else str(text)
        prompt.encode()
    except UnicodeError as error:
        raise ValueError(f"{'standard input' if text == '-' else '--prompt'} is not UTF-8 text: {error}") from error
    return prompt


def _tokens(loaded: LoadedRun, prompt: str, *, goes_on: bool) -> list[int]:
    """The prompt's tokens, with those that begin a text unless it `goes_on`; `ValueError` where there is none."""
    from subquad.data.tokenizers import encode_prompt, encode_text

    tokens = (encode_text if goes_on else encode_prompt)(loaded.tokenizer, prompt)
    if not tokens:
        raise ValueError("the prompt must hold at least one token, got an empty text; give one by --prompt")
    return tokens


def _start(loaded: LoadedRun) -> list[int]:
    """The token with which the model begins a text; `ValueError` where it has none."""
    from subquad.cli._generate_texts import start_token

    start = start_token(loaded)
    if start is None:
        raise ValueError(f"{loaded.folder} names no token that begins a text (bos_token_id); give a --prompt")
    return [start]


def _state(decoder: Decoder, file: str | None) -> State | None:
    """What --state-in holds; `ValueError` where another model or more than one text made it."""
    if file is None:
        return None
    from subquad.state import State

    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no file {file}")
    state = State.load(file, model=decoder)
    try:
        decoder.check_state(state, 1, owner="--state-in")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    state = state.to(next(decoder.parameters()).device)
    _check_goes_on(decoder, state, file)
    return state


def _check_goes_on(decoder: Decoder, state: State, file: str) -> None:
    """Raise `ValueError` where the decoder cannot read a token after this state: its tensors are of other shapes."""
    import torch

    if decoder.most_tokens is not None and int(state.seen) >= decoder.most_tokens:
        return  # `_within_model` says that no token has place
    device = next(decoder.parameters()).device
    try:
        with torch.no_grad():
            decoder(torch.zeros(1, 1, dtype=torch.long, device=device), state)
    except Exception as error:  # the first operation whose shapes do not fit raises
        raise ValueError(f"{file} does not fit the model: {error!r}") from error


def _within_model(decoder: Decoder, prompt: int, state: State | None, ask: Ask) -> Ask:
    """With as many tokens as the model has latents (decode=frozen) or positions for after a prompt of so many.

    The last token is not read, unless --state-out keeps it. Raises `ValueError` where not even the prompt has place.
    """
    unread = 0 if ask.state_out is None else 1
    limits: list[tuple[int, str]] = []
    latents = decoder.most_new_tokens(prompt, state)
    if latents is not None:
        hint = "a lower --refill leaves more, --decode exact or refill has no limit"
        limits.append((latents - unread, f"decode=frozen has no latents for more; {hint}"))
    rows = decoder.most_tokens
    if rows is not None:
        seen = 0 if state is None else int(state.seen)
        if seen + prompt > rows:
            raise ValueError(
                f"the model has positions for {rows} tokens (max_positions), and the prompt ends at {seen + prompt}"
            )
        limits.append((rows - seen - prompt + 1 - unread, f"the model has positions for {rows} tokens (max_positions)"))
    most, reason = min(limits, default=(ask.sampling.max_tokens, ""))
    if ask.sampling.max_tokens <= most:
        return ask
    logger.warning(
        "the text ends after %d tokens instead of max_tokens=%d: %s", max(0, most), ask.sampling.max_tokens, reason
    )
    return replace(ask, sampling=ask.sampling.replace(max_tokens=max(0, most)))


def _generate(loaded: LoadedRun, prompt: str, tokens: list[int], state: State | None, ask: Ask) -> None:
    """Print the prompt and what follows it; the speed and the state's size go to standard error."""
    from subquad.data.tokenizers import separator_id
    from subquad.generation import Generation

    stop_token = separator_id(loaded.tokenizer)
    begin = time.perf_counter()
    generation = Generation(loaded.decoder, tokens, ask.sampling, state=state, stop_token=stop_token)
    generation.prefill()
    read = time.perf_counter()
    sys.stdout.write(prompt)
    count = _write(loaded, generation, tokens, ask)
    seconds = time.perf_counter() - read
    if ask.state_out is not None:
        generation.read_all().save(ask.state_out, model=loaded.decoder)
    state_bytes = generation.state.nbytes if generation.state else 0
    sys.stderr.write(
        f"prompt: {len(tokens)} tokens in {read - begin:.2f} s; "
        f"generated: {count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s); "
        f"state: {state_bytes:,} bytes{f' in {ask.state_out}' if ask.state_out else ''}\n"
    )


def _write(loaded: LoadedRun, generation: Generation, tokens: list[int], ask: Ask) -> int:
    """Write the text up to a stop string, at once or piece by piece; how many tokens it took."""
    from subquad.generation import TextStream

    text, shown = TextStream(loaded.tokenizer, tokens), StopStrings(ask.stop)
    held, count = "", 0
    for token in generation:
        count += 1
        piece = shown.push(text.push(token))
        if ask.stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        else:
            held += piece
        if shown.stopped is not None:
            break
    sys.stdout.write(held + shown.push(text.finish()) + shown.finish() + "\n")
    sys.stdout.flush()
    return count
