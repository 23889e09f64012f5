"""The decoder's configuration, apart from the decoder so that the command line reads it without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from subquad.config import Config, suggest


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Config):
    """A pre-norm decoder: embeddings, then [norm, attention, norm, feed-forward] x layers, then the head."""

    vocab_size: int = 4096
    """Tokens in the vocabulary."""
    dim: int = 256
    """Model width D."""
    num_layers: int = 4
    """Layers."""
    num_heads: int = 4
    """Attention heads H."""
    num_kv_heads: int | None = None
    """Heads of keys and values, for the softmax mechanisms (None: as many as num_heads)."""
    attention: str | list[str] = "llp"
    """The mechanism of every layer, or a list of names, one a layer or repeated to fill the layers (a hybrid)."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of each mechanism by its name, as in {llp: {segment: 256}}; `subquad list NAME` shows them."""
    position: Literal["rope", "sinusoidal", "learned", "none"] = "rope"
    """How positions enter: rotary in the mechanisms that can, or added to the embeddings, or not at all."""
    max_positions: int = 1024
    """Rows of the learned position table: the longest sequence for position=learned."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    norm: Literal["layer", "rms"] = "rms"
    """Normalisation before attention and feed-forward."""
    feedforward: Literal["gelu", "swiglu", "bilinear"] = "swiglu"
    """Feed-forward network; bilinear is ELiTA's FeedForward2."""
    ff_mult: float = 4.0
    """Hidden width of a GELU feed-forward over D; SwiGLU takes two thirds of it, so parameters agree, and bilinear
    2 x ff_mult for its factor (an eighth more parameters)."""
    loops: int = 1
    """Passes through the stack of layers, each with a bias of its own if there is more than one (ELiTA's author: 3)."""
    loop_loss: Literal["last", "all"] = "last"
    """Whose loss training takes: the last pass's, or the mean over all of them (the evaluation takes the last)."""
    bias: bool = False
    """Biases in the linear layers."""
    dropout: float = 0.0
    """Dropout on embeddings and on each branch's output."""
    attention_dropout: float = 0.0
    """Dropout on the weights of the mechanisms."""
    tie_embeddings: bool = True
    """Whether the head shares the embedding's weights."""
    lookup: int | None = None
    """Rows of ELiTA's look-up over the logits, V -> rows -> V (its author took 8192); None: no look-up."""
    lookup_residual: bool = True
    """Whether the look-up's output is added to the logits, instead of replacing them."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; branch outputs are scaled down by sqrt(2 x layers x loops)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "max_positions", "loops"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got dim={self.dim}, num_heads={self.num_heads}")
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads}"
            )
        for name in ("rope_base", "ff_mult", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.lookup is not None and self.lookup < 1:
            raise ValueError(f"lookup must be at least 1, or None for no look-up, got {self.lookup}")
        for name in ("position", "norm", "feedforward", "loop_loss"):
            choices = get_args(get_type_hints(type(self))[name])
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"unknown {name} {getattr(self, name)!r}; {suggest(str(getattr(self, name)), choices)}"
                )
        if not self.attention or self.num_layers % len(self.mechanisms):
            raise ValueError(
                "attention must be a name or a list whose length divides num_layers, "
                f"got {self.attention!r} for {self.num_layers} layers"
            )

    @property
    def mechanisms(self) -> list[str]:
        """The names in `attention`, as a list; the layers repeat it."""
        return [self.attention] if isinstance(self.attention, str) else list(self.attention)
