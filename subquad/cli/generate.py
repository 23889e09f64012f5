"""`subquad generate`: continue a prompt, or draw images."""

from __future__ import annotations

import logging
import os
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from subquad import training
from subquad.cli.arguments import Parser, check_output
from subquad.cli.complete import picture_file, show_pixels
from subquad.config import check_at_least
from subquad.data.tokenizers import encode_prompt, encode_text, separator_id
from subquad.generation import BatchDecoder, Generation, SamplingConfig, TextStream, beam_search, generate_images
from subquad.generation.batch import continue_together
from subquad.generation.images import picture_of, square
from subquad.generation.stream import StopStrings
from subquad.models import Decoder
from subquad.models.stacks import Decode
from subquad.parsing import read_json_mapping
from subquad.state import State

logger = logging.getLogger(__name__)
MOST_SLOTS = 16
"""Texts of --samples that are made at once."""
ROWS = 64
"""Texts of --texts that are made at once."""
DATE = (1980, 1, 1, 0, 0, 0)
"""Of every document in --out-file, so that the same texts are the same file."""
FOR_IMAGES = ("run", "adapter", "device", "images", "out", "batch_size", "temperature", "seed")
"""The options that --images reads."""

DECODE_HELP = "How a perceiver_ar goes on when all latents are used (null: as it was trained); see `subquad list`."
REFILL_HELP = "Latents that a prompt and a refill leave, for --decode refill and frozen (null: half of them)."
ADAPTER_HELP = "The folder of a LoRA adapter, to put on the model in RUN, its base."
PROMPT_HELP = "Text to go on from; - reads it from standard input."
STATE_IN_HELP = "A file that --state-out wrote with this model: the prompt goes on from the text that made it."
STATE_OUT_HELP = (
    "Keep what was read in a file: the prompt and all that was generated, a stop string too; with --max_tokens 0 the "
    "prompt alone, and nothing is printed."
)
STOP_HELP = "Text that ends the generation and is not printed; may be given several times."
SAMPLES_HELP = "How many texts to generate; each has its own random numbers (seed, seed + 1, ...)."
TEXTS_HELP = (
    "Write so many texts to --out-file instead of printing one; without a prompt they begin where the model begins a "
    "text. Text i has the seed seed + i."
)
OUT_FILE_HELP = "A .zip for --texts, each a document in it: what `subquad train --data.path` reads."
BEAMS_HELP = "Search for the likeliest text with so many beams, instead of drawing tokens (1: no search)."
IMAGES_HELP = "Draw so many images with a model of images, instead of going on with a text."
OUT_HELP = "The PNG file to write the images to, side by side (--images; default: RUN/images.png)."
BATCH_HELP = "Images that are drawn at once (--images)."


