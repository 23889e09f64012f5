"""Draw docs/images/weights.png: the weights of each mechanism on the same random input.

python docs/make_images.py [FILE]
"""

import sys
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from subquad import attention

TOKENS, DIM = 48, 64
OPTIONS = {"window": {"width": 12}, "llp": {"segment": 24}, "latte": {"num_latents": 8}}
"""Ranges short enough to be seen in so few tokens."""
FUTURE, OUT_OF_REACH = "#dcdcdc", "#ffffff"


def weights(name: str) -> torch.Tensor:
    """The weights `[T, S]` of one head; the input drifts, so that neighbours are alike, as in text."""
    torch.manual_seed(3)
    layer = attention.build(name, dim=DIM, num_heads=2, **OPTIONS.get(name, {})).eval()
    noise_BTD = torch.randn(1, TOKENS, DIM)
    x_BTD = noise_BTD + noise_BTD.roll(1, 1) + noise_BTD.roll(2, 1)
    with torch.no_grad():
        return layer.weights(2 * x_BTD)[0, 0]


def draw(names: list[str]) -> Figure:
    """One panel a mechanism: a row is a token, a column what it reads."""
    figure, axes = plt.subplots(1, len(names), figsize=(2.6 * len(names), 3.0), layout="constrained", squeeze=False)
    palette = matplotlib.colormaps["cividis"].with_extremes(bad=FUTURE, under=OUT_OF_REACH)
    future_TS = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    for axis, name in zip(axes[0], names, strict=True):
        shown = weights(name).masked_fill(future_TS, float("nan"))
        image = axis.imshow(shown.numpy(), cmap=palette, norm=PowerNorm(0.4, 1e-30, 0.5), interpolation="nearest")
        axis.set_title(name, fontsize=15)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_xlabel("token that is read", fontsize=10)
    axes[0][0].set_ylabel("token that reads", fontsize=10)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.01, ticks=[0.02, 0.1, 0.25, 0.5])
    bar.set_label("weight", fontsize=10)
    return figure


if __name__ == "__main__":
    default = Path(__file__).parent / "images" / "weights.png"
    draw(attention.names()).savefig(sys.argv[1] if len(sys.argv) > 1 else default, dpi=110)
