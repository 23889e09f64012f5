"""The arms of the LoRA experiment on MNIST.

Shape letters: N images, H rows, W columns, D = H * W, B batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.lora_mnist.config import CLASSES, PER_RANK, SETS, SIDE, VARIANTS, WIDTHS, MnistConfig
from subquad.data.images import ImageSet, load_images
from subquad.models.mlp import Mlp

ORDER, FACTORS = 1000, 2000
"""Added to a seed for the order of an arm's images and for its factors, which would otherwise be drawn from the same
random numbers as the net's first weights."""


@dataclass(frozen=True)
class Split:
    """Images of one set as bytes `[N, D]`, and their labels `[N]`."""

    x_ND: Tensor
    y_N: Tensor


@dataclass(frozen=True)
class Digits:
    """Training and test images of each set, by name."""

    train: dict[str, Split]
    test: dict[str, Split]
    fingerprint: str


@dataclass(frozen=True)
class Cell:
    """One training: its arm, base, images and rank (None: all weights)."""

    arm: str
    base: str
    images: str
    rank: int | None

    @property
    def name(self) -> str:
        """Return the key of the training's result."""
        return "/".join(str(part) for part in (self.arm, self.base, self.images, self.rank) if part not in ("", None))


def read_digits(config: MnistConfig) -> Digits:
    """Load the images of `config.path` in all variants. Raises as `load_images`, and `ValueError` for other images."""
    if config.path is None:
        raise ValueError("--path is missing: give a folder with MNIST's idx files, or another layout of them")
    sets = load_images(config.path, labels=True)
    for part, images in sets.items():
        if images.shape != (SIDE, SIDE, 1) or len(images.classes) != CLASSES:
            raise ValueError(
                f"{config.path}: the {part} images must be {SIDE} x {SIDE}, grey, of {CLASSES} classes, got "
                f"{' x '.join(map(str, images.shape))} of {len(images.classes)} classes"
            )
    train, test = (_variants(sets[part], config) for part in ("train", "test"))
    return Digits(train, test, sets["train"].fingerprint() + sets["test"].fingerprint())


