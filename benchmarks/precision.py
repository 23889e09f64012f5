"""Measure what fewer bits cost: the error of the logits where states or weights are stored in fewer than 32 bits.

Shape letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Unpack

import torch
from torch import Tensor

from benchmarks.config import PrecisionConfig
from benchmarks.measuring import OUT_OF_TIME, Progress, Running, check_there
from benchmarks.models import build_decoder, check_models, label_of
from benchmarks.report import Grid, Report, Row, short
from benchmarks.timing import Failure, attempt
from subquad.data import DataConfig, prepare
from subquad.evaluation.provenance import provenance
from subquad.layers.int8 import LARGEST
from subquad.models import Decoder
from subquad.models.precision import set_precision
from subquad.state import State

PRECISIONS: dict[str, dict[str, str]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int8, bfloat16": {"quantize": "int8", "dtype": "bfloat16"},
}
"""Arguments of `set_precision` by the name of a row."""
GROWING_PIECE = 16
"""Tokens after which a growing state is stored: its keys and values are written once, and rounding them again does
nothing."""
PIECE = 1024
"""Tokens that are read at once where the state isn't stored in fewer bits."""


def as_bfloat16(x: Tensor) -> Tensor:
    """Return the tensor after storing it in bfloat16."""
    return x.to(torch.bfloat16).to(x.dtype)


def as_int8(x: Tensor) -> Tensor:
    """Return the tensor after storing it as integers up to 127, with a scale for each vector of its last dimension.

    Those are the values that a channel of keys remembers, or a token's key or value in a head.
    """
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / scale).round() * scale


STORED: dict[str, Callable[[Tensor], Tensor]] = {"float32": lambda x: x, "bfloat16": as_bfloat16, "int8": as_int8}
"""What is read again of a float32 tensor of a state, by the way in which it is stored."""


def check_precision(config: PrecisionConfig) -> None:
    """Raise `ValueError` or `TypeError` if this configuration can't be measured here."""
    check_there(config.device)
    check_models(config.mechanisms, config.options, stacks=False)


def measure_precision(config: PrecisionConfig | None = None, /, **running: Unpack[Running]) -> Report:
    """Measure the error of the logits for states and weights in fewer bits, against the length of the text.

    A small model of each mechanism is trained for `steps` steps on bytes, then reads held-out texts a token at a time.
    After each token its state is stored in float32, bfloat16 and int8 (`as_int8`); float64 entries, which are running
    logarithms of sums, and counts stay. A growing state is stored every `GROWING_PIECE` tokens. Then the models whose
    weights `set_precision` has converted read the same texts. At each length the last quarter of the tokens is compared
    with float32: `kl` in nats, errors relative to the root mean square of a token's centred logits, and bits per byte.
    Other arguments and the treatment of failures are as in `measure_ops`.
    """
    config = PrecisionConfig() if config is None else config
    check_precision(config)
    rows: list[Row] = []
    origin, deadline = provenance(config.device), running.get("deadline")
    progress = Progress(len(config.mechanisms), shown=running.get("shown", False))
    report = Report("precision", config.to_dict(), rows, origin, command=running.get("command", ""))
    for name in config.mechanisms:
        progress.step(name)
        late = deadline is not None and time.monotonic() > deadline
        found = OUT_OF_TIME if late else attempt(_rows, config, name)
        rows += _failed(config, name, found) if isinstance(found, Failure) else found
        if (keep := running.get("found")) is not None:
            keep(report)
    return report


def _failed(config: PrecisionConfig, name: str, failure: Failure) -> list[Row]:
    named = {"name": name, "label": label_of(name, config.options), "kind": "ours"}
    return [{**named, "status": failure.status, "message": failure.message}]


