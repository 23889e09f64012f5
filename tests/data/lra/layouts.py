"""Small data sets in every layout of Long Range Arena's, and a stack machine that evaluates ListOps."""

import json
import lzma

import numpy as np

from subquad.data.lra.listops import CLOSE, MAX, MED, MIN, SM
from tests.data.pictures import write_png

HOME = "curv_contour_length_14"
"""Pathfinder's folder of difficulty=hard."""


def put(root, name, content):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content.encode() if isinstance(content, str) else content)


def reviews(root):
    for side, name, count in (("train", "pos", 12), ("train", "neg", 18), ("test", "pos", 3), ("test", "neg", 5)):
        for i in range(count):
            put(root, f"{side}/{name}/{i}_7.txt", f"é {side} {name} {i} " + "x" * i)
    (root / "train" / "unsup").mkdir()
    return root


def expressions(root):
    for name, count in (("train", 20), ("val", 3), ("test", 4)):
        rows = [f"( ( ( [MIN {i % 10} ) {(i + 3) % 10} ) ] )\t{min(i % 10, (i + 3) % 10)}" for i in range(count)]
        rows += [f"( ( ( [MAX {i} ) {i} ) ] )\t{i}" for i in range(10)] * (name == "train")
        put(root, f"basic_{name}.tsv", "\n".join(["Source\tTarget", *rows]) + "\n")
    return root


def release(root, rows=2):
    for name in ("train", "eval", "test"):
        texts = (("one", "three")[i % 2] + "!" * (i // 2) for i in range(rows))
        lines = [f'"{i % 2}.0"\t"a{i}"\t"b"\t"{text}"\t"two ""2"""\n' for i, text in enumerate(texts)]
        put(root, f"new_aan_pairs.{name}.tsv", "".join(lines))
    return root


def papers(root):
    rows = [json.dumps({"id": f"P{i}", "text": f"paper {i} " * (i + 1)}) for i in range(4)]
    put(root, "papers.jsonl.xz", lzma.compress("\n".join(rows).encode()))
    for name in ("train", "val", "test"):
        put(root, f"pairs_{name}.tsv", "1\tP0\tP1\n0\tP2\tP1\n")
    return root


def pictures(root, side=4):
    rng = np.random.default_rng(0)
    for part, count in (("train", 10), ("test", 2)):
        for name in ("cat", "dog"):
            for i in range(count):
                write_png(root / part / name / f"{i}.png", rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
    return root


def pathfinder(root, kind=None, side=32):
    """The release, its metadata as text or (`kind`) as an array."""
    home, rows = root / HOME, []
    for i in range(20):
        write_png(home / f"imgs/0/sample_{i}.png", np.full((side, side), i, dtype=np.uint8))
        rows.append(["imgs/0", f"sample_{i}.png", str(i), str(i % 2), "1.8", "14"])
    put(home, "metadata/0.npy", "\n".join(map(" ".join, rows)) + "\n")
    if kind is not None:
        np.save(home / "metadata/0.npy", np.array(rows, dtype=kind))
    return root


def write_release(root, task):
    """Write the release's files of one task, with whole images of 8 x 8 pixels for `image`; return the folder."""
    if task.startswith("pathfinder"):
        return pathfinder(root, side=int(task.removeprefix("pathfinder")))
    if task == "image":
        return pictures(root, side=8)
    return release(root, rows=12) if task == "retrieval" else {"listops": expressions, "text": reviews}[task](root)


DATASETS = {reviews: "text", expressions: "listops", release: "retrieval", papers: "retrieval"}
DATASETS |= {pictures: "image", pathfinder: "pathfinder32"}


def solve(tokens: list[int]) -> tuple[int, int]:
    """Return the value of an expression and the depth of its deepest node, by a stack machine."""
    stack: list[int] = []
    deepest = depth = 0
    for token in tokens:
        if token != CLOSE:
            stack.append(token)
            deepest = max(deepest, depth + 1)
            depth += token >= MIN
            continue
        arguments: list[int] = []
        while stack[-1] < MIN:
            arguments.append(stack.pop())
        assert 2 <= len(arguments) <= 10
        arguments.sort()
        median = (arguments[(len(arguments) - 1) // 2] + arguments[len(arguments) // 2]) // 2
        stack.append({MIN: arguments[0], MAX: arguments[-1], MED: median, SM: sum(arguments) % 10}[stack.pop()])
        depth -= 1
    (value,) = stack
    return value, deepest
