"""Stacks, models that are more than a mechanism in each layer: their descriptions and their options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from subquad.attention.laws import OF_STATES, Law
from subquad.config import Config
from subquad.models.config import DecoderConfig, check_choices

Decode = Literal["exact", "refill", "frozen"]


@dataclass(frozen=True, kw_only=True)
class StackOptions(Config):
    """Options of a stack, and what training needs to know of it; the defaults are those of a decoder of mechanisms."""

    @property
    def fewest_predicted(self) -> int | None:
        """Fewest last tokens of a window that a training step predicts from; None: all of them."""
        return None

    @property
    def draws(self) -> bool:
        """Whether a training step draws random numbers other than dropout's."""
        return False

    def window_tokens(self, length: int) -> int:
        """Return the number of tokens in a training window of which the model reads `length`."""
        return length

    def window_labels(self, length: int) -> int:
        """Return the number of labels in a training window of which the model reads `length` tokens."""
        return length - 1


@dataclass(frozen=True, kw_only=True)
class PerceiverAROptions(StackOptions):
    """Options of `attention=perceiver_ar`, in `options.perceiver_ar`."""

    history: Literal["cross", "self", "segments", "compressed"] = "cross"
    """Treatment of the tokens before the latents. cross: the first layer reads them (Perceiver AR). self: they attend
    to one another in every layer, unmasked (V1). segments: as self, within segments (V2). compressed: as self, for
    `projected` learned mixtures of them (V3)."""
    latents: int = 256
    """Latents m: the last tokens, which alone predict. Training needs batch.length above it."""
    history_tokens: int | None = None
    """Most tokens read before the latents; earlier ones are ignored (None: no limit; compressed needs a number)."""
    segment: int = 128
    """Tokens in a segment (history=segments), counted from the first history token."""
    projected: int = 64
    """Rows p that the history is compressed to (history=compressed), at most history_tokens."""
    first_layer: Literal["compressed", "full"] = "compressed"
    """What the first layer's latents read (history=compressed): the rows (section 4.3 of the paper) or every history
    token (its tables 7 and 8)."""
    prefix_dropout: float = 0.0
    """Fraction of the history that training drops, anew for each sequence and step: int(fraction * h) of h tokens."""
    vary_latents: bool = False
    """Draw the number of latents anew in each training step, uniformly from half of `latents` to all; labels follow. It
    prepares for decode=refill and for short prompts. Windows overlap so that an epoch has each token as a label at
    least once even with the fewest latents."""
    decode: Decode = "exact"
    """How to continue when all latents are used; can be changed after training (`subquad generate --decode`,
    `PerceiverAR.set_decode`). exact: recompute the last `latents` tokens for each token. refill: restart with `refill`
    latents when they run out. frozen: stop with an error; the history never changes."""
    refill: int | None = None
    """Latents kept by a refill, and used to read a prompt, with decode=refill or frozen (None: half of them)."""

    def __post_init__(self) -> None:
        check_choices(self, "history", "first_layer", "decode")
        self.check_least(latents=1, segment=1, projected=1, history_tokens=1, refill=1)
        if not 0 <= self.prefix_dropout < 1:
            raise ValueError(f"prefix_dropout must be at least 0 and below 1, got {self.prefix_dropout}")
        if self.history == "compressed":
            if self.history_tokens is None:
                raise ValueError("history='compressed' needs history_tokens: its projection has a fixed width")
            if self.projected > self.history_tokens:
                raise ValueError(
                    f"projected must be at most history_tokens, got projected={self.projected}, "
                    f"history_tokens={self.history_tokens}"
                )
        unread = {"segment"} if self.history != "segments" else set()
        unread |= {"projected", "first_layer"} if self.history != "compressed" else set()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in unread and value != field.default:
                raise ValueError(f"{field.name}={value!r} has no effect with history={self.history!r}; leave it out")
        if self.decode == "exact" and self.refill is not None:
            raise ValueError(f"refill={self.refill} has no effect with decode='exact'; leave it out")
        if self.refill is not None and self.refill > self.latents:
            raise ValueError(f"refill must be at most latents, got refill={self.refill}, latents={self.latents}")
        if self.decode == "frozen" and self.kept == self.latents:
            raise ValueError(f"decode='frozen' needs refill below latents, got {self.kept} of {self.latents}")

    @property
    def fewest_predicted(self) -> int:
        """Fewest latents in a training step."""
        return (self.latents + 1) // 2 if self.vary_latents else self.latents

    @property
    def draws(self) -> bool:
        """Whether the number of latents or the history's tokens are drawn."""
        return self.vary_latents or self.prefix_dropout > 0

    def window_tokens(self, length: int) -> int:
        """Return `length` and one: the last token is only the label of the last latent."""
        return length + 1

    def window_labels(self, length: int) -> int:
        """Return the fewest latents, each of which has a label. Raises `ValueError` if no history is left."""
        if length <= self.latents:
            raise ValueError(
                f"perceiver_ar would have no history: batch.length={length} must be above its latents={self.latents}; "
                "give longer windows (batch.length) or fewer latents (model.options.perceiver_ar.latents)"
            )
        return self.fewest_predicted

    @property
    def kept(self) -> int:
        """Latents after a refill."""
        return max(1, self.latents // 2) if self.refill is None else self.refill

    @property
    def prompt_latents(self) -> int:
        """Latents that a prompt is read with before decoding."""
        return self.latents if self.decode == "exact" else self.kept


@dataclass(frozen=True, kw_only=True)
class PerceiverOptions(StackOptions):
    """Options of `attention=perceiver`, in `options.perceiver`."""

    latents: int = 32
    """Latents N: learned vectors that read the inputs."""
    repeats: int = 1
    """Runs of the num_layers self-attention layers over the latents, all with the same weights."""
    reads: Literal["once", "each"] = "once"
    """Read the inputs once, or before each repeat: the first reading has its own weights, later ones share theirs
    (Perceiver, section 3.2)."""
    cross_heads: int = 1
    """Heads of the cross-attention."""
    query_residual: bool = True
    """Add a reading to the latents, instead of replacing them."""
    fourier_bands: int = 0
    """Frequencies of position, up to half of max_positions, appended to the inputs as sines and cosines (0: none)."""

    def __post_init__(self) -> None:
        self.check_least(latents=1, repeats=1, cross_heads=1, fourier_bands=0)
        check_choices(self, "reads")


@dataclass(frozen=True, kw_only=True)
class PerceiverIOOptions(PerceiverOptions):
    """Options of `attention=perceiver_io`, in `options.perceiver_io`."""

    output_residual: bool = True
    """Add the outputs to their queries."""


@dataclass(frozen=True)
class Stack:
    """Description of one stack."""

    name: str
    """Value of `attention`."""
    summary: str
    """What a token sees."""
    paper: str
    """Author, year, arXiv number and section."""
    forms: tuple[Literal["causal", "bidirectional"], ...]
    """Whether it can predict the next token, read whole sequences, or both."""
    cost_order: str
    """How the cost grows with T."""
    state: str
    """How the state grows with the tokens read."""
    options: type[StackOptions]
    """Class of its options, in `options.NAME`."""
    exemptions: tuple[tuple[Law, str], ...]
    """Laws of the contract that do not apply, with reasons; tests/models checks the others."""
    cost_note: str = ""
    """Sentence below a table of costs that includes it."""


NO_MATRIX = "a stack of layers has no one matrix of weights"
WHOLE = "bidirectional: reads whole sequences and keeps no state"
NO_STATIC_CACHE = "it has no static cache"
ALL_PARTS = "the latents are all in the last part and read a history from all parts"
ONE_DOCUMENT = "a row's latents read one document: it takes no packed ones"
BIDIRECTIONAL = (
    (Law.WEIGHTS, NO_MATRIX),
    *((law, WHOLE) for law in OF_STATES),
    (Law.NO_FUTURE, "bidirectional: a token sees later ones"),
    (Law.DOCUMENTS, ONE_DOCUMENT),
)

DECODERS_OWN = (
    "head_dim",
    "ff_dim",
    "norm_eps",
    "qk_norm",
    "qkv_bias",
    "out_bias",
    "ff_bias",
    "parallel_residual",
    "rope_fraction",
    "rope_scaling",
    "residual_scale",
    "logit_divisor",
)
"""Settings of `DecoderConfig` that stacks do not support."""

STACKS: dict[str, Stack] = {
    stack.name: stack
    for stack in (
        Stack(
            name="perceiver_ar",
            summary="every earlier token: the last `latents` tokens attend to a cheaper history",
            paper="Hawthorne et al. 2022, arXiv:2202.07765; V1 to V3: Mahmood and Huang 2024, arXiv:2412.06106",
            forms=("causal",),
            cost_order="linear (history=self: quadratic)",
            state="constant with history_tokens, else grows",
            options=PerceiverAROptions,
            exemptions=(
                (Law.WEIGHTS, NO_MATRIX),
                (Law.DOCUMENTS, ONE_DOCUMENT),
                (Law.IN_PLACE, NO_STATIC_CACHE),
                (Law.RANKS, ALL_PARTS),
            ),
            cost_note="perceiver_ar's state is small because exact decoding (decode=exact) computes its latents anew "
            "at each token.",
        ),
        Stack(
            name="perceiver",
            summary="every token, through latents that read the inputs",
            paper="Jaegle et al. 2021, arXiv:2103.03206",
            forms=("bidirectional",),
            cost_order="linear",
            state="none",
            options=PerceiverOptions,
            exemptions=BIDIRECTIONAL,
        ),
        Stack(
            name="perceiver_io",
            summary="every token, through latents that read the inputs and are read by output queries",
            paper="Jaegle et al. 2021, arXiv:2107.14795",
            forms=("bidirectional",),
            cost_order="linear",
            state="none",
            options=PerceiverIOOptions,
            exemptions=BIDIRECTIONAL,
        ),
    )
}


def stack_of(config: DecoderConfig) -> Stack | None:
    """Return the stack that `config.attention` names, None for mechanisms; `ValueError` for a stack in a list."""
    for name in config.mechanisms:
        if name in STACKS:
            if len(config.mechanisms) > 1:
                raise ValueError(
                    f"attention {name!r} is a whole stack and cannot be one layer of several, got {config.attention!r}"
                )
            config.check_default(f"attention {name!r}", *DECODERS_OWN)
            if config.feedforward == "none":
                raise ValueError(f"attention {name!r} needs a feed-forward network, got feedforward='none'")
            return STACKS[name]
    return None


def options_of(config: DecoderConfig) -> StackOptions:
    """Return the options of the stack that `config.attention` names, or plain `StackOptions` for mechanisms."""
    stack = stack_of(config)
    if stack is None:
        return StackOptions()
    where = f"model.options.{stack.name}"
    return stack.options.from_dict(config.options.get(stack.name, {}), where=where)
