"""Compiles the kernels for a card, for which Triton needs no GPU, and writes what came of it as JSON.

A process of its own, since a process either compiles kernels or interprets them. `python compile_for.py
90:quick:gated_scan 80:bfloat16:running_softmax` prints what it compiled: architecture, cases and family.
`python compile_for.py all benchmarks/results/compiled.json` writes the numbers of docs/gpu.md; names of families after
the file renew the rows of these alone.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, product
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget

from subquad.ops._triton import common
from subquad.ops._triton.attend import attend, most_channels
from subquad.ops._triton.delta import delta_scan
from subquad.ops._triton.gated_mean import gated_mean
from subquad.ops._triton.scan import gated_scan
from subquad.ops._triton.softmax import running_softmax
from subquad.ops.patterns import Causal, Segments, Shifted, Window
from subquad.ops.slots import Starts

BF16 = torch.bfloat16
DTYPES = {"bfloat16": BF16, "float16": torch.float16, "float32": torch.float32, "tf32": torch.float32}
"""`tf32`: float32 with products on tensor cores."""
KIB = 1024
CARDS = {
    80: common.Card((8, 0), 163 * KIB),
    86: common.Card((8, 6), 99 * KIB),
    89: common.Card((8, 9), 99 * KIB),
    90: common.Card((9, 0), 227 * KIB),
}
"""By architecture: A100; A40 and RTX 30; L4, L40S and RTX 40; H100 and H200."""
# Every path that depends on the length at all is taken by the first two.
FIRST = (10_000, 1)
LENGTHS = (2, 3, 5, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 1000, 4096, 65_536)


class Target:
    """A driver for a device that is not there."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch  # kernels are kept by device

    def get_current_stream(self, device=None):
        return 0


class Compiled:
    """Compiles instead of launching, and keeps the kernels that came of it, each with the first case that needs it."""

    def __init__(self):
        self.kernels, self.case = {}, {}

    def launch(self, kernel, grid, *arguments, **constants):
        if 0 not in grid:
            compiled = kernel.warmup(*arguments, grid=grid, **constants)
            name = kernel.fn.__name__ + (" (one token)" if constants.get("SAME_POSITION") else "")
            self.kernels.setdefault(compiled.hash, (name, self.case, compiled))

    def report(self):
        """Return each kernel's name, case, bytes of shared memory, and registers and bytes of stack a thread."""
        return [
            {"kernel": name, **case, "shared": compiled.metadata.shared, **usage(compiled.asm["cubin"])}
            for name, case, compiled in self.kernels.values()
        ]


def usage(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: max(int(number) for number in re.findall(rf"{short}:(\d+)", found))
        for name, short in (("registers", "REG"), ("stack", "STACK"))
    }


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


def delta(tokens, K, V, decay, dtype, padded=False, groups=2):
    """Forward, without and with gradients, and backward."""
    F = {"none": [], "head": [1], "channel": [K]}[decay]
    q, k = inputs(tokens, K, K, dtype=dtype, heads=groups)
    v, beta, *log_f = inputs(tokens, V, 1, *F, dtype=dtype)
    state = torch.zeros(1, 2, K, V) if padded else None
    mask = torch.ones(1, tokens, dtype=torch.bool) if padded else None
    call = partial(delta_scan, q, k, v, beta, *(log_f or [None]), state, mask)
    differentiate(call())
    with torch.no_grad():
        call()


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
    """Forward, backward, and one token more without gradients, if the card holds that many channels."""
    if max(K, V) > most_channels(dtype.itemsize, None):
        return
    q, k, v = inputs(tokens, K, K, V, dtype=dtype)
    differentiate(attend(q, k, v, pattern, Starts(0, 0), 0.125))
    with torch.no_grad():
        attend(*inputs(1, K, dtype=dtype), k, v, pattern, Starts(tokens - 1, 0), 0.125)


