"""Small files in the layouts that Long Range Arena's data come in."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, MEASURED = 40, 10


def write_release(folder: Path, task: str) -> Path:
    """Write `TRAIN` training examples, or a few more, into the folder that `classify.path` names; return the folder."""
    home = folder / task
    home.mkdir(parents=True)
    rng = np.random.default_rng(0)
    {"listops": _listops, "text": _text, "retrieval": _retrieval, "image": _images}.get(task, _pathfinder)(home, rng)
    return home


def _listops(home: Path, rng: np.random.Generator) -> None:
    for part, count in (("train", TRAIN), ("val", MEASURED), ("test", MEASURED)):
        lows = [int(rng.integers(0, number % 10 + 1)) for number in range(count)]
        lines = [f"( ( ( [MAX {number % 10} ) {low} ) ] )\t{number % 10}" for number, low in enumerate(lows)]
        (home / f"basic_{part}.tsv").write_text("\n".join(["Source\tTarget", *lines, ""]), encoding="utf-8")


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


def _grey(rng: np.random.Generator, side: int) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (side, side), dtype=np.uint8))


def _images(home: Path, rng: np.random.Generator) -> None:
    for side, count in (("train", TRAIN), ("test", MEASURED)):
        for number in range(count):
            folder = home / side / ("cat" if number % 2 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            _grey(rng, 8).save(folder / f"{number}.png")


def _pathfinder(home: Path, rng: np.random.Generator) -> None:
    images, metadata = home / "curv_contour_length_14" / "imgs" / "0", home / "curv_contour_length_14" / "metadata"
    images.mkdir(parents=True)
    metadata.mkdir()
    for number in range(TRAIN):
        _grey(rng, int(home.name.removeprefix("pathfinder"))).save(images / f"sample_{number}.png")
    lines = [f"imgs/0 sample_{number}.png {number} {number % 2} 0 14 2 0.5\n" for number in range(TRAIN)]
    (metadata / "0.npy").write_text("".join(lines), encoding="utf-8")
