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
from subquad.bars import READING, progress, waiting
from subquad.cli.arguments import RUN_HELP, Parser, check_output, picture_file
from subquad.cli.decoding_options import DRAFT_HELP, add_precision, draft_of
from subquad.cli.threads import keep_to_idle_cores
from subquad.config import check_at_least
from subquad.data.special_tokens import separator_id, special_ids
from subquad.data.tokenizers import encode_prompt, encode_text
from subquad.disk import aside
from subquad.generation import BatchDecoder, Generation, SamplingConfig, TextStream, beam_search, generate_images
from subquad.generation.images import picture_of, square, write_png
from subquad.generation.speculative import MakeDraft
from subquad.generation.stream import StopStrings
from subquad.models import Decoder
from subquad.models.stacks import Decode
from subquad.parsing import read_json_mapping
from subquad.state import State

logger = logging.getLogger(__name__)
MOST_SLOTS = 16
"""Texts of --samples generated in one batch."""
ROWS = 64
"""Texts of --texts generated in one batch."""
DATE = (1980, 1, 1, 0, 0, 0)
"""Date of every document in --out-file, so that equal texts give equal files."""
FOR_IMAGES = ("run", "adapter", "device", "images", "out", "batch_size", "temperature", "seed")
"""The options that --images reads."""

DECODE_HELP = (
    "How a perceiver_ar continues once all latents are used: `subquad list perceiver_ar` describes each. null: as the "
    "model is configured."
)
REFILL_HELP = (
    "For --decode refill and frozen: how many of the last tokens become latents after the prompt and at each refill. "
    "Fewer leave more latents for new tokens. null: half of all latents."
)
ADAPTER_HELP = "Folder of a LoRA adapter to apply to the model in RUN. null: none."
PROMPT_HELP = "Text to continue; - reads it from standard input."
STATE_IN_HELP = "Start from a state that --state-out saved with this model: the prompt continues its text."
STATE_OUT_HELP = (
    "Save the state after the prompt and all generated tokens, including a stop string, to this file. With "
    "--max_tokens 0 only the prompt is read and nothing is printed."
)
STOP_HELP = "Stop before this text appears in the output. Can be repeated."
SAMPLES_HELP = "Number of texts to generate from the prompt, with seeds seed, seed + 1, ..."
TEXTS_HELP = (
    "Write this many texts to --out-file instead of printing one, with seeds seed, seed + 1, ... Without a prompt, "
    "each starts from the model's begin-of-text token."
)
OUT_FILE_HELP = "For --texts: the .zip file to write, one document per text. `subquad train --data.path` reads it."
BEAMS_HELP = "Beam search with this many beams for the likeliest text, instead of sampling. 1: no search."
IMAGES_HELP = "Draw this many images with an image model instead of continuing a text."
OUT_HELP = "For --images: PNG file to write, with all images in a grid. null: RUN/images.png."
BATCH_HELP = "For --images: images drawn in one batch."


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "generate RUN --prompt TEXT", "Continue a prompt with a language model, or draw images with an image model."
    )
    parser.add_argument("run", type=str, help=RUN_HELP)
    parser.add_argument("--prompt", type=str, default=None, help=PROMPT_HELP)
    parser.add_optional("--prompt-file", "UTF-8 text file to continue.")
    parser.add_optional("--state-in", STATE_IN_HELP)
    parser.add_optional("--state-out", STATE_OUT_HELP)
    parser.add_argument("--stop", type=str, action="append", default=[], help=STOP_HELP)
    parser.add_argument("--samples", type=int, default=1, help=SAMPLES_HELP)
    parser.add_argument("--beams", type=int, default=1, help=BEAMS_HELP)
    parser.add_optional("--texts", TEXTS_HELP, int)
    parser.add_optional("--out-file", OUT_FILE_HELP)
    parser.add_yes_no("stream", "Print text as it is generated, or all at the end.")
    parser.add_optional("--decode", DECODE_HELP, Decode)
    parser.add_optional("--refill", REFILL_HELP, int)
    parser.add_optional("--adapter", ADAPTER_HELP)
    parser.add_optional("--draft", DRAFT_HELP)
    parser.add_device()
    add_precision(parser)
    parser.add_class_arguments(SamplingConfig, None, as_group=False)
    parser.add_optional("--images", IMAGES_HELP, int)
    parser.add_optional("--out", OUT_HELP)
    parser.add_argument("--batch_size", type=int, default=100, help=BATCH_HELP)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse and generate; return the exit status."""
    parser = make_parser()
    asked = parser.parse_args(arguments)
    keep_to_idle_cores(asked.device)
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
    """A model and the text that it continues."""

    loaded: training.runs.LoadedRun
    prompt: str
    """Empty if texts start from the model's begin-of-text token."""
    tokens: list[int]
    state: State | None
    sampling: SamplingConfig
    stop_tokens: frozenset[int]
    """The model's end tokens, and stop strings that are special tokens."""
    draft: MakeDraft | None

    def samplings(self, rows: range) -> list[SamplingConfig]:
        """Return the sampling of text i for each i in `rows`, with seed `seed + i`."""
        seed = self.sampling.seed
        return [self.sampling if seed is None else self.sampling.replace(seed=seed + row) for row in rows]


