"""Low-rank adaptation (LoRA), as PEFT has it: read by the command line without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from subquad.config import Config


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """Low-rank factors `W + s B A` beside the weights W of a trained model, which stay as they are."""

    rank: int = 0
    """Rank r of the factors; 0: no factors, all weights train."""
    base: str | None = None
    """The folder of the run whose model is adapted; its model and its tokenizer are taken."""
    alpha: int | None = None
    """The factors are scaled by s = alpha / rank, with rslora by alpha / sqrt(rank) (None: twice the rank)."""
    dropout: float = 0.0
    """Dropout of what the factors read, in training."""
    targets: list[str] = field(default_factory=list)
    """Linear layers that get factors: ends of their names, as query or feedforward.up, or regular expressions for whole
    names (none given: all but heads and look-ups)."""
    dora: bool = False
    """DoRA (Liu et al. 2024): the size of each row of a weight trains apart from its direction."""
    rslora: bool = False
    """rsLoRA (Kalajdzievski 2023): the scale falls with the root of the rank."""
    train_head: bool = False
    """Whether the head of a classifier trains too, whole; for classes that are not the base's it always does."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora.rank must be at least 0, got {self.rank}")
        if self.rank == 0:
            defaults = {name: entry.default for name, entry in self.__dataclass_fields__.items()} | {"targets": []}
            for name, value in self.to_dict().items():
                if value != defaults[name]:
                    raise ValueError(
                        f"lora.{name}={value!r} has no effect with lora.rank=0; give a rank or leave it out"
                    )
            return
        if not self.base:
            raise ValueError(f"lora.rank={self.rank} needs lora.base: the folder of the run whose model is adapted")
        if self.alpha is not None and self.alpha < 1:
            raise ValueError(f"lora.alpha must be at least 1, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be at least 0 and below 1, got {self.dropout}")