def make_parser() -> Parser:
    """Return the command's options."""
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
    parser.add_optional("--texts", TEXTS_HELP, int)
    parser.add_optional("--out-file", OUT_FILE_HELP)
    parser.add_yes_no("stream", "Whether to print each word as it comes instead of everything at the end.")
    parser.add_optional("--decode", DECODE_HELP, Decode)
    parser.add_optional("--refill", REFILL_HELP, int)
    parser.add_optional("--adapter", ADAPTER_HELP)
    parser.add_device()
    parser.add_class_arguments(SamplingConfig, None, as_group=False)
    parser.add_optional("--images", IMAGES_HELP, int)
    parser.add_optional("--out", OUT_HELP)
    parser.add_argument("--batch_size", type=int, default=100, help=BATCH_HELP)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, generate, return the exit status."""
    parser = make_parser()
    asked = parser.parse_args(arguments)
    if asked.images is not None:
        _draw_images(parser, asked)
        return 0
    start = _start(parser, asked)
    if asked.texts is not None:
        _write_texts(start, asked)
    elif asked.beams > 1:
        _print_best(start, asked)
    elif asked.samples > 1:
        _print_samples(start, asked)
    else:
        _print_one(start, asked)
    return 0


@dataclass(frozen=True)
class Start:
    """A model, and the text that it continues."""

    loaded: training.runs.LoadedRun
    prompt: str
    """Empty where the texts begin with the model's own first token."""
    tokens: list[int]
    state: State | None
    sampling: SamplingConfig

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The separator of documents, if there is one: it ends a text."""
        separator = separator_id(self.loaded.tokenizer)
        return () if separator is None else (separator,)

    def samplings(self, rows: range) -> list[SamplingConfig]:
        """Return the sampling of each of several texts: text i has the seed `seed + i`."""
        seed = self.sampling.seed
        return [self.sampling if seed is None else self.sampling.replace(seed=seed + row) for row in rows]


def _start(parser: Parser, asked: Namespace) -> Start:
    """Check the arguments, read model, prompt and state."""
    with parser.checking():
        sampling = _checked(parser, asked)
        begins_itself = asked.texts is not None and asked.prompt is None and asked.prompt_file is None
        prompt = "" if begins_itself else _prompt(asked.prompt, asked.prompt_file)
    with parser.checking():
        loaded = training.runs.load_run(asked.run, asked.device, asked.adapter)
        if asked.decode is not None or asked.refill is not None:
            loaded.decoder.set_decode(asked.decode, asked.refill)
        state = read_state(loaded.decoder, asked.state_in)
        tokens = _begin_tokens(loaded) if begins_itself else _tokens(loaded, prompt, goes_on=state is not None)
        sampling = _limited(loaded.decoder, len(tokens), state, sampling, keep=asked.state_out is not None)
    return Start(loaded, prompt, tokens, state, sampling)


def _checked(parser: Parser, asked: Namespace) -> SamplingConfig:
    """Return the sampling; raise `ValueError` for arguments that do not go together."""
    for name in ("out", "batch_size"):
        if asked[name] != parser.get_default(name):
            raise ValueError(f"--{name} is for --images; leave it out")
    sampling = SamplingConfig(**{field.name: asked[field.name] for field in fields(SamplingConfig)})
    StopStrings(asked.stop)
    check_at_least(1, samples=asked.samples, beams=asked.beams)
    if asked.texts is not None or asked.out_file is not None:
        _check_texts(asked)
    if asked.beams > 1:
        _check_beams(asked, sampling)
    if asked.state_out is not None:
        if asked.samples > 1 or asked.beams > 1:
            raise ValueError("--state-out keeps one text: it does not go with --samples or --beams")
        check_output("state-out", asked.state_out)
    return sampling


def _check_texts(asked: Namespace) -> None:
    """Raise `ValueError` or `FileNotFoundError` where texts cannot be written as asked."""
    if asked.texts is None or asked.out_file is None:
        given = "--out-file" if asked.texts is None else "--texts"
        raise ValueError(f"--texts N and --out-file FILE go together, got {given} alone")
    check_at_least(1, texts=asked.texts)
    check_output("out-file", asked.out_file)
    if not asked.out_file.endswith(".zip"):
        raise ValueError(f"--out-file must end with .zip: each text is a document in it, got {asked.out_file!r}")
    unread = {"--samples": asked.samples > 1, "--beams": asked.beams > 1, "--stop": bool(asked.stop)}
    unread |= {"--state-in": asked.state_in is not None, "--state-out": asked.state_out is not None}
    for name, is_given in unread.items():
        if is_given:
            raise ValueError(f"{name} does not go with --texts; leave it out")


def _check_beams(asked: Namespace, sampling: SamplingConfig) -> None:
    """Raise `ValueError` for options that a search would not read."""
    if asked.samples > 1 or asked.stop:
        name = "--stop" if asked.stop else "--samples"
        raise ValueError(f"a search with --beams gives one text without stop strings: leave {name} out")
    unread = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
    for field in fields(SamplingConfig):
        value = getattr(sampling, field.name)
        if field.name in unread and value != field.default:
            raise ValueError(f"{field.name}={value!r} has no effect with --beams; leave it out")


def _prompt(text: str | None, file: str | None) -> str:
    """Return the prompt's text, from one of three places; raise `ValueError` where none or two are given."""
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


def _tokens(loaded: training.runs.LoadedRun, prompt: str, *, goes_on: bool) -> list[int]:
    """Return the prompt's tokens, after those that begin a text unless it `goes_on`; `ValueError` for none."""
    tokens = (encode_text if goes_on else encode_prompt)(loaded.tokenizer, prompt)
    if not tokens:
        raise ValueError("the prompt must hold at least one token, got an empty text; give one by --prompt")
    return tokens


def _begin_tokens(loaded: training.runs.LoadedRun) -> list[int]:
    """Return the token with which the model begins a text; raise `ValueError` where it has none."""
    token = _begin_token(loaded)
    if token is None:
        raise ValueError(f"{loaded.folder} names no token that begins a text (bos_token_id); give a --prompt")
    return [token]


def _begin_token(loaded: training.runs.LoadedRun) -> int | None:
    """Return the `bos_token_id` of the model's configuration, or the tokenizer's separator."""
    file = training.runs.model_home(loaded.folder) / "config.json"
    token = read_json_mapping(file).get("bos_token_id") if file.is_file() else None
    return token if isinstance(token, int) else separator_id(loaded.tokenizer)