def _start(parser: Parser, asked: Namespace) -> Start:
    """Check the arguments; load model, prompt and state."""
    with parser.checking():
        sampling = _checked(parser, asked)
        begins_itself = asked.texts is not None and asked.prompt is None and asked.prompt_file is None
        prompt = "" if begins_itself else _prompt(asked.prompt, asked.prompt_file)
    with parser.checking():
        with waiting(READING):
            loaded = training.runs.load_run(
                asked.run, asked.device, asked.adapter, dtype=asked.dtype, quantize=asked.quantize
            )
        if asked.decode is not None or asked.refill is not None:
            loaded.decoder.set_decode(asked.decode, asked.refill)
        state = read_state(loaded.decoder, asked.state_in)
        tokens = _tokens(loaded, None if begins_itself else prompt, goes_on=state is not None)
        sampling = _limited(loaded.decoder, len(tokens), state, sampling, keep=asked.state_out is not None)
        stops = loaded.end_tokens | special_ids(loaded.tokenizer, asked.stop)
        draft = draft_of(asked.draft, loaded, asked.device)
    return Start(loaded, prompt, tokens, state, sampling, stops, draft)


def _checked(parser: Parser, asked: Namespace) -> SamplingConfig:
    """Return the sampling; raise `ValueError` for arguments that can't be combined."""
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
            raise ValueError("--state-out keeps a single text: it can't be combined with --samples or --beams")
        check_output("state-out", asked.state_out)
    return sampling


def _check_texts(asked: Namespace) -> None:
    """Raise `ValueError` or `FileNotFoundError` for invalid options of --texts."""
    if asked.texts is None or asked.out_file is None:
        given = "--out-file" if asked.texts is None else "--texts"
        raise ValueError(f"--texts N and --out-file FILE need each other, got only {given}")
    check_at_least(1, texts=asked.texts)
    check_output("out-file", asked.out_file)
    if not asked.out_file.endswith(".zip"):
        raise ValueError(f"--out-file must be a .zip file, got {asked.out_file!r}")
    unread = {"--samples": asked.samples > 1, "--beams": asked.beams > 1, "--stop": bool(asked.stop)}
    unread |= {"--state-in": asked.state_in is not None, "--state-out": asked.state_out is not None}
    for name, is_given in unread.items():
        if is_given:
            raise ValueError(f"{name} can't be combined with --texts; leave it out")


def _check_beams(asked: Namespace, sampling: SamplingConfig) -> None:
    """Raise `ValueError` for options that a search ignores."""
    if asked.draft is not None:
        raise ValueError("--draft guesses the tokens of a sample, and --beams searches: leave one of them out")
    if asked.samples > 1 or asked.stop:
        name = "--stop" if asked.stop else "--samples"
        raise ValueError(f"--beams gives a single text without stop strings: leave {name} out")
    for field in fields(SamplingConfig):
        value = getattr(sampling, field.name)
        if field.name not in ("max_tokens", "prefill_chunk") and value != field.default:
            raise ValueError(f"{field.name}={value!r} has no effect with --beams; leave it out")


def _prompt(text: str | None, file: str | None) -> str:
    """Return the prompt's text; raise `ValueError` unless it comes from exactly one place."""
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