SIZES = ((16, 16), (43, 80), (64, 64), (128, 128), (256, 256))
QUICK = {
    "gated_scan": [
        partial(scan, K=64, V=64, decay="none", dtype=BF16),
        partial(scan, K=128, V=128, decay="channel", dtype=BF16, padded=True),
    ],
    "delta_scan": [
        partial(delta, K=64, V=64, decay="none", dtype=BF16),
        partial(delta, K=96, V=192, decay="head", dtype=BF16, groups=1),
        partial(delta, K=128, V=128, decay="channel", dtype=BF16, padded=True),
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
    "delta_scan": [partial(delta, K=K, V=V, decay=decay) for K, V in SIZES for decay in ("none", "head", "channel")],
    "running_softmax": [
        partial(softmax, L=L, V=V, want_lse=True) for L, V in (*SIZES, (1, 64), (1, 256), (10, 64), (512, 64))
    ],
    "gated_mean": [partial(mean, V=V, padded=padded) for V in (3, 64, 80, 256) for padded in (False, True)],
    "block_attention": [
        partial(attention, pattern=pattern, K=K, V=V)
        for K, V in (*SIZES, (512, 512))
        for pattern in (Causal(), Segments(size=256), Shifted(size=256, shift=128, back=1), Window(width=512))
    ],
}


def report(calls, lengths):
    """Return the kernels of a family, and how many were compiled again, by length."""
    compiled, again = Compiled(), {}
    common.launch = compiled.launch
    for call in calls:
        compiled.case = {name: str(value) for name, value in call.keywords.items() if name in ("K", "L", "V", "decay")}
        for tokens in FIRST:
            call(tokens)
        for tokens in lengths:
            before = len(compiled.kernels)
            call(tokens)
            again[tokens] = again.get(tokens, 0) + len(compiled.kernels) - before
    return {"kernels": compiled.report(), "compiled again": again}


def compile_for(arch, which, family, calls=None):
    """Return the report of a family: `quick`, what is used most, at all lengths; a dtype, `calls` (None: all) in it."""
    triton.runtime.driver.set_active(Target(arch))
    torch.set_float32_matmul_precision("high" if which == "tf32" else "highest")
    common.card = lambda device: CARDS[arch]
    common.check_device = lambda op, *tensors: None
    if which == "quick":
        found = report(QUICK[family], LENGTHS)
    else:
        found = report([partial(call, dtype=DTYPES[which]) for call in calls or ALL[family]], ())
    return {"limit": CARDS[arch].shared, **found}


SHOWN = {64, 128, 256, 512}


def is_shown(call):
    """Say whether docs/gpu.md has the sizes: as many key as value channels, or 64 value channels."""
    sizes = call.keywords
    channels = sizes.get("K", sizes.get("L", sizes["V"]))
    return channels in SHOWN and sizes["V"] in (channels, 64)


def rows(family, which, arch):
    """Return what docs/gpu.md shows of a family in a dtype on a card: a row for each kernel and size."""
    found = {}
    for kernel in compile_for(arch, which, family, filter(is_shown, ALL[family]))["kernels"]:
        channels = int(kernel.get("K", kernel.get("L", kernel["V"])))
        numbers = [kernel[name] for name in ("shared", "registers", "stack")]
        case = found.setdefault((kernel["kernel"], channels), numbers)
        case[:] = map(max, case, numbers)  # of all decays and patterns
    return [[family, *case, which, f"sm_{arch}", *numbers] for case, numbers in found.items()]


def write_all(path, *families):
    """Compile the families in two processes, and write their rows in place of those that the file has of them."""
    head = {"triton": triton.__version__, "limits": {f"sm_{arch}": card.shared for arch, card in CARDS.items()}}
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = {family: [row for row in found if row[0] == family] for family in ALL}
    with ProcessPoolExecutor(2) as pool:
        for family in families or ALL:
            cases = zip(*product([family], DTYPES, CARDS), strict=True)
            kept[family] = list(chain.from_iterable(pool.map(rows, *cases)))
            lines = ",\n".join(json.dumps(row) for name in kept for row in kept[name])
            path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


def main(*specs):
    if specs[0] == "all":
        write_all(Path(specs[1]), *specs[2:])
        return
    parts = {spec: spec.split(":") for spec in specs}
    print(json.dumps({spec: compile_for(int(arch), which, family) for spec, (arch, which, family) in parts.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
