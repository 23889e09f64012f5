"""Write the tables of docs/gpu.md: what Triton compiles the kernels to, for four cards.

python tests/ops/triton/compile_for.py all benchmarks/results/compiled.json    # compiles first (no GPU, minutes)
python docs/make_gpu.py                                                        # from that file
"""

from collections.abc import Callable
from functools import partial

import pages

RESULT = pages.RESULTS / "compiled.json"
FAMILIES = {"block_attention": "channels", "gated_scan": "channels", "running_softmax": "latents"}


def limits() -> str:
    """Return the shared memory of each card and the compiler's version."""
    found = pages.read(RESULT)
    kib = ", ".join(f"{card} {shared // 1024}" for card, shared in found["limits"].items())
    return f"KiB of shared memory that a block may have: {kib}. Triton {found['triton']}."


def compiled(family: str) -> str:
    """Return a family's table: a row for each kernel, size and dtype, a column for each card."""
    found = pages.read(RESULT)
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for name, kernel, size, dtype, card, shared, registers, stack in found["rows"]:
        if name == family:
            cell = f"{shared / 1024:.1f} / {registers} / " + (f"**{stack:,}**" if stack > 1024 else f"{stack:,}")
            lines.setdefault((kernel.replace("_kernel", ""), str(size), dtype), {})[card] = cell
    rows = [[*names, *(cells.get(card, "-") for card in found["limits"])] for names, cells in lines.items()]
    table = pages.table(["kernel", FAMILIES[family], "dtype", *found["limits"]], rows, names=3)
    return f"<details><summary>{family}</summary>\n\n{table}\n\n</details>"


BLOCKS: dict[str, Callable[[], str]] = {"limits": limits}
BLOCKS |= {family.replace("_", "-"): partial(compiled, family) for family in FAMILIES}

if __name__ == "__main__":
    pages.rewrite("gpu.md", BLOCKS)