def _tokens(loaded: training.runs.LoadedRun, prompt: str | None, *, goes_on: bool) -> list[int]:
    """Return the prompt's tokens, with begin-of-text tokens unless it `goes_on`; None: the begin-of-text token alone.

    Raises `ValueError` if there are none.
    """
    if prompt is None:
        token = _begin_token(loaded)
        if token is None:
            raise ValueError(f"{loaded.folder} has no begin-of-text token (bos_token_id); give a --prompt")
        return [token]
    tokens = (encode_text if goes_on else encode_prompt)(loaded.tokenizer, prompt)
    if not tokens:
        raise ValueError("the prompt must have at least one token, got an empty text")
    return tokens


def _begin_token(loaded: training.runs.LoadedRun) -> int | None:
    """Return the `bos_token_id` of the model's configuration, else the tokenizer's document separator, else None."""
    file = training.runs.model_home(loaded.folder) / "config.json"
    token = read_json_mapping(file).get("bos_token_id") if file.is_file() else None
    return token if isinstance(token, int) else separator_id(loaded.tokenizer)


def read_state(decoder: Decoder, file: str | None) -> State | None:
    """Return the state in `file`; raise `ValueError` if it is of another model or of several texts."""
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
        return state  # `_limited` explains that no position is left
    try:
        with torch.no_grad():
            decoder(torch.zeros(1, 1, dtype=torch.long, device=device), state)
    except Exception as error:  # whatever the first operation with wrong shapes raises
        raise ValueError(f"{file} does not fit the model: {error!r}") from error
    return state


def _limited(
    decoder: Decoder, prompt: int, state: State | None, sampling: SamplingConfig, *, keep: bool
) -> SamplingConfig:
    """Return the sampling with `max_tokens` limited to the model's latents (decode=frozen) and positions.

    With `keep`, the last token is read too and takes a place. Raises `ValueError` if even the prompt doesn't fit.
    """
    unread = 1 if keep else 0
    limits: list[tuple[int, str]] = []
    latents = decoder.most_new_tokens(prompt, state)
    if latents is not None:
        hint = "a lower --refill leaves more, and --decode exact or refill has no limit"
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
    """Print the prompt and its continuation (nothing if max_tokens is 0), and statistics to standard error."""
    begin = time.perf_counter()
    decoder, tokens = start.loaded.decoder, start.tokens
    generation = Generation(
        decoder, tokens, start.sampling, state=start.state, stop_tokens=start.stop_tokens, draft=start.draft
    )
    generation.prefill()
    read = time.perf_counter()
    stream = TextStream(start.loaded.tokenizer, tokens, asked.stop)
    if asked.max_tokens:
        sys.stdout.write(start.prompt)
    held, count = "", 0
    for token in generation:
        count += 1
        piece = "" if token in start.stop_tokens else stream.push(token)
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
    seconds, guesses = time.perf_counter() - read, _guesses(generation.guesses)
    if asked.state_out is not None:
        generation.read_all().save(asked.state_out, model=decoder)
    state_bytes = generation.state.nbytes if generation.state else 0
    sys.stderr.write(
        f"prompt: {len(tokens)} tokens in {read - begin:.2f} s; {_speed(count, seconds)}{guesses}; "
        f"state: {state_bytes:,} bytes{f' in {asked.state_out}' if asked.state_out else ''}\n"
    )


def _speed(tokens: int, seconds: float) -> str:
    return f"generated: {tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)"


def _guesses(counts: tuple[int, int]) -> str:
    right, made = counts
    return f", {right} of {made} guesses right" if made else ""


