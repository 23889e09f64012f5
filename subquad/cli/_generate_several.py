"""`subquad generate` with --samples or --beams: several texts, or the likeliest one."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from subquad.data.tokenizers import separator_id
from subquad.generation import BatchDecoder, StopStrings, TextStream, beam_search
from subquad.state import State

if TYPE_CHECKING:
    from subquad.cli._generate_ask import Ask
    from subquad.training.runs import LoadedRun

MOST_SLOTS = 16


def generate_several(loaded: LoadedRun, prompt: str, tokens: list[int], state: State | None, ask: Ask) -> None:
    """Print the texts, each after the prompt and under its number; the speed goes to standard error."""
    begin, state_bytes = time.perf_counter(), 0
    if ask.beams > 1:
        best = beam_search(
            loaded.decoder,
            tokens,
            beams=ask.beams,
            max_tokens=ask.sampling.max_tokens,
            stop_token=separator_id(loaded.tokenizer),
            state=state,
            prefill_chunk=ask.sampling.prefill_chunk,
        )[0]
        generated = [best.tokens]
        sys.stdout.write(f"{prompt}{_text(loaded, tokens, best.tokens, ask)}\n")
        sys.stderr.write(f"score: {best.score:.4f} nats a token, of {ask.beams} beams; ")
    else:
        generated, state_bytes = _samples(loaded, tokens, state, ask)
        for number, own in enumerate(generated, 1):
            sys.stdout.write(f"--- {number} ---\n{prompt}{_text(loaded, tokens, own, ask)}\n")
    sys.stdout.flush()
    count, seconds = sum(map(len, generated)), time.perf_counter() - begin
    size = f"; state: {state_bytes:,} bytes of {min(ask.samples, MOST_SLOTS)} slots" if state_bytes else ""
    sys.stderr.write(f"generated: {count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s){size}\n")


def _samples(loaded: LoadedRun, tokens: list[int], state: State | None, ask: Ask) -> tuple[list[list[int]], int]:
    """The tokens of each text, and the bytes of all slots while they ran."""
    seen = 0 if state is None else int(state.seen)
    decoder = BatchDecoder(
        loaded.decoder,
        slots=min(ask.samples, MOST_SLOTS),
        max_context=seen + len(tokens) + max(1, ask.sampling.max_tokens),
        prefill_chunk=ask.sampling.prefill_chunk,
    )
    stop_token = separator_id(loaded.tokenizer)
    stop_tokens = () if stop_token is None else (stop_token,)
    seed = ask.sampling.seed
    requests = [
        decoder.add(
            tokens,
            ask.sampling if seed is None else ask.sampling.replace(seed=seed + number),
            stop_tokens=stop_tokens,
            state=state,
        )
        for number in range(ask.samples)
    ]
    watches = {id(request): (TextStream(loaded.tokenizer, tokens), StopStrings(ask.stop)) for request in requests}
    most = 0
    while decoder.waiting or decoder.running:
        most = max(most, decoder.state_bytes)
        for request, token in decoder.step():
            text, stop = watches[id(request)]
            stop.push(text.push(token))
            if stop.stopped is not None:
                decoder.cancel(request)
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.tokens for request in requests], most


def _text(loaded: LoadedRun, before: list[int], tokens: list[int], ask: Ask) -> str:
    """The text of the tokens up to a stop string."""
    text, stop = TextStream(loaded.tokenizer, before), StopStrings(ask.stop)
    pieces = [stop.push(text.push(token)) for token in tokens]
    return "".join([*pieces, stop.push(text.finish()), stop.finish()])
