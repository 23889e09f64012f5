"""Measure the time of one decoded token after contexts of several lengths."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Unpack

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import peers as libraries
from benchmarks.by_hand import FORMS
from benchmarks.config import DecodeConfig
from benchmarks.decoding import ROOM, Read, by_hand, captured, read, recorded
from benchmarks.measuring import OUT_OF_TIME, Progress, Running, check_there, over, result_of
from benchmarks.models import OURS, THEIRS, Qwen, build_decoder, check_models, label_of, peer_model
from benchmarks.report import Report, Row
from benchmarks.timing import Failure, Run, Timing, attempt, interleave, wall_clock
from subquad.evaluation.provenance import provenance
from subquad.models import Decoder

MOST = 200
"""Most repeats: a token takes milliseconds."""
WARM = 0.03
"""Seconds of untimed decoding before each timed token. Without it, the case after one that has read 128 MiB of keys and
values is slower for some milliseconds."""
PEER = "transformers"


class Key(NamedTuple):
    """A decoder in one of its forms (`call`, `recorded`, `compiled`, `graph`, `by hand`) and its context's length."""

    name: str
    form: str
    tokens: int


def check_decode(config: DecodeConfig) -> None:
    """Raise `ValueError` or `TypeError` if this configuration can't be measured here."""
    check_there(config.device)
    check_models(config.mechanisms, config.options, stacks=False)
    libraries.chosen(config.peers, config.device, "decode")
    if config.graph and not config.device.startswith("cuda"):
        raise ValueError(f"graph needs a GPU, got device {config.device!r}")
    with torch.device("meta"):
        for name in config.mechanisms:
            _build(config, name)


def measure_decode(config: DecodeConfig | None = None, /, **running: Unpack[Running]) -> Report:
    """Measure the time of one token after each context, beside transformers' models and steps written by hand.

    The context is read in pieces; then the same next token is decoded from the same state in every repeat, so the
    context keeps its length. Repeats of all decoders and contexts are interleaved; `of_shortest` is the median over the
    rounds of the time relative to that after the shortest context. A time runs from call to logits, launches included,
    since a decoder waits for each token. `events` are the calls that torch's profiler sees in a step. Weights are cast
    to the dtype. Other arguments and the treatment of failures are as in `measure_ops`.
    """
    config = DecodeConfig() if config is None else config
    check_decode(config)
    peers, records = libraries.chosen(config.peers, config.device, "decode")
    origin = provenance(config.device, tuple(peer.distribution for peer in peers))
    names = [*(peer.name for peer in peers if peer.name != THEIRS), *config.mechanisms]
    names += [name for peer in peers if peer.name == THEIRS for name in (THEIRS, OURS)]
    keys = [
        Key(name, form, tokens) for name in names for form in _forms(config, name) for tokens in sorted(config.contexts)
    ]
    reads: dict[Key, Read | Failure] = {}
    models: dict[str, Any] = {}
    progress, deadline = Progress(len(keys) + 1, shown=running.get("shown", False)), running.get("deadline")
    for key in keys:
        progress.step(f"{key.name}, {key.form}, reads {key.tokens:,} tokens")
        if deadline is None or time.monotonic() <= deadline:
            if key.name not in models:
                models[key.name] = attempt(_ready, config, key.name)
            model, plain = models[key.name], reads.get(key._replace(form="call"))
            failed = [one for one in (model, plain) if isinstance(one, Failure)]
            reads[key] = failed[0] if failed else attempt(_read, config, model, key, plain)
    progress.step("one token")
    # A decoder's contexts follow each other, so that a slow moment affects both sides of their ratio.
    runs = {key: _run(done) for key, done in reads.items() if isinstance(done, Read)}
    times = interleave(runs, clock=wall_clock, repeats=config.repeats, seconds=config.seconds, most=MOST)
    rows = [_row(config, key, reads.get(key, OUT_OF_TIME), times) for key in keys]
    command = running.get("command", "")
    result = Report("decode", config.to_dict(), rows, origin, peers=records, command=command)
    if (found := running.get("found")) is not None:
        found(result)
    return result


def _forms(config: DecodeConfig, name: str) -> list[str]:
    if name.startswith(PEER):
        return ["call"]
    more = {
        "recorded": True,
        "compiled": config.compile,
        "graph": config.graph,
        "by hand": name in FORMS and name not in config.options,
    }
    return ["call", *(form for form, wanted in more.items() if wanted)]


def _build(config: DecodeConfig, name: str) -> Decoder:
    return build_decoder(name, longest=max(config.contexts) + ROOM, options=config.options, **config.sizes)


def _ready(config: DecodeConfig, name: str) -> Any:
    longest = max(config.contexts) + ROOM
    if name == OURS:
        from subquad import hf  # loads transformers

        model: Any = hf.from_transformers(Qwen(longest=longest, **config.sizes).model).decoder
    else:
        peer = name.startswith(PEER)
        model = peer_model(name, longest=longest, **config.sizes) if peer else _build(config, name)
    return model.eval().to(config.device, getattr(torch, config.dtype))


def _read(config: DecodeConfig, model: Any, key: Key, plain: Read | None) -> Read:
    """Return the decoder in its form after the context; `plain` is the one of the call."""
    if key.form == "call":
        return read(config, model, key.tokens)
    if key.form == "by hand":
        return by_hand(config, model, key.tokens)
    assert plain is not None
    if key.form == "graph":
        return captured(config, model, key.tokens, plain)
    return recorded(config, model, key.tokens, plain, compile=key.form == "compiled")


def _run(done: Read) -> Run:
    """Return the timed call: one token after untimed ones (`WARM`), which bring the weights into cache.

    The first untimed token also makes a growing cache reserve room; the timed one continues from the last.
    """

    def before() -> Any:
        memory, start = done.step(done.begin()), time.perf_counter()
        for _ in range(ROOM - 2):
            if time.perf_counter() - start > WARM:
                break
            memory = done.step(memory)
        return memory

    return Run(done.step, before=before)


def _row(config: DecodeConfig, key: Key, done: Read | Failure, times: dict[Key, Timing | Failure]) -> Row:
    result = done if isinstance(done, Failure) else times[key]
    label = label_of(key.name, config.options)
    row: dict[str, Any] = {
        "name": key.name if key.form != "by hand" else f"by hand: {key.name}",
        "label": {"call": label, "by hand": f"by hand: {label}"}.get(key.form, f"{label}, {key.form}"),
        "form": key.form,
        "kind": "peer" if key.name.startswith(PEER) else "ours",
        "tokens": key.tokens,
        "batch": config.batch,
        "pass": "token",
        **result_of(result),
    }
    if isinstance(done, Failure) or not isinstance(result, Timing):
        return row
    theirs = THEIRS if key.name in (OURS, THEIRS) else PEER
    shortest = times.get(key._replace(tokens=min(config.contexts)))
    return {
        **row,
        "tokens_per_s": config.batch / result.median,
        "of_shortest": result.relative_to(shortest) if isinstance(shortest, Timing) else None,
        "over_transformers": over(times.get(Key(theirs, "call", key.tokens)), result),
        "events": _events(done),
        "state_bytes": done.nbytes,
        "prefill_tokens_per_s": None if done.seconds is None else config.batch * key.tokens / done.seconds,
    }


def _events(done: Read) -> int:
    """Return the number of calls that torch's profiler sees in a step on the CPU."""
    memory = done.step(done.begin())
    with profile(activities=[ProfilerActivity.CPU]) as record:
        done.step(memory)
    return sum(event.count for event in record.key_averages())