def read_state(decoder: Decoder, file: str | None) -> State | None:
    """Return the state that --state-in holds; raise `ValueError` where another model or more than one text made it."""
    if file is None:
        return None
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no file {file}")
    state = State.load(file, model=decoder)
    try:
        decoder.check_state(state, 1, owner="--state-in")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    device = next(decoder.parameters()).device
    state = state.to(device)
    if decoder.most_tokens is not None and int(state.seen) >= decoder.most_tokens:
        return state  # `_limited` says that no token has place
    try:
        with torch.no_grad():
            decoder(torch.zeros(1, 1, dtype=torch.long, device=device), state)
    except Exception as error:  # the first operation whose shapes do not fit raises
        raise ValueError(f"{file} does not fit the model: {error!r}") from error
    return state


def _limited(
    decoder: Decoder, prompt: int, state: State | None, sampling: SamplingConfig, *, keep: bool
) -> SamplingConfig:
    """Return the sampling with `max_tokens` at most what the model has latents (decode=frozen) or positions for.

    The last token is not read, unless the state is kept. Raises `ValueError` where not even the prompt has place.
    """
    unread = 1 if keep else 0
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
    most, reason = min(limits, default=(sampling.max_tokens, ""))
    if sampling.max_tokens <= most:
        return sampling
    logger.warning(
        "the text ends after %d tokens instead of max_tokens=%d: %s", max(0, most), sampling.max_tokens, reason
    )
    return sampling.replace(max_tokens=max(0, most))


def _print_one(start: Start, asked: Namespace) -> None:
    """Print the prompt and what follows it, nothing where no token is asked for; figures go to standard error."""
    begin = time.perf_counter()
    decoder, tokens = start.loaded.decoder, start.tokens
    generation = Generation(decoder, tokens, start.sampling, state=start.state, stop_tokens=start.stop_tokens)
    generation.prefill()
    read = time.perf_counter()
    stream = TextStream(start.loaded.tokenizer, tokens, asked.stop)
    if asked.max_tokens:
        sys.stdout.write(start.prompt)
    held, count = "", 0
    for token in generation:
        count += 1
        piece = stream.push(token)
        if asked.stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        else:
            held += piece
        if stream.stopped is not None:
            break
    if asked.max_tokens:
        sys.stdout.write(held + stream.finish() + "\n")
        sys.stdout.flush()
    seconds = time.perf_counter() - read
    if asked.state_out is not None:
        generation.read_all().save(asked.state_out, model=decoder)
    state_bytes = generation.state.nbytes if generation.state else 0
    sys.stderr.write(
        f"prompt: {len(tokens)} tokens in {read - begin:.2f} s; {_speed(count, seconds)}; "
        f"state: {state_bytes:,} bytes{f' in {asked.state_out}' if asked.state_out else ''}\n"
    )


def _speed(tokens: int, seconds: float) -> str:
    return f"generated: {tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)"


def _print_samples(start: Start, asked: Namespace) -> None:
    """Print several texts, each after the prompt and under its number; the speed goes to standard error."""
    begin = time.perf_counter()
    seen = 0 if start.state is None else int(start.state.seen)
    decoder = BatchDecoder(
        start.loaded.decoder,
        slots=min(asked.samples, MOST_SLOTS),
        max_context=seen + len(start.tokens) + max(1, start.sampling.max_tokens),
        prefill_chunk=start.sampling.prefill_chunk,
    )
    requests = [
        decoder.add(start.tokens, sampling, stop_tokens=start.stop_tokens, state=start.state)
        for sampling in start.samplings(range(asked.samples))
    ]
    streams = {id(request): TextStream(start.loaded.tokenizer, start.tokens, asked.stop) for request in requests}
    texts, state_bytes = {id(request): start.prompt for request in requests}, 0
    while decoder.waiting or decoder.running:
        state_bytes = max(state_bytes, decoder.state_bytes)
        for request, token in decoder.step():
            texts[id(request)] += streams[id(request)].push(token)
            if streams[id(request)].stopped is not None:
                decoder.cancel(request)
    for request in requests:
        if request.error is not None:
            raise request.error
    for number, request in enumerate(requests, 1):
        sys.stdout.write(f"--- {number} ---\n{texts[id(request)]}{streams[id(request)].finish()}\n")
    sys.stdout.flush()
    speed = _speed(sum(len(request.tokens) for request in requests), time.perf_counter() - begin)
    size = f"; state: {state_bytes:,} bytes of {decoder.slots} slots" if state_bytes else ""
    sys.stderr.write(f"{speed}{size}\n")


