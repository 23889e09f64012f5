"""Whether each kernel is right: outputs, gradients and one decoded token beside the definitions, twice for equal bits.

A family of kernels runs in a process of its own, so that an illegal address ends that family alone. Its records are
lines of `gpu_checks_FAMILY.jsonl`, written as they come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Failure
from subquad.ops import block_attention_with_lse, delta_scan, gated_scan, running_softmax
from subquad.ops.patterns import Causal, Pattern, Segments, Window
from subquad.ops.softmax import gated_mean
from subquad.testing.tools import assert_in_budget

DTYPES = ("bfloat16", "float32", "float16")
LONG = "offsets beyond 2^31"
Outputs = tuple[Tensor, ...]


class Size(NamedTuple):
    """Batch, heads, tokens and channels per head; `definition` is the backend to compare with."""

    B: int
    H: int
    T: int
    K: int
    definition: str = "reference"


SIZES = (Size(2, 3, 1000, 64), Size(1, 2, 2500, 128))
WAVES = Size(2, 40, 2048, 64, "torch")
"""More programs than a GPU runs at a time; only in bfloat16, beside the chunked form. All families at once fit into 78
GiB, float64 included."""
TINY = (Size(1, 2, 40, 16),)


class Family(NamedTuple):
    """Kernels of one operator."""

    inputs: Callable[[Callable[[int], Tensor], int], list[Tensor]]
    """Make the inputs by a function that draws `[B, H, T, channels]`, and the channels per head."""
    call: Callable[..., Outputs]
    """Compute `call(backend, *inputs)`."""
    token: Callable[..., Outputs]
    """Compute the last token alone, after the state of those before."""


def _scan(decays: Callable[[int], int]) -> Family:
    def inputs(draw: Callable[[int], Tensor], K: int) -> list[Tensor]:
        q, i = (F.elu(draw(K)) + 1 for _ in range(2))
        return [q, i, draw(K), *([F.logsigmoid(draw(decays(K)) + 3)] if decays(K) else [])]

    def call(backend: str, *x: Tensor, state: Tensor | None = None) -> Outputs:
        log_f = x[3] if len(x) > 3 else None
        return gated_scan(x[0], x[1], x[2], log_f, state=state, normalise=True, eps=1e-6, backend=backend)

    def token(backend: str, *x: Tensor) -> Outputs:
        return call(backend, *(y[:, :, -1:] for y in x), state=call(backend, *(y[:, :, :-1] for y in x))[1])

    return Family(inputs, call, token)


def _delta(decays: Callable[[int], int]) -> Family:
    def inputs(draw: Callable[[int], Tensor], K: int) -> list[Tensor]:
        q, k = (F.normalize(draw(K), dim=-1) for _ in range(2))
        log_f = [F.logsigmoid(draw(decays(K)) + 3)] if decays(K) else []
        return [q, k, draw(K), 2 * draw(1).sigmoid(), *log_f]

    def call(backend: str, *x: Tensor, state: Tensor | None = None) -> Outputs:
        log_f = x[4] if len(x) > 4 else None
        return delta_scan(x[0], x[1], x[2], x[3], log_f, state=state, backend=backend)

    def token(backend: str, *x: Tensor) -> Outputs:
        return call(backend, *(y[:, :, -1:] for y in x), state=call(backend, *(y[:, :, :-1] for y in x))[1])

    return Family(inputs, call, token)


def _softmax(latents: int, mean: Callable[..., Any]) -> Family:
    def inputs(draw: Callable[[int], Tensor], K: int) -> list[Tensor]:
        first = draw(latents)
        return [first.softmax(-1) if latents > 1 else first, 2 * draw(latents), draw(K)]

    def call(backend: str, *x: Tensor) -> Outputs:
        y = mean(*x, backend=backend)
        return y.out, y.state.mean

    def token(backend: str, *x: Tensor) -> Outputs:
        state = mean(*(y[:, :, :-1] for y in x), backend=backend).state
        y = mean(*(y[:, :, -1:] for y in x), state=state, backend=backend)
        return y.out, y.state.mean

    return Family(inputs, call, token)


def _attention(pattern: Pattern) -> Family:
    def call(backend: str, q: Tensor, k: Tensor, v: Tensor, first: int = 0, old: int = 0) -> Outputs:
        return block_attention_with_lse(q, k, v, pattern, q_start=first, k_start=old, backend=backend)

    def token(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        T = q.shape[2]
        old = 0 if pattern.reach is None else max(0, T - pattern.reach - 1)
        return call(backend, q[:, :, -1:], k[:, :, old:], v[:, :, old:], T - 1, old)

    return Family(lambda draw, K: [draw(K) for _ in range(3)], call, token)


FAMILIES: dict[str, Family] = {
    "llp": _attention(Segments(size=128)),
    "window": _attention(Window(width=256)),
    "full": _attention(Causal()),
    "scan": _scan(lambda _: 0),
    "scan, decay per head": _scan(lambda _: 1),
    "scan, decay per channel": _scan(lambda K: K),
    "delta scan": _delta(lambda _: 0),
    "delta scan, decay per head": _delta(lambda _: 1),
    "delta scan, decay per channel": _delta(lambda K: K),
    "latte": _softmax(64, running_softmax),
    "elita": _softmax(1, gated_mean),
}


def check(name: str, dtype: str, size: Size, device: str, backend: str = "triton") -> Iterator[dict[str, Any]]:
    """Yield the record of outputs and gradients, then that of one token, in one dtype and size.

    Each is computed twice by the backend, once by the definition in the same dtype and once in float64. An error may be
    twice the definition's, plus one rounding (`assert_in_budget`).
    """
    family, draws = FAMILIES[name], torch.Generator(device).manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)

    def draw(channels: int) -> Tensor:
        return torch.randn(size.B, size.T, size.H, channels, generator=draws, device=device).transpose(1, 2)

    x = [y.to(kind) for y in family.inputs(draw, size.K)]
    for what, call in (("outputs and gradients", _differentiated(family.call)), ("one token", family.token)):
        record = {"family": name, "dtype": dtype, "size": list(size[:4]), "what": what, "beside": size.definition}
        start = time.monotonic()
        try:
            actual, again = call(backend, *x), call(backend, *x)
            plain, exact = call(size.definition, *x), call(size.definition, *(y.double() for y in x))
            record |= _judged(actual, again, plain, exact, kind)
        except Exception as error:
            failure = Failure.of(error)
            record |= {"status": failure.status, "message": failure.message[:400]}
        yield record | {"seconds": time.monotonic() - start}


def _differentiated(call: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """Return the call followed by the gradients of a fixed random projection of its outputs."""

    def both(backend: str, *x: Tensor) -> Outputs:
        leaves = [y.detach().requires_grad_() for y in x]
        out = call(backend, *leaves)
        draws = torch.Generator(x[0].device).manual_seed(1)
        weights = [torch.randn(y.shape, generator=draws, device=y.device).to(y.dtype) for y in out]
        total = sum((y * w).double().sum() for y, w in zip(out, weights, strict=True))
        assert isinstance(total, Tensor)
        return (*(y.detach() for y in out), *torch.autograd.grad(total, leaves))

    return both


def _judged(actual: Outputs, again: Outputs, plain: Outputs, exact: Outputs, dtype: torch.dtype) -> dict[str, Any]:
    same = all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    wrong, worst = ([] if same else ["the second call gave other bits"]), 0.0
    for n, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True)):
        worst = max(worst, ((a.double() - e).abs().max() / e.abs().max().clamp(min=1e-30)).item())
        try:
            assert_in_budget(a, p, e, dtype, f"result {n}")
        except AssertionError as error:
            wrong.append(str(error))
    status = "failed" if wrong else "ok"
    return {"status": status, "message": "; ".join(wrong), "same_bits": same, "largest_relative_error": worst}


def check_long(device: str) -> Iterator[dict[str, Any]]:
    """Yield records of tensors with more than 2^31 entries: their end beside the same tokens in a call of their own."""
    B, H, T, K = 1, 24, 1 << 20, 128
    q, v = (torch.randn(B, H, T, K, device=device, dtype=torch.bfloat16) for _ in range(2))
    q.abs_()
    half, near = T // 2, 64

    def scan(*x: Tensor, state: Tensor | None = None) -> Any:
        return gated_scan(x[0], x[0], x[1], None, state=state, normalise=True, backend="triton")

    def attend(*x: Tensor) -> Tensor:
        return block_attention_with_lse(x[0], x[0], x[1], Window(width=near), backend="triton")[0]

    pairs: dict[str, Callable[[], Outputs]] = {
        "scan": lambda: (
            scan(q, v).out[:, :, half:],
            scan(q[:, :, half:], v[:, :, half:], state=scan(q[:, :, :half], v[:, :, :half]).state).out,
        ),
        "window": lambda: (
            attend(q, v)[:, :, -near:],
            attend(q[:, :, -2 * near :].contiguous(), v[:, :, -2 * near :].contiguous())[:, :, -near:],
        ),
    }
    for name, pair in pairs.items():
        record = {"family": LONG, "dtype": "bfloat16", "size": [B, H, T, K], "what": name, "beside": "a shorter call"}
        try:
            with torch.no_grad():
                whole, alone = pair()
            record |= _judged((whole,), (whole,), (alone,), (alone,), torch.bfloat16)
        except Exception as error:
            record |= {"status": Failure.of(error).status, "message": str(error)[:400]}
        yield record


def run(name: str, device: str, tiny: bool, folder: str) -> None:
    """Check a family in every dtype and size (`tiny`: in one) and write each record; stop if the GPU is lost."""
    if name == LONG:
        records = check_long(device)
    else:
        sizes = [(dtype, size) for size in (TINY if tiny else SIZES) for dtype in (DTYPES[:1] if tiny else DTYPES)]
        sizes[1:1] = [] if tiny else [("bfloat16", WAVES)]  # soon, since time may run out
        records = (record for dtype, size in sizes for record in check(name, dtype, size, device))
    with file_of(folder, name).open("w", encoding="utf-8") as opened:
        for record in records:
            opened.write(json.dumps(record) + "\n")
            opened.flush()
            if "CUDA error" in record["message"]:
                raise SystemExit(1)


def file_of(folder: str | Path, name: str) -> Path:
    """Return the file of a family's records."""
    return Path(folder) / f"gpu_checks_{''.join(c if c.isalnum() else '_' for c in name)}.jsonl"
