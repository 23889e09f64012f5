"""The encoder's configuration and the options of Perceiver and Perceiver IO, read without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Self, get_args, get_type_hints

from subquad.config import Config, suggest
from subquad.models.config import DecoderConfig
from subquad.models.stacks import StackOptions

Pooling = Literal["mean", "last", "class"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """A stack of the decoder's layers that reads whole sequences, and a classifier on it.

    The decoder's fields mean the same here, but there is no head over the vocabulary (`tie_embeddings` has no effect,
    `lookup` is refused) and the layers run once (`loops` is refused).
    """

    num_classes: int = 2
    """Classes that the classifier tells apart."""
    pooling: Pooling = "mean"
    """What a sequence is judged by: the mean of its vectors, its last vector, or that of a class token before it."""
    causal: bool = False
    """Whether a token sees itself and earlier ones only: the causal form of the mechanisms instead of the other."""
    towers: int = 1
    """Sequences that an example has: 1, or 2 that the one encoder reads apart and the head compares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {self.num_classes}")
        check_choices(self, "pooling")
        if self.towers not in (1, 2):
            raise ValueError(f"towers must be 1 or 2, got {self.towers}")
        if self.causal and self.pooling == "class":
            raise ValueError(
                "a class token stands before all others and, with causal=true, sees none of them; choose pooling mean "
                "or last"
            )
        if self.loops != 1 or self.lookup is not None:
            raise ValueError(
                f"an encoder has neither loops nor a look-up head, got loops={self.loops}, lookup={self.lookup}"
            )

    @classmethod
    def from_decoder(
        cls,
        config: DecoderConfig,
        *,
        num_classes: int = 2,
        pooling: Pooling = "mean",
        causal: bool = False,
        towers: int = 1,
    ) -> Self:
        """The encoder with a decoder's settings."""
        shared = {field.name: getattr(config, field.name) for field in fields(DecoderConfig)}
        return cls(**shared, num_classes=num_classes, pooling=pooling, causal=causal, towers=towers)


@dataclass(frozen=True, kw_only=True)
class PerceiverOptions(StackOptions):
    """Options of `attention=perceiver`, in `options.perceiver`."""

    latents: int = 32
    """Latents N: learned vectors that read the inputs."""
    repeats: int = 1
    """How often the stack of num_layers self-attention layers over the latents runs, with the same weights."""
    reads: Literal["once", "each"] = "once"
    """Whether the latents read the inputs once, or before each repeat. The first reading has weights of its own, later
    ones share theirs (Perceiver, section 3.2)."""
    cross_heads: int = 1
    """Heads of the cross-attention."""
    query_residual: bool = True
    """Whether a reading adds to the latents or replaces them."""
    fourier_bands: int = 0
    """Frequencies of position, up to half of max_positions, appended to the inputs as sines and cosines; 0: none."""

    def __post_init__(self) -> None:
        for name in ("latents", "repeats", "cross_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.fourier_bands < 0:
            raise ValueError(f"fourier_bands must be at least 0, got {self.fourier_bands}")
        check_choices(self, "reads")


@dataclass(frozen=True, kw_only=True)
class PerceiverIOOptions(PerceiverOptions):
    """Options of `attention=perceiver_io`, in `options.perceiver_io`."""

    output_residual: bool = True
    """Whether the outputs are added to their queries."""


def check_hiding(mask_fraction: float, random_fraction: float, group: str = "") -> None:
    """Raise `ValueError` for shares of hidden tokens, and of random ones among them, that cannot be."""
    if not 0 < mask_fraction < 1:
        raise ValueError(f"{group}mask_fraction must be above 0 and below 1, got {mask_fraction}")
    if not 0 <= random_fraction <= 1:
        raise ValueError(f"{group}random_fraction must lie between 0 and 1, got {random_fraction}")


def check_choices(config: Config, *names: str) -> None:
    """Raise `ValueError` where a field is none of its type's choices."""
    hints = get_type_hints(type(config))
    for name in names:
        value, choices = getattr(config, name), get_args(hints[name])
        if value not in choices:
            raise ValueError(f"unknown {name} {value!r}; {suggest(str(value), choices)}")
