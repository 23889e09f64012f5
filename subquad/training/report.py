"""Final report of a run: held-out bits per byte against general compressors, state sizes and speeds."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from subquad.config import Record
from subquad.disk import write_atomically
from subquad.inference import device_of, inference
from subquad.models import Decoder
from subquad.training.baselines import Baselines, measure_baselines

STATE_AFTER = (1_000, 100_000)
"""Token counts at which the state's size is reported."""
READ_CHUNK = 2_000
DECODED = 128
"""Tokens that the speed of decoding is measured on."""


@dataclass(frozen=True)
class StateSize:
    """The decoding state of one sequence."""

    tokens: int
    bytes: int
    measured: bool
    """True if `tokens` tokens were read; False if extrapolated from fewer."""


@dataclass(frozen=True)
class Report(Record):
    """Results of a finished run."""

    bits_per_byte: float
    """Bits of the model per held-out byte."""
    baselines: Baselines
    """Compressors and n-grams given at most the training text that the model read."""
    held_out_bytes: int
    files_hash: str
    """Hash of the text's file list."""
    python: str
    parameters: int
    steps: int
    train_tokens_per_second: float
    decode_tokens_per_second: float
    states: tuple[StateSize, ...]
    """State sizes of one sequence, up to the model's last position."""
    skipped: int = 0
    """Steps skipped because of a non-finite loss or gradient (`run.nonfinite=skip`)."""

    def table(self) -> Table:
        """Return a table for the terminal."""
        table = Table(title="held-out text and cost", show_header=False)
        table.add_row("model", f"{self.bits_per_byte:.3f} bits per byte")
        for name, bits in self.baselines.named():
            table.add_row(name, f"{bits:.3f} bits per byte")
        table.add_row("held-out text", f"{self.held_out_bytes:,} bytes, in one piece")
        table.add_row("parameters, steps", f"{self.parameters:,}, {self.steps:,}")
        if self.skipped:
            table.add_row("skipped steps", f"{self.skipped:,}, not finite")
        for size in self.states:
            how = "" if size.measured else " (extrapolated)"
            table.add_row(f"state after {size.tokens:,} tokens", f"{size.bytes:,} bytes{how}")
        table.add_row("training", f"{self.train_tokens_per_second:,.0f} tokens/s")
        table.add_row("decoding, one sequence", f"{self.decode_tokens_per_second:,.0f} tokens/s")
        return table


def measure(
    decoder: Decoder,
    train_text: bytes,
    held_out_text: bytes,
    held_out_tokens: Sequence[int],
    *,
    bits_per_byte: float,
    files_hash: str,
    steps: int,
    tokens: int,
    train_tokens_per_second: float,
    skipped: int = 0,
) -> Report:
    """Measure baselines, states (on repeated tokens if needed) and decoding. Raises `ValueError` without text.

    So that this takes less time than the training of `tokens` tokens in `steps` steps, states are measured after at
    most a quarter of these tokens (but always after the first of `STATE_AFTER`), and at most `steps` / 2 tokens are
    decoded.
    """
    if not held_out_text or not len(held_out_tokens):
        raise ValueError(
            f"the report needs held-out text, got {len(held_out_text)} bytes and {len(held_out_tokens)} tokens"
        )
    return Report(
        bits_per_byte=bits_per_byte,
        baselines=measure_baselines(train_text, held_out_text),
        held_out_bytes=len(held_out_text),
        files_hash=files_hash,
        python=platform.python_version(),
        parameters=sum(parameter.numel() for parameter in decoder.parameters()),
        steps=steps,
        train_tokens_per_second=train_tokens_per_second,
        decode_tokens_per_second=decode_speed(decoder, held_out_tokens, min(DECODED, max(1, steps // 2))),
        states=tuple(state_sizes(decoder, held_out_tokens, STATE_AFTER, most=tokens // 4)),
        skipped=skipped,
    )


def write_report(report: Report, folder: str | Path) -> None:
    """Write `report.json` to the run's folder."""
    write_atomically(Path(folder) / "report.json", (json.dumps(report.to_dict(), indent=2) + "\n").encode())


def state_sizes(
    decoder: Decoder,
    tokens: Sequence[int],
    after: Sequence[int],
    chunk: int = READ_CHUNK,
    *,
    most: int | None = None,
) -> list[StateSize]:
    """Return the state size of one sequence at each token count in `after`.

    A state that stops growing is measured at each count up to `most` (None: at each). At other counts, and if it
    grows, as in a `PerceiverAR`, it is measured at the first count and extrapolated by the model's `state_bytes`.
    Counts past a learned position table are left out.
    """
    if decoder.most_tokens is not None:
        after = [count for count in after if count <= decoder.most_tokens]
    device = device_of(decoder)
    text = torch.as_tensor([int(token) for token in tokens[: max(after, default=0)]], device=device)
    sizes: list[StateSize] = []
    state, read = None, 0
    for count in sorted(after):
        if sizes and (decoder.state_grows or (most is not None and count > most)):
            first = sizes[0]
            growth = decoder.state_bytes(count) - decoder.state_bytes(first.tokens)
            sizes.append(StateSize(count, first.bytes + growth, measured=False))
            continue
        with inference(decoder):
            while read < count:
                places = torch.arange(read, min(read + chunk, count), device=device) % len(text)
                _, state = decoder.hidden(text[places][None], state)
                read += len(places)
        if state is not None:
            sizes.append(StateSize(count, state.nbytes, measured=True))
    return sizes


def decode_speed(decoder: Decoder, prompt: Sequence[int], tokens: int = DECODED) -> float:
    """Return tokens per second of greedy decoding of one sequence after a prompt of up to 64 tokens.

    If a learned position table is shorter, half of its rows go to the prompt, and fewer tokens are decoded.
    """
    prompt = prompt[:64]
    rows = decoder.most_tokens
    if rows is not None:
        prompt = prompt[: max(1, rows // 2)]
        tokens = max(1, min(tokens, rows - len(prompt)))
    most = decoder.most_new_tokens(1)
    if most is not None:
        prompt, tokens = prompt[:1], min(tokens, most - 1)
    device = device_of(decoder)
    with inference(decoder):
        logits_BTV, state = decoder(torch.as_tensor([[int(token) for token in prompt]], device=device))
        begin = time.perf_counter()
        for _ in range(tokens):
            token_BT = logits_BTV[:, -1:].argmax(-1)
            logits_BTV, state = decoder(token_BT, state)
        token_BT.tolist()  # waits for a GPU
        return tokens / (time.perf_counter() - begin)
