"""Write the tables of docs/gpu.md: what Triton compiles the kernels to, for four cards.

python tests/ops/triton/compile_for.py all benchmarks/results/compiled.json    # compiles first (no GPU, minutes)
python docs/make_gpu.py                                                        # from that file
"""

import pages

RESULT = pages.RESULTS / "compiled.json"


def limits() -> str:
    """Return the shared memory of each card and the compiler's version."""
    found = pages.read(RESULT)
    kib = ", ".join(f"{card} {shared // 1024}" for card, shared in found["limits"].items())
    return f"KiB of shared memory that a block may have: {kib}. Triton {found['triton']}."


def compiled() -> str:
    """Return a table for each family of kernels: a row for each kernel, size and dtype, a column for each card."""
    found = pages.read(RESULT)
    families: dict[str, dict[tuple[str, ...], dict[str, str]]] = {}
    for family, kernel, size, dtype, card, shared, registers, stack in found["rows"]:
        cell = f"{shared / 1024:.1f} / {registers} / " + (f"**{stack:,}**" if stack > 1024 else f"{stack:,}")
        names = kernel.replace("_kernel", ""), str(size), dtype
        families.setdefault(family, {}).setdefault(names, {})[card] = cell
    parts = []
    for family, lines in families.items():
        rows = [[*names, *(cells.get(card, "-") for card in found["limits"])] for names, cells in lines.items()]
        table = pages.table(["kernel", "channels or latents", "dtype", *found["limits"]], rows, names=3)
        parts.append(f"<details><summary>{family}</summary>\n\n{table}\n\n</details>")
    return "\n\n".join(parts)


BLOCKS = {"limits": limits, "compiled": compiled}

if __name__ == "__main__":
    pages.rewrite("gpu.md", BLOCKS)
