"""Write what Triton compiles the kernels to: a summary in docs/gpu.md, all numbers in benchmarks/results/compiled.md.

python tests/ops/triton/compile_for.py all benchmarks/results/compiled.json    # compiles first (no GPU, minutes)
python docs/make_gpu.py                                                        # from that file
"""

from collections import defaultdict

import pages

SPILLED = 1024
"""Bytes of stack of a thread from which registers count as spilled to memory."""


def summary() -> str:
    """Return the largest need of each family on each card."""
    found = pages.result("compiled")
    most: dict[str, dict[str, list[tuple[int, int, int]]]] = defaultdict(lambda: defaultdict(list))
    for family, *_, card, shared, registers, stack in found["rows"]:
        most[family][card].append((shared, registers, stack))
    lines = []
    for family, cards in most.items():
        largest = [[max(values) for values in zip(*cards[card], strict=True)] for card in found["limits"]]
        lines.append([f"`{family}`", *(f"{shared / 1024:.0f} / {used} / {stack:,}" for shared, used, stack in largest)])
    limits = (f"{card} (of {shared // 1024})" for card, shared in found["limits"].items())
    return f"{pages.table(['', *limits], lines)}\n\nTriton {found['triton']}."


def spilled() -> str:
    """Return the kernels whose registers spill to memory."""
    rows = [row for row in pages.result("compiled")["rows"] if row[-1] > SPILLED]
    shown: dict[str, list[str]] = defaultdict(list)
    for family, kernel, size, dtype, card, *_, stack in rows:
        shown[f"`{family}`, `{kernel.replace('_kernel', '')}`, {size} channels, {dtype}"].append(f"{card} {stack:,}")
    return "\n".join(f"- {name}: {', '.join(cards)} bytes" for name, cards in shown.items())


def compiled() -> str:
    """Return the file of all kernels: a row for each kernel, size and dtype, a column for each card."""
    found = pages.result("compiled")
    families: dict[str, dict[tuple[str, ...], dict[str, str]]] = defaultdict(dict)
    for family, kernel, size, dtype, card, shared, registers, stack in found["rows"]:
        cell = f"{shared / 1024:.1f} / {registers} / " + (f"**{stack:,}**" if stack > SPILLED else f"{stack:,}")
        families[family].setdefault((kernel.replace("_kernel", ""), str(size), dtype), {})[card] = cell
    parts = [
        f"Each cell: KiB of shared memory of a block / registers a thread / bytes of stack a thread, the most of all "
        f"decays and patterns. A stack above {SPILLED:,} bytes is **bold**; -: does not fit. `tf32` is float32 with "
        f"products on tensor cores. Triton {found['triton']}; [On a GPU](../../docs/gpu.md) has the summary."
    ]
    for family, lines in families.items():
        rows = [[*names, *(cells.get(card, "-") for card in found["limits"])] for names, cells in lines.items()]
        headers = ["kernel", "channels or latents", "dtype", *found["limits"]]
        parts += [f"## {family}", pages.table(headers, rows, names=3)]
    return pages.raw("What the compiler makes of the kernels", "make_gpu.py", *parts)


BLOCKS: pages.Blocks = {"summary": summary, "spilled": spilled}

if __name__ == "__main__":
    (pages.RESULTS / "compiled.md").write_text(compiled(), encoding="utf-8")
    pages.rewrite("gpu.md", BLOCKS)
