"""`subquad generate` with --texts: many texts to a file that training reads."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from subquad.data.tokenizers import separator_id
from subquad.generation import BatchDecoder
from subquad.parsing import read_json_mapping
from subquad.tools import _adapters

if TYPE_CHECKING:
    from subquad.tools._generate_ask import Ask
    from subquad.tools.runs import LoadedRun

SLOTS = 64
"""Texts that are made at once."""
DATE = (1980, 1, 1, 0, 0, 0)
"""Of every document, so that the same texts are the same file."""


def start_token(loaded: LoadedRun) -> int | None:
    """The `bos_token_id` of the model's configuration, or the tokenizer's separator, after which texts begin."""
    file = _adapters.home(loaded.folder) / "config.json"
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
    decoder = BatchDecoder(
        loaded.decoder,
        slots=min(ask.texts, SLOTS),
        max_context=len(tokens) + max(1, ask.sampling.max_tokens),
        prefill_chunk=ask.sampling.prefill_chunk,
    )
    seed = ask.sampling.seed
    requests = [
        decoder.add(
            tokens,
            ask.sampling if seed is None else ask.sampling.replace(seed=seed + number),
            stop_tokens=ends,
        )
        for number in range(ask.texts)
    ]
    shown = sys.stderr.isatty()
    while decoder.waiting or decoder.running:
        decoder.step()
        if shown:
            done = ask.texts - decoder.waiting - decoder.running
            sys.stderr.write(f"\r{done:,} of {ask.texts:,} texts{chr(10) if done == ask.texts else ''}")
    for request in requests:
        if request.error is not None:
            raise request.error
    return [tokens + [token for token in request.tokens if token not in ends] for request in requests]
