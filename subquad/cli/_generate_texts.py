"""`subquad generate` with --texts: many texts to a file that training reads."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from subquad.data.tokenizers import separator_id
from subquad.generation import Generation
from subquad.generation._generate import inference
from subquad.generation._rows import join
from subquad.generation.sampling import Sampler
from subquad.parsing import read_json_mapping
from subquad.training.runs import home_of

if TYPE_CHECKING:
    from subquad.cli._generate_ask import Ask
    from subquad.generation import SamplingConfig
    from subquad.models import Decoder
    from subquad.state import State
    from subquad.training.runs import LoadedRun

ROWS = 64
"""Texts that are made at once."""
DATE = (1980, 1, 1, 0, 0, 0)
"""Of every document, so that the same texts are the same file."""


def start_token(loaded: LoadedRun) -> int | None:
    """The `bos_token_id` of the model's configuration, or the tokenizer's separator, after which texts begin."""
    file = home_of(loaded.folder) / "config.json"
    start = read_json_mapping(file).get("bos_token_id") if file.is_file() else None
    return start if isinstance(start, int) else separator_id(loaded.tokenizer)


def write_texts(loaded: LoadedRun, tokens: list[int], ask: Ask) -> None:
    """Write the texts, each after the prompt's tokens and up to a token that begins or ends one.

    The file is there when all of it is. The number of texts, those that hold nothing left out, goes to standard error.
    """
    assert ask.out_file is not None
    begin = time.perf_counter()
    generated = _generated(loaded, tokens, ask)
    texts = [loaded.tokenizer.decode(found, skip_special_tokens=True).strip() for found in generated]
    draft = Path(f"{ask.out_file}.tmp")
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        for number, text in enumerate(texts, 1):
            if text:
                file.writestr(
                    zipfile.ZipInfo(f"{number:0{len(str(len(texts)))}}.txt", DATE), text, zipfile.ZIP_DEFLATED
                )
    os.replace(draft, ask.out_file)
    count, seconds = sum(map(len, generated)) - len(tokens) * len(texts), time.perf_counter() - begin
    empty = sum(not text for text in texts)
    left_out = f" ({empty} were empty and are left out)" if empty else ""
    size = sum(len(text.encode()) for text in texts)
    sys.stderr.write(
        f"{len(texts) - empty} texts of {size:,} bytes in {ask.out_file}{left_out}; "
        f"generated: {count:,} tokens in {seconds:.1f} s ({count / seconds:,.0f} tokens/s)\n"
    )


def _generated(loaded: LoadedRun, tokens: list[int], ask: Ask) -> list[list[int]]:
    """The tokens of each text, the prompt's first."""
    assert ask.texts is not None
    ends = {token for token in (start_token(loaded), separator_id(loaded.tokenizer)) if token is not None}
    seed, shown = ask.sampling.seed, sys.stderr.isatty()
    reading = Generation(loaded.decoder, tokens, ask.sampling)
    reading.prefill()
    found: list[list[int]] = []
    for first in range(0, ask.texts, ROWS):
        rows = range(first, min(first + ROWS, ask.texts))
        samplings = [ask.sampling if seed is None else ask.sampling.replace(seed=seed + row) for row in rows]
        found += [tokens + own for own in _together(loaded.decoder, tokens, reading.state, samplings, ends)]
        if shown:
            sys.stderr.write(f"\r{len(found):,} of {ask.texts:,} texts{chr(10) if len(found) == ask.texts else ''}")
    return found


def _together(
    decoder: Decoder, prompt: list[int], state: State | None, samplings: list[SamplingConfig], ends: set[int]
) -> list[list[int]]:
    """What follows a prompt, once for each of `samplings`, in one batch: all rows are as long as each other.

    `state` is that of one row before the prompt's last token. A row that has ended is read on with the others until
    half of them have.
    """
    chosen: list[list[int]] = [[] for _ in samplings]
    choose = [Sampler(sampling, decoder.config.vocab_size, prompt) for sampling in samplings]
    rows, going = list(range(len(samplings))), set(range(len(samplings)))
    state = None if state is None else join([state] * len(rows))
    last = [prompt[-1]] * len(rows)
    with inference(decoder):
        for _ in range(samplings[0].max_tokens):
            tokens_B1 = torch.tensor(last, device=next(decoder.parameters()).device)[:, None]
            logits_BTV, state = decoder(tokens_B1, state)
            for place, row in enumerate(rows):
                if row not in going:
                    continue
                last[place] = choose[row](logits_BTV[place, -1])
                if last[place] in ends:
                    going.remove(row)
                else:
                    chosen[row].append(last[place])
            if not going:
                break
            if 2 * len(going) <= len(rows):
                kept = [place for place, row in enumerate(rows) if row in going]
                state = state.map(partial(torch.index_select, dim=0, index=torch.tensor(kept)))
                rows, last = [rows[place] for place in kept], [last[place] for place in kept]
    return chosen
