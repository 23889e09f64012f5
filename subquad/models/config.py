"""`DecoderConfig`: the settings of a decoder, which the configurations of the other models extend."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, get_args

from subquad.attention import mechanism, names
from subquad.config import Config, check_positive, suggest, type_hints
from subquad.layers.scaling import RopeScaling


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Config):
    """A decoder: embeddings, then [norm, attention, norm, feed-forward] x layers, a last norm, then the head."""

    labels_sequences: ClassVar[bool] = False
    """Whether a classifier follows the layers, instead of a head over the vocabulary."""

    vocab_size: int = 4096
    """Tokens in the vocabulary."""
    dim: int = 256
    """Model width D."""
    num_layers: int = 4
    """Number of layers."""
    num_heads: int = 4
    """Attention heads H."""
    num_kv_heads: int | None = None
    """Heads of keys and values in the softmax mechanisms (None: num_heads)."""
    attention: str | list[str] = "llp"
    """Mechanism of every layer, or a list of names that repeats to fill the layers (a hybrid)."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of mechanisms by name, as in {llp: {segment: 256}}; `subquad list NAME` shows them."""
    position: Literal["auto", "rope", "sinusoidal", "learned", "none"] = "auto"
    """Positions: rotary in mechanisms that support it, sines or a learned table added to the embeddings, or none. auto
    follows the mechanisms: rope if one supports it, else none if one depends on the order by itself, else
    sinusoidal."""
    max_positions: int = 1024
    """Longest sequence for position=learned: the rows of its table."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    norm: Literal["layer", "rms", "zero_centred_rms", "unscaled_layer"] = "rms"
    """Normalisation of each branch (norm_position); zero_centred_rms multiplies by 1 + its weights (Qwen3-Next),
    unscaled_layer has no weights (the code of ELiTA)."""
    feedforward: Literal["gelu", "gelu_tanh", "relu", "relu_squared", "swiglu", "bilinear", "none"] = "swiglu"
    """Feed-forward network: two matrices around an activation, of which gelu_tanh is GPT-2's and relu_squared Primer's;
    two and a gate (swiglu); ELiTA's FeedForward2 (bilinear); or none: a block is its mechanism alone (Mamba-2)."""
    ff_mult: float = 4.0
    """Hidden width over D of a network without a gate; SwiGLU uses two thirds of it, which keeps the parameter count,
    and bilinear a factor of 2 x ff_mult (an eighth more parameters)."""
    loops: int = 1
    """Passes through the layers; if more than one, each pass adds its own bias (ELiTA's author: 3)."""
    loop_loss: Literal["last", "all"] = "last"
    """Training loss: the last pass's, or the mean over all passes; evaluation always uses the last pass."""
    bias: bool = False
    """Use biases in the linear layers."""
    dropout: float = 0.0
    """Dropout on embeddings and on each branch's output."""
    attention_dropout: float = 0.0
    """Dropout on attention weights."""
    tie_embeddings: bool = True
    """Share the weights of the embedding with the head."""
    lookup: int | None = None
    """Rows of ELiTA's look-up over the logits, V -> rows -> V (its author used 8192; None: no look-up)."""
    lookup_residual: bool = True
    """Add the look-up's output to the logits, instead of replacing them."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; branch outputs are scaled down by sqrt(2 x layers x loops)."""

    head_dim: int | None = None
    """Channels of an attention head (None: dim / num_heads)."""
    ff_dim: int | None = None
    """Hidden width of the feed-forward network (None: from ff_mult)."""
    norm_eps: float | None = None
    """Constant that norms add to the variance or mean square (None: 1e-5 for layer norms, 1e-6 for the others)."""
    qk_norm: bool = False
    """RMS-normalise queries and keys over each head's channels, before rotating them (Qwen3); zero-centred if norm
    is."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values (None: as bias)."""
    out_bias: bool | None = None
    """Bias of attention's output projection (None: as bias)."""
    ff_bias: bool | None = None
    """Biases of the feed-forward networks (None: as bias)."""
    parallel_residual: bool = False
    """Feed the same vectors to both branches, x + attention(norm(x)) + feedforward(norm'(x)) (GPT-NeoX)."""
    norm_position: Literal["pre", "post"] = "pre"
    """Where a block normalises: pre, x + branch(norm(x)), and a last norm before the head; post, norm(x + branch(x)),
    after which there is no last norm: the vectors are normalised already (Vaswani et al. 2017, Luna, LLP)."""
    rope_fraction: float = 1.0
    """Fraction of each head's channels that rotary positions rotate, from the first on."""
    rope_scaling: RopeScaling | None = None
    """Change of rotary frequencies for longer sequences, as in {kind: linear, factor: 4} (None: no change)."""
    embedding_scale: float = 1.0
    """Factor on the tokens' embeddings, before positions are added; sqrt(dim) in Vaswani et al. 2017."""
    position_scale: float | None = None
    """Amplitude of added sines, 1 in the papers (Vaswani et al. 2017). None: init_std x sqrt(2), which gives them the
    standard deviation of untrained embeddings (before embedding_scale), so that neither dominates."""
    residual_scale: float = 1.0
    """Factor on the output of each branch, before it is added to the residual stream."""
    logit_divisor: float = 1.0
    """Divisor of the vectors after the last norm, and so of the logits."""
    head_bias: bool = False
    """Add a learned bias, zero at first, to the logits of the head, tied or not (before a look-up)."""

    def __post_init__(self) -> None:
        if self.position == "auto":
            object.__setattr__(self, "position", self._suitable_position())
        self.check_least(vocab_size=1, dim=1, num_layers=1, num_heads=1, max_positions=1, loops=1)
        for name in ("head_dim", "ff_dim"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, or None, got {getattr(self, name)}")
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got dim={self.dim}, num_heads={self.num_heads}")
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads}"
            )
        check_positive(rope_base=self.rope_base, ff_mult=self.ff_mult, init_std=self.init_std)
        scales = "embedding_scale", "position_scale", "residual_scale", "logit_divisor"
        check_positive(**{name: getattr(self, name) for name in scales})
        if self.norm_eps is not None and not self.norm_eps > 0:
            raise ValueError(f"norm_eps must be above 0, or None, got {self.norm_eps}")
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction must be above 0 and at most 1, got {self.rope_fraction}")
        for name in ("rope_fraction", "rope_scaling"):
            if self.position != "rope" and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(
                    f"{name} is for rotary positions, and position={self.position!r}; choose position=rope or leave "
                    f"{name} out"
                )
        if self.position != "sinusoidal":
            self.check_default(f"position={self.position!r}", "position_scale")
        if self.ff_dim is not None and self.feedforward in ("bilinear", "none"):
            raise ValueError(
                f"feedforward={self.feedforward!r} has no hidden width of its own, got ff_dim={self.ff_dim}"
            )
        if self.norm_position == "post":
            self.check_default("norm_position='post'", "parallel_residual")
        if self.feedforward == "none":
            self.check_default("feedforward='none'", "ff_bias", "parallel_residual")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.lookup is not None and self.lookup < 1:
            raise ValueError(f"lookup must be at least 1, or None for no look-up, got {self.lookup}")
        check_choices(self, "position", "norm", "norm_position", "feedforward", "loop_loss")
        if not self.attention or self.num_layers % len(self.mechanisms):
            raise ValueError(
                "attention must be a name or a list whose length divides num_layers, "
                f"got {self.attention!r} for {self.num_layers} layers"
            )

    @classmethod
    def from_decoder(cls, config: DecoderConfig, **own: Any) -> Self:
        """Return a configuration of this class with the settings of `config`; `own` sets the fields that it adds."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(DecoderConfig)} | own)

    def check_default(self, owner: str, *names: str) -> None:
        """Raise `ValueError` for a setting that `owner` does not support, unless it has its default."""
        for name in names:
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name}={value} has no meaning for {owner}; leave it out")

    def _suitable_position(self) -> str:
        """Return the positions that suit the mechanisms."""
        known = [mechanism(name) for name in set(self.mechanisms) & set(names())]
        rotates = any(kind.rotates for kind in known)
        if rotates or "perceiver_ar" in self.mechanisms:
            return "rope"
        return "none" if any(kind.sees_order for kind in known) else "sinusoidal"

    @property
    def branches(self) -> int:
        """Number of branches that write into the residual stream."""
        return (1 if self.feedforward == "none" else 2) * self.num_layers * self.loops

    @property
    def mechanisms(self) -> list[str]:
        """The names in `attention`, as a list; the layers repeat it."""
        return [self.attention] if isinstance(self.attention, str) else list(self.attention)

    @property
    def layer_mechanisms(self) -> list[str]:
        """The name of each layer's mechanism."""
        return self.mechanisms * (self.num_layers // len(self.mechanisms))


def check_choices(config: Config, *names: str) -> None:
    """Raise `ValueError` for a field that is not one of the choices in its type."""
    hints = type_hints(type(config))
    for name in names:
        value, choices = getattr(config, name), get_args(hints[name])
        if value not in choices:
            raise ValueError(f"unknown {name} {value!r}; {suggest(str(value), choices)}")