def _variants(images: ImageSet, config: MnistConfig) -> dict[str, Split]:
    """Return the images plain, quantised, rotated and inverted."""
    assert images.labels is not None  # load_images got labels=True
    x_NHW, y_N = torch.from_numpy(images.pixels[..., 0]), torch.from_numpy(images.labels)
    level_NHW = x_NHW.int() * config.levels // 256
    made = {
        "plain": x_NHW,
        "quantised": (level_NHW * 255 // (config.levels - 1)).to(torch.uint8),
        "rotated": torch.rot90(x_NHW, 1 if config.turn == "left" else -1, (1, 2)),
        "inverted": 255 - x_NHW,
    }
    return {name: Split(x.reshape(len(x), -1).contiguous(), y_N) for name, x in made.items()}


def held_out(digits: Digits, count: int) -> Digits:
    """Return the training images only, with the last `count` as test images."""
    size = len(digits.train["plain"].y_N)
    if count >= size:
        raise ValueError(f"tune_held_out must be below the {size} training images, got {count}")
    first = {name: Split(split.x_ND[:-count], split.y_N[:-count]) for name, split in digits.train.items()}
    last = {name: Split(split.x_ND[-count:], split.y_N[-count:]) for name, split in digits.train.items()}
    return Digits(first, last, digits.fingerprint)


def scaled(x_BD: Tensor) -> Tensor:
    """Scale bytes to floats from 0 to 1."""
    return x_BD.float().div_(255)


@torch.no_grad()
def right(net: nn.Module, split: Split) -> Tensor:
    """Return bool `[N]`, True for the images classified correctly."""
    return torch.cat([net(scaled(x)).argmax(1) == y for x, y in _batches(split, 4096)])


def accuracy(net: nn.Module, split: Split) -> float:
    """Return the percentage of images classified correctly."""
    return 100 * int(right(net, split).sum()) / len(split.y_N)


def _batches(split: Split, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(split.x_ND.split(size), split.y_N.split(size), strict=True)


def fit(
    net: nn.Module,
    split: Split,
    *,
    epochs: int,
    batch: int,
    rate: float,
    seed: int,
    warmup: int = 0,
    look: Callable[[int], None] | None = None,
) -> int:
    """Train the trainable parameters of `net`, call `look` after each step, and return the number of steps.

    The rate rises linearly for `warmup` steps, at most half of all, and falls linearly to zero. The order of the images
    depends only on the seed, so all arms see the same.
    """
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = build_optimizer(parameters, rate)
    order = torch.Generator().manual_seed(seed)
    size = len(split.y_N)
    total = epochs * (size // batch or 1)
    rising = min(warmup, total // 2)
    step = 0
    for _ in range(epochs):
        for rows in torch.randperm(size, generator=order).split(batch):
            if len(rows) < batch <= size:
                continue
            optimizer.param_groups[0]["lr"] = rate * min((step + 1) / (rising + 1), (total - step) / (total - rising))
            train_step(net, optimizer, split.x_ND.index_select(0, rows), split.y_N[rows])
            step += 1
            if look is not None:
                look(step)
    return step


def build_optimizer(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Return SGD with momentum 0.9. Adam's steps don't shrink and, on the mostly bright inverted images, switch units
    off for good."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, x_BD: Tensor, y_B: Tensor) -> None:
    """Take one step on one batch."""
    optimizer.zero_grad()
    F.cross_entropy(net(scaled(x_BD)), y_B).backward()
    optimizer.step()


def fresh_net(seed: int) -> Mlp:
    """Return the report's network with PyTorch's initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Mlp(*WIDTHS)


def with_factors(net: Mlp, rank: int, seed: int, *, product: bool = False) -> nn.Module:
    """Return `net` with PEFT's factors in all three layers; only these train, exactly 1050 r parameters.

    With `product` the weights are zero, so W = B A, and both factors get PyTorch's initial weights: with PEFT's B = 0
    the net would be constant. The biases of `net` stay and don't train.
    """
    from peft import LoraConfig, get_peft_model

    targets = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights=not product)
    if product:
        with torch.no_grad():
            for name in targets:
                net.get_parameter(f"{name}.weight").zero_()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(net, config)
    trains = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    if trains != PER_RANK * rank:
        raise ValueError(f"rank {rank} must train {PER_RANK} * {rank} = {PER_RANK * rank} parameters, got {trains}")
    inner: nn.Module = adapted.get_base_model()
    return inner


def train_base(config: MnistConfig, digits: Digits, seed: int) -> tuple[dict[str, Mlp], dict[str, Any]]:
    """Return the base stopped in the band and the fully trained one, from one training, and their results.

    Raises `ValueError` if the test accuracy is never in the band.
    """
    net, stopped, looks = fresh_net(seed), dict[str, Any](), list[float]()

    def look(step: int) -> None:
        if stopped or step % config.look_every:
            return
        looks.append(accuracy(net, digits.test["plain"]))
        if config.band[0] <= looks[-1] <= config.band[1]:
            stopped.update(net=copy.deepcopy(net), step=step)

    rate = config.rates["base"]
    options = {"epochs": config.base_epochs, "batch": config.batch, "rate": rate, "seed": seed, "warmup": config.warmup}
    steps = fit(net, digits.train["plain"], look=look, **options)  # type: ignore[arg-type]
    if not stopped:
        near = min(looks, key=lambda x: abs(x - sum(config.band) / 2), default=None)
        raise ValueError(
            f"none of {len(looks)} measurements of the test accuracy is in band={config.band} (nearest: {near}); train "
            "longer (base_epochs), measure more often (look_every) or use another band"
        )
    bases: dict[str, Mlp] = {"stopped": stopped["net"], "trained": net}
    accuracies = {
        f"base/{kind}/{name}": accuracy(base, digits.test[name]) for kind, base in bases.items() for name in SETS
    }
    return bases, {"accuracy": accuracies, "stopped_step": stopped["step"], "base_steps": steps}


def base_accuracy(config: MnistConfig, digits: Digits, seed: int, rate: float) -> float:
    """Return the accuracy of a fully trained base."""
    net, options = fresh_net(seed), {"epochs": config.base_epochs, "batch": config.batch, "warmup": config.warmup}
    fit(net, digits.train["plain"], rate=rate, seed=seed, **options)  # type: ignore[arg-type]
    return accuracy(net, digits.test["plain"])


def cells(config: MnistConfig) -> list[Cell]:
    """Return all trainings of one seed except the base's."""
    ranks = config.ranks
    adapted = [
        Cell(arm, base, images, rank)
        for base in ("stopped", "trained")
        for images in VARIANTS
        for arm, rank in [("full", None), *(("lora", rank) for rank in ranks)]
    ]
    return adapted + [Cell(arm, "", images, r) for arm in ("scratch", "product") for images in SETS for r in ranks]


def train_cell(
    cell: Cell, config: MnistConfig, digits: Digits, bases: dict[str, Mlp], seed: int, rate: float | None = None
) -> nn.Module:
    """Run one training and return its network."""
    start = copy.deepcopy(bases[cell.base]) if cell.base else fresh_net(seed)
    net: nn.Module = start
    if cell.rank is not None:
        net = with_factors(start, cell.rank, seed + FACTORS, product=cell.arm == "product")
    fit(
        net,
        digits.train[cell.images],
        epochs=config.epochs,
        batch=config.batch,
        rate=config.rates[cell.arm] if rate is None else rate,
        seed=seed + ORDER,
        warmup=config.warmup,
    )
    return net