def _print_best(start: Start, asked: Namespace) -> None:
    """Print the likeliest text that a search finds; its score and the speed go to standard error."""
    begin = time.perf_counter()
    best = beam_search(
        start.loaded.decoder,
        start.tokens,
        beams=asked.beams,
        max_tokens=start.sampling.max_tokens,
        stop_tokens=start.stop_tokens,
        state=start.state,
        prefill_chunk=start.sampling.prefill_chunk,
    )[0]
    stream = TextStream(start.loaded.tokenizer, start.tokens)
    text = "".join([stream.push(token) for token in best.tokens]) + stream.finish()
    sys.stdout.write(f"{start.prompt}{text}\n")
    sys.stdout.flush()
    speed = _speed(len(best.tokens), time.perf_counter() - begin)
    sys.stderr.write(f"score: {best.score:.4f} nats a token, of {asked.beams} beams; {speed}\n")


def _write_texts(start: Start, asked: Namespace) -> None:
    """Write the texts, each after the prompt's tokens and up to a token that begins or ends one.

    The file is there when all of it is. The number of texts, those that hold nothing left out, goes to standard error.
    """
    begin, shown = time.perf_counter(), sys.stderr.isatty()
    decoder, tokens = start.loaded.decoder, start.tokens
    ends = {token for token in (_begin_token(start.loaded), *start.stop_tokens) if token is not None}
    reading = Generation(decoder, tokens, start.sampling)
    reading.prefill()
    texts, count = list[str](), 0
    for first in range(0, asked.texts, ROWS):
        samplings = start.samplings(range(first, min(first + ROWS, asked.texts)))
        for found in continue_together(decoder, tokens, samplings, state=reading.state, stop_tokens=ends):
            own = found.tokens[:-1] if found.finished == "stop" else found.tokens
            texts.append(start.loaded.tokenizer.decode(tokens + own, skip_special_tokens=True).strip())
            count += len(own)
        if shown:
            sys.stderr.write(f"\r{len(texts):,} of {asked.texts:,} texts{chr(10) if len(texts) == asked.texts else ''}")
    draft = Path(f"{asked.out_file}.tmp")
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        for number, text in enumerate(texts, 1):
            if text:
                document = zipfile.ZipInfo(f"{number:0{len(str(len(texts)))}}.txt", DATE)
                file.writestr(document, text, zipfile.ZIP_DEFLATED)
    os.replace(draft, asked.out_file)
    seconds, empty = time.perf_counter() - begin, sum(not text for text in texts)
    left_out = f" ({empty} were empty and are left out)" if empty else ""
    sys.stderr.write(
        f"{len(texts) - empty} texts of {sum(len(text.encode()) for text in texts):,} bytes in {asked.out_file}"
        f"{left_out}; generated: {count:,} tokens in {seconds:.1f} s ({count / seconds:,.0f} tokens/s)\n"
    )


def _draw_images(parser: Parser, asked: Namespace) -> None:
    """Draw the images, write the picture; speed and state go to standard error."""
    with parser.checking():
        given: dict[str, Any] = asked.as_dict()
        for name, value in given.items():
            if name not in FOR_IMAGES and value != parser.get_default(name):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is for texts and has no effect with --images; leave it out")
        check_at_least(1, "--", images=asked.images, batch_size=asked.batch_size)
        sampling = SamplingConfig(temperature=asked.temperature, seed=asked.seed)
        out = picture_file(asked.out, Path(asked.run) / "images.png")
    seed = int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed
    with parser.checking():
        loaded = training.runs.load_image_run(asked.run, asked.device, asked.adapter)
    drawn = generate_images(
        loaded.model,
        asked.images,
        temperature=sampling.temperature,
        seed=seed,
        batch_size=asked.batch_size,
        progress=show_pixels if sys.stderr.isatty() else None,
    )
    images = drawn.pixels_NT.view(-1, *loaded.model.config.shape).numpy()
    picture_of(square(list(images))).save(out, format="PNG")
    sys.stderr.write(
        f"drawn: {asked.images} images in {drawn.seconds:.2f} s ({asked.images / drawn.seconds:.2f} images/s), "
        f"{drawn.batch_size} at once, seed {seed}; state: {drawn.state_bytes:,} bytes\n"
    )
    sys.stdout.write(f"{out}\n")
