"""Small files in the layouts that Long Range Arena's data come in."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, MEASURED = 40, 10
SIDE = {"image": 8, "pathfinder32": 32, "pathfinder64": 64, "pathfinder128": 128}


def write_release(folder: Path, task: str) -> Path:
    """The folder that `classify.path` names, with `TRAIN` training examples or a few more."""
    home = folder / task
    home.mkdir(parents=True)
    rng = np.random.default_rng(0)
    if task == "image":
        _images(home, rng)
    elif task.startswith("pathfinder"):
        _pathfinder(home, rng, SIDE[task])
    else:
        {"listops": _listops, "text": _text, "retrieval": _retrieval}[task](home, rng)
    return home


def _listops(home: Path, rng: np.random.Generator) -> None:
    for part, count in (("train", TRAIN), ("val", MEASURED), ("test", MEASURED)):
        lines = ["Source\tTarget"]
        for number in range(count):
            value, low = number % 10, int(rng.integers(0, number % 10 + 1))
            lines.append(f"( ( ( [MAX {value} ) {low} ) ] )\t{value}")
        (home / f"basic_{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _text(home: Path, rng: np.random.Generator) -> None:
    for side, count in (("train", TRAIN), ("test", MEASURED)):
        for number in range(count):
            label = "pos" if number % 2 else "neg"
            (home / side / label).mkdir(parents=True, exist_ok=True)
            words = " ".join(rng.choice(["one", "two", "three", label], 8))
            (home / side / label / f"{number}_7.txt").write_text(f"{words} {number}", encoding="utf-8")


def _retrieval(home: Path, rng: np.random.Generator) -> None:
    for part, count in (("train", TRAIN), ("eval", MEASURED), ("test", MEASURED)):
        with (home / f"new_aan_pairs.{part}.tsv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_ALL)
            for number in range(count):
                texts = [" ".join(rng.choice(["tree", "graph", "word"], 6)) for _ in range(2)]
                writer.writerow([number % 2, f"P{number}", f"Q{number}", *texts])


def _images(home: Path, rng: np.random.Generator) -> None:
    for side, count in (("train", TRAIN), ("test", MEASURED)):
        for number in range(count):
            folder = home / side / ("cat" if number % 2 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (SIDE["image"], SIDE["image"]), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")


def _pathfinder(home: Path, rng: np.random.Generator, side: int) -> None:
    images, metadata = home / "curv_contour_length_14" / "imgs" / "0", home / "curv_contour_length_14" / "metadata"
    images.mkdir(parents=True)
    metadata.mkdir()
    lines = []
    for number in range(TRAIN):
        Image.fromarray(rng.integers(0, 256, (side, side), dtype=np.uint8)).save(images / f"sample_{number}.png")
        lines.append(f"imgs/0 sample_{number}.png {number} {number % 2} 0 14 2 0.5")
    (metadata / "0.npy").write_text("\n".join(lines) + "\n", encoding="utf-8")