def _print_samples(start: Start, asked: Namespace) -> None:
    """Print several numbered continuations of the prompt, and the speed to standard error."""
    begin = time.perf_counter()
    seen = 0 if start.state is None else int(start.state.seen)
    decoder = BatchDecoder(
        start.loaded.decoder,
        slots=min(asked.samples, MOST_SLOTS),
        max_context=seen + len(start.tokens) + max(1, start.sampling.max_tokens),
        prefill_chunk=start.sampling.prefill_chunk,
        draft=start.draft,
    )
    requests = [
        decoder.add(start.tokens, sampling, stop_tokens=start.stop_tokens, state=start.state)
        for sampling in start.samplings(range(asked.samples))
    ]
    streams = {id(request): TextStream(start.loaded.tokenizer, start.tokens, asked.stop) for request in requests}
    texts, state_bytes = {id(request): start.prompt for request in requests}, 0
    most = start.sampling.max_tokens
    with progress("token") as show:
        while decoder.waiting or decoder.running:
            state_bytes = max(state_bytes, decoder.state_bytes)
            for request, token in decoder.step():
                if token not in start.stop_tokens:
                    texts[id(request)] += streams[id(request)].push(token)
                if streams[id(request)].stopped is not None:
                    decoder.cancel(request)
            if show:
                done = (most if request.finished else len(request.tokens) for request in requests)
                show(sum(done), most * len(requests))
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
    """Print the likeliest text of a beam search, and its score and speed to standard error."""
    begin = time.perf_counter()
    best = beam_search(
        start.loaded.decoder,
        start.tokens,
        beams=asked.beams,
        max_new_tokens=start.sampling.max_tokens,
        stop_tokens=start.stop_tokens,
        state=start.state,
        prefill_chunk=start.sampling.prefill_chunk,
    )[0]
    stream = TextStream(start.loaded.tokenizer, start.tokens)
    said = best.tokens[:-1] if best.finished == "stop" else best.tokens
    text = "".join([stream.push(token) for token in said]) + stream.finish()
    sys.stdout.write(f"{start.prompt}{text}\n")
    sys.stdout.flush()
    speed = _speed(len(best.tokens), time.perf_counter() - begin)
    sys.stderr.write(f"score: {best.score:.4f} nats a token, of {asked.beams} beams; {speed}\n")


def _write_texts(start: Start, asked: Namespace) -> None:
    """Write --texts texts to --out-file, each ending before a token that begins or ends a text.

    The file appears once it is complete, without empty texts. Statistics go to standard error.
    """
    begin, most = time.perf_counter(), start.sampling.max_tokens
    tokens, begin_token = start.tokens, _begin_token(start.loaded)
    ends = start.stop_tokens if begin_token is None else start.stop_tokens | {begin_token}
    reading = Generation(start.loaded.decoder, tokens, start.sampling)
    reading.prefill()
    slots, context = min(ROWS, asked.texts), len(tokens) + max(1, most)
    decoder = BatchDecoder(start.loaded.decoder, slots=slots, max_context=context, draft=start.draft)
    requests = [
        decoder.add(tokens[-1:], sampling, stop_tokens=ends, state=reading.state, before=tokens[:-1])
        for sampling in start.samplings(range(asked.texts))
    ]
    with progress("token") as show:
        while decoder.waiting or decoder.running:
            decoder.step()
            if show:
                done = (most if request.finished else len(request.tokens) for request in requests)
                show(sum(done), most * len(requests))
    texts, count = list[str](), 0
    for request in requests:
        if request.error is not None:
            raise request.error
        own = request.tokens[:-1] if request.finished == "stop" else request.tokens
        texts.append(start.loaded.tokenizer.decode(tokens + own, skip_special_tokens=True).strip())
        count += len(own)
    with aside(Path(asked.out_file)) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        for number, text in enumerate(texts, 1):
            if text:
                document = zipfile.ZipInfo(f"{number:0{len(str(len(texts)))}}.txt", DATE)
                file.writestr(document, text, zipfile.ZIP_DEFLATED)
    seconds, empty = time.perf_counter() - begin, sum(not text for text in texts)
    left_out = f" ({empty} empty texts left out)" if empty else ""
    sys.stderr.write(
        f"{len(texts) - empty} texts of {sum(len(text.encode()) for text in texts):,} bytes in {asked.out_file}"
        f"{left_out}; generated: {count:,} tokens in {seconds:.1f} s ({count / seconds:,.0f} tokens/s)\n"
    )


def _draw_images(parser: Parser, asked: Namespace) -> None:
    """Draw images and write the picture; print speed and state size to standard error."""
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
    with parser.checking(), waiting(READING):
        loaded = training.runs.load_image_run(asked.run, asked.device, asked.adapter)
    with progress("byte") as shown:
        drawn = generate_images(
            loaded.model,
            asked.images,
            temperature=sampling.temperature,
            seed=seed,
            batch_size=asked.batch_size,
            progress=shown,
        )
    images = drawn.pixels_NT.view(-1, *loaded.model.config.shape).numpy()
    write_png(out, picture_of(square(list(images))))
    sys.stderr.write(
        f"drawn: {asked.images} images in {drawn.seconds:.2f} s ({asked.images / drawn.seconds:.2f} images/s), "
        f"{drawn.batch_size} at once, seed {seed}; state: {drawn.state_bytes:,} bytes\n"
    )
    sys.stdout.write(f"{out}\n")
