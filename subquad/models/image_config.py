"""The configuration of an autoregressive model of images, read without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from subquad.config import suggest
from subquad.models.config import DecoderConfig
from subquad.models.stacks import STACKS

LEVELS = 256
"""Values of a pixel's channel: a byte."""
START = LEVELS
"""The token before the first pixel."""
Output = Literal["categorical", "logistic"]


@dataclass(frozen=True, kw_only=True)
class ImageModelConfig(DecoderConfig):
    """A decoder over the pixels of an image, row by row, the channels of a pixel one after another.

    The fields of a decoder mean the same here, but the vocabulary is 256 levels and a start, a table of positions
    has a row for each place in the image, whatever `max_positions` is, and `loops` and `lookup` are refused. A mixture
    has a head of its own, whatever `tie_embeddings` is.
    """

    vocab_size: int = LEVELS + 1
    """256 levels and the start: no other number is possible."""
    height: int = 28
    """Rows H."""
    width: int = 28
    """Columns W."""
    channels: int = 1
    """Channels C: 1 grey, 3 red, green, blue."""
    output: Output = "categorical"
    """What a pixel is drawn from: 256 probabilities, or a mixture of logistic distributions cut into 256 bins."""
    mixtures: int = 10
    """Distributions in the mixture (output=logistic)."""
    axes: bool = False
    """Whether to add vectors learned for each row, column and channel: of the pixel that is predicted."""
    near: int = 0
    """Rows and columns around the pixel to predict whose known pixels go into its input beside the one before, by a
    masked convolution, as PixelCNN begins with one; 0: the pixel before alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("height", "width", "channels", "mixtures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.vocab_size != LEVELS + 1:
            raise ValueError(
                f"vocab_size of an image model is {LEVELS + 1} (256 levels, a start), got {self.vocab_size}"
            )
        if self.output not in get_args(Output):
            raise ValueError(f"unknown output {self.output!r}; {suggest(str(self.output), get_args(Output))}")
        if not 0 <= self.near < max(self.height, self.width):
            raise ValueError(
                f"near must be at least 0 and below the image's sides, {self.height} x {self.width}, got {self.near}"
            )
        if self.loops != 1 or self.lookup is not None:
            raise ValueError(
                f"an image model has neither loops nor a look-up head, got loops={self.loops}, lookup={self.lookup}"
            )
        for name in self.mechanisms:
            if name in STACKS:
                raise ValueError(f"attention {name!r} is a stack of its own; an image model is made of mechanisms")

    @property
    def tokens(self) -> int:
        """Tokens of an image: H x W x C."""
        return self.height * self.width * self.channels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns, channels."""
        return self.height, self.width, self.channels

    @classmethod
    def from_decoder(cls, config: DecoderConfig, **image: Any) -> Self:
        """The model with a decoder's settings; `image` are the fields that a decoder has not."""
        shared = {field.name: getattr(config, field.name) for field in fields(DecoderConfig)}
        return cls(**shared | {"vocab_size": LEVELS + 1} | image)
