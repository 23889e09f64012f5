"""Compiles the kernels for an H100 or H200 (sm_90), for which Triton needs no GPU, and prints what came of it as JSON.

A process of its own, since a process either compiles kernels or interprets them: `python sm90.py quick gated_scan`, or
`python sm90.py bfloat16 gated_scan running_softmax`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

from subquad.ops._triton import common
from subquad.ops._triton.attend import attend
from subquad.ops._triton.gated_mean import gated_mean
from subquad.ops._triton.scan import gated_scan
from subquad.ops._triton.softmax import running_softmax
from subquad.ops.patterns import Causal, Segments, Shifted, Window
from subquad.ops.slots import Slots

BF16 = torch.bfloat16
# Every path that depends on the length at all is taken by the first two.
FIRST = (10_000, 1)
LENGTHS = (2, 3, 5, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 1000, 4096, 65_536)


class Target:
    """A driver for a device that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


class Compiled:
    """Compiles instead of launching, and keeps the kernels that came of it."""

    def __init__(self):
        self.kernels = {}

    def launch(self, kernel, grid, *arguments, **constants):
        if 0 not in grid:
            compiled = kernel.warmup(*arguments, grid=grid, **constants)
            self.kernels.setdefault(compiled.hash, (kernel.fn.__name__, compiled))

    def report(self):
        """Of each kernel: its name, bytes of shared memory, and bytes a thread that registers spill."""
        return [
            {"name": name, "shared": compiled.metadata.shared, "spills": spills(compiled.asm["cubin"])}
            for name, compiled in self.kernels.values()
        ]


def spills(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(stack) for stack in re.findall(r"STACK:(\d+)", usage))


def inputs(tokens, *channels, dtype, heads=2):
    """Zeros `[1, H, T, .]` as layers lay them out."""
    return [torch.zeros(1, tokens, heads, n, dtype=dtype).transpose(1, 2).requires_grad_() for n in channels]


def differentiate(outputs):
    outputs = [y for y in outputs if y is not None]
    torch.autograd.backward(outputs, [torch.zeros_like(y) for y in outputs])


def scan(tokens, K, V, decay, dtype, normalise=True, padded=False):
    """Forward, backward, and one token more without gradients."""
    F = {"none": [], "head": [1], "channel": [K]}[decay]
    q, i, v, *log_f = inputs(tokens, K, K, V, *F, dtype=dtype)
    state = torch.zeros(1, 2, K, V + normalise) if padded else None
    mask = torch.ones(1, tokens, dtype=torch.bool) if padded else None
    out, state = gated_scan(q, i, v, *(log_f or [None]), state, mask, normalise, 0.0)
    differentiate([out, state])
    with torch.no_grad():
        q, i, v, *log_f = inputs(1, K, K, V, *F, dtype=dtype)
        gated_scan(q, i, v, *(log_f or [None]), state, mask if mask is None else mask[:, :1], normalise, 0.0)


def softmax(tokens, L, V, dtype, want_lse=False):
    """Forward, backward, and one token more without gradients."""
    out, lse, *state = running_softmax(*inputs(tokens, L, L, V, dtype=dtype), None, None, want_lse)
    differentiate([out, lse, *state])
    with torch.no_grad():
        running_softmax(*inputs(1, L, L, V, dtype=dtype), tuple(state), None, want_lse)


def mean(tokens, V, dtype, padded=False):
    """Forward, backward, and one token more without gradients; `padded`: with factors, a state and a mask."""
    rest = None, None, None
    if padded:
        state = torch.zeros(1, 2, 1, dtype=torch.float64), torch.zeros(1, 2, 1, V, requires_grad=True)
        rest = torch.zeros(1, 2, tokens, 2), state, torch.ones(1, tokens, dtype=torch.bool)
    out, *state = gated_mean(*inputs(tokens, 1, 1, V, dtype=dtype), *rest)
    differentiate([out, *state])
    with torch.no_grad():
        mask = torch.ones(1, 1, dtype=torch.bool) if padded else None
        gated_mean(*inputs(1, 1, 1, V, dtype=dtype), None, tuple(state), mask)


def attention(tokens, pattern, K, V, dtype):
    """Forward, backward, and one token more without gradients."""
    q, k, v = inputs(tokens, K, K, V, dtype=dtype)
    differentiate(attend(q, k, v, pattern, Slots(0, 0), 0.125))
    with torch.no_grad():
        attend(*inputs(1, K, dtype=dtype), k, v, pattern, Slots(tokens - 1, 0), 0.125)


SIZES = ((16, 16), (43, 80), (64, 64), (128, 128), (256, 256))
QUICK = {
    "gated_scan": [
        partial(scan, K=64, V=64, decay="none", dtype=BF16),
        partial(scan, K=128, V=128, decay="channel", dtype=BF16, padded=True),
    ],
    "running_softmax": [
        partial(softmax, L=64, V=128, dtype=BF16),
        partial(softmax, L=1, V=64, dtype=BF16, want_lse=True),
    ],
    "gated_mean": [partial(mean, V=64, dtype=BF16)],
    "block_attention": [partial(attention, pattern=Segments(size=256), K=64, V=64, dtype=BF16)],
}
ALL = {
    "gated_scan": [partial(scan, K=K, V=V, decay=decay) for K, V in SIZES for decay in ("none", "head", "channel")],
    "running_softmax": [
        partial(softmax, L=L, V=V, want_lse=True) for L, V in (*SIZES, (1, 64), (1, 256), (10, 64), (512, 64))
    ],
    "gated_mean": [partial(mean, V=V, padded=padded) for V in (3, 64, 80, 256) for padded in (False, True)],
    "block_attention": [
        partial(attention, pattern=pattern, K=K, V=V)
        for K, V in SIZES
        for pattern in (Causal(), Segments(size=256), Shifted(size=256, shift=128, back=1), Window(width=512))
    ],
}


def report(calls, lengths):
    """Return the kernels of a family, and how many were compiled again, by length."""
    compiled, again = Compiled(), {}
    common.launch = compiled.launch
    for call in calls:
        for tokens in FIRST:
            call(tokens)
        for tokens in lengths:
            before = len(compiled.kernels)
            call(tokens)
            again[tokens] = again.get(tokens, 0) + len(compiled.kernels) - before
    return {"kernels": compiled.report(), "compiled again": again}


def main(which, *families):
    """`quick`: what is used most, at all lengths; the name of a dtype: all sizes in it."""
    triton.runtime.driver.set_active(Target())
    common.check_device = lambda op, *tensors: None
    reports = {}
    for family in families:
        calls = QUICK[family] if which == "quick" else [partial(f, dtype=getattr(torch, which)) for f in ALL[family]]
        reports[family] = report(calls, LENGTHS if which == "quick" else ())
    print(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