def _rows(config: PrecisionConfig, name: str) -> list[Row]:
    model, texts_BT = trained(config, name)
    kept = [position for n in sorted(config.contexts) for position in window(n)]
    inputs_BT, B = texts_BT[:, :-1], len(texts_BT)

    def stored(state: State) -> State:
        def each(x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                return x
            return torch.cat([store(part) for store, part in zip(STORED.values(), x.split(B), strict=True)])

        return state.map(each)

    every = GROWING_PIECE if model.state_grows else 1
    found = read(model, inputs_BT.repeat(len(STORED), 1), kept, every, stored).split(B)
    parts = {("state", storage): logits for storage, logits in zip(STORED, found, strict=True)}
    for storage, asked in PRECISIONS.items():
        other = deepcopy(model)
        set_precision(other, **asked)
        parts["weights", storage] = read(other, inputs_BT, kept, PIECE)
    rows: list[Row] = []
    for (part, storage), logits_BTV in parts.items():
        for n in sorted(config.contexts) if storage != "float32" else ():
            places = [kept.index(position) for position in window(n)]
            labels_BT = texts_BT[:, [position + 1 for position in window(n)]]
            errors = errors_of(logits_BTV[:, places], parts[part, "float32"][:, places], labels_BT)
            label = f"{label_of(name, config.options)}, {storage}"
            named = {"name": name, "label": label, "kind": "ours", "part": part, "stored": storage, "tokens": n}
            rows.append({**named, "status": "ok", "message": "", **errors})
    return rows


def summary(report: Report) -> Grid:
    """Return the KL of each mechanism: of states at the shortest and the longest length, of weights at the longest."""
    lengths = sorted(report.settings["contexts"])
    columns = [("state", stored, n) for stored in ("bfloat16", "int8") for n in (lengths[0], lengths[-1])]
    columns += [("weights", stored, lengths[-1]) for stored in ("float16", "bfloat16", "int8")]
    found = {(row["name"], row["part"], row["stored"], row["tokens"]): row["kl"] for row in report.rows}
    headers = (f"{part} {stored}" + (f", {n:,}" if part == "state" else "") for part, stored, n in columns)
    names = dict.fromkeys(row["name"] for row in report.rows)
    lines = [(f"`{name}`", *(short(found[name, *column]) for column in columns)) for name in names]
    return Grid(f"KL divergence from float32 in nats a byte, weights after {lengths[-1]:,}", ("", *headers), lines)


def window(tokens: int) -> range:
    """Return the positions that are compared for a text of `tokens` tokens: its last quarter, at least one."""
    return range(min(tokens - 1, 3 * tokens // 4), tokens)


def trained(config: PrecisionConfig, name: str) -> tuple[Decoder, Tensor]:
    """Return a model of the mechanism, trained on bytes, and held-out texts `[B, T + 1]` of the longest length."""
    corpus = prepare(DataConfig(path=config.data, tokenizer="bytes"))
    longest = max(config.contexts)
    sizes = {"layers": config.layers, "dim": config.dim, "heads": config.heads}
    vocab = corpus.tokenizer.get_vocab_size()
    model = build_decoder(name, vocab=vocab, longest=longest + 1, options=config.options, **sizes)
    length, size = config.train_tokens, config.train_batch
    texts, held_out = (torch.from_numpy(part.tokens[:].astype("int64")) for part in (corpus.train, corpus.held_out))
    needed = config.batch * (longest + 1)
    if len(held_out) < needed or len(texts) <= length:
        raise ValueError(
            f"{config.data} must have more than {length} bytes to train on and {needed} held out, got {len(texts)} and "
            f"{len(held_out)}"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(0)
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.rate * min(1.0, (step + 1) / 20, 2 * (1 - step / config.steps))
        starts = torch.randint(len(texts) - length, (size,), generator=random).tolist()
        rows_BT = torch.stack([texts[start : start + length + 1] for start in starts])
        optimizer.zero_grad()
        model.loss(rows_BT[:, :-1], rows_BT[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval().to(config.device), held_out[:needed].view(config.batch, -1).to(config.device)


@torch.no_grad()
def read(
    model: Decoder,
    tokens_BT: Tensor,
    kept: Sequence[int],
    piece: int,
    stored: Callable[[State], State] = lambda state: state,
) -> Tensor:
    """Return the logits `[B, kept, V]` in float32 at some positions; after each piece the state is `stored`."""
    wanted, logits = set(kept), dict[int, Tensor]()
    state = None
    for first in range(0, tokens_BT.shape[1], piece):
        out_BTV, state = model(tokens_BT[:, first : first + piece], state)
        state = stored(state)
        logits |= {first + i: out_BTV[:, i].float() for i in range(out_BTV.shape[1]) if first + i in wanted}
    return torch.stack([logits[position] for position in kept], 1)


def errors_of(logits_BTV: Tensor, exact_BTV: Tensor, labels_BT: Tensor) -> dict[str, float]:
    """Return the errors of logits, and the bits per byte of both."""
    log_p_BTV, log_q_BTV = (x.double().log_softmax(-1) for x in (exact_BTV, logits_BTV))
    centred_BTV = log_p_BTV - log_p_BTV.mean(-1, keepdim=True)
    off_BTV = log_q_BTV - log_q_BTV.mean(-1, keepdim=True) - centred_BTV
    relative_BTV = off_BTV.abs() / centred_BTV.square().mean(-1, keepdim=True).sqrt()
    bits, exact_bits = (-x.gather(-1, labels_BT[..., None]).mean().item() / math.log(2) for x in (log_q_BTV, log_p_BTV))
    return {
        "kl": (log_p_BTV.exp() * (log_p_BTV - log_q_BTV)).sum(-1).mean().item(),
        "max_relative": relative_BTV.max().item(),
        "median_relative": relative_BTV.median().item(),
        "bits_per_byte": bits,
        "bits_per_byte_float32": exact_bits,
    }
