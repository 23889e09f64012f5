"""Pictures of labelled images."""

from __future__ import annotations

from typing import Any

from subquad.data.labelled import LabelledCorpus


def draw_samples(corpus: LabelledCorpus, samples: int, path: str) -> int:
    """A grid of `samples` images to learn from (all where there are fewer), evenly spread, with classes; how many.

    Raises `ValueError` for images that are not square or are cut.
    """
    from matplotlib.figure import Figure

    train: Any = corpus.train
    if train.cut:
        raise ValueError(f"images that are cut to {train.length} pixels are not drawn; leave --length out")
    samples = min(samples, len(train))
    columns = max(1, round(samples**0.5 + 0.49))
    rows = -(-samples // columns)
    figure = Figure(figsize=(1.6 * columns, 1.8 * rows), layout="constrained", dpi=100)
    for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).ravel()):
        axes.axis("off")
        if number >= samples:
            continue
        item = train[number * len(train) // samples]  # they may be sorted by class
        pixels = item["input_ids"][item["attention_mask"].bool()].numpy()
        width = int(len(pixels) ** 0.5)
        if width * width != len(pixels):
            raise ValueError(f"an image of {len(pixels)} pixels is not square and is not drawn")
        axes.imshow(pixels.reshape(width, width), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_title(corpus.classes[int(item["labels"])], fontsize=8)
    figure.savefig(path)
    return samples
