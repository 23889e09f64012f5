"""The options of Perceiver AR, apart from the model so that the command line reads them without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from subquad.config import suggest
from subquad.models.stacks import StackOptions

Decode = Literal["exact", "refill", "frozen"]


@dataclass(frozen=True, kw_only=True)
class PerceiverAROptions(StackOptions):
    """Options of `attention=perceiver_ar`, in `options.perceiver_ar`."""

    history: Literal["cross", "self", "segments", "compressed"] = "cross"
    """What becomes of the tokens before the latents. cross: the first layer reads them (Perceiver AR). self: they
    attend to one another in every layer, unmasked (V1). segments: the same inside segments (V2). compressed: as V1, for
    `projected` learned mixtures of them (V3)."""
    latents: int = 256
    """Latents m: the last tokens, the only ones that predict; training needs batch.length above it."""
    history_tokens: int | None = None
    """Tokens before the latents that are read, at most; earlier ones are forgotten (None: all; compressed needs a
    number)."""
    segment: int = 128
    """Tokens of a segment (history=segments), counted from the first history token."""
    projected: int = 64
    """Rows p that the history is compressed to (history=compressed), at most `history_tokens`."""
    first_layer: Literal["compressed", "full"] = "compressed"
    """What the first layer's latents see (history=compressed): the rows (section 4.3 of the paper) or every history
    token (its tables 7 and 8)."""
    prefix_dropout: float = 0.0
    """Fraction of the history's tokens that training leaves out, drawn anew for each sequence and step: of h tokens
    int(fraction * h)."""
    vary_latents: bool = False
    """Whether training draws the number of latents anew for each step, evenly from half of `latents` to all. The labels
    follow. It prepares for decode=refill and for short prompts. Windows begin as near to each other as the fewest
    latents ask, so that an epoch has each token as a label at least once."""
    decode: Decode = "exact"
    """How to go on when all latents are used; a trained model can change it (`subquad generate --decode`,
    `PerceiverAR.set_decode`). exact: compute the last `latents` tokens anew for each token. refill:
    start again with `refill` latents, now and then. frozen: stop there, with an error; the history never changes."""
    refill: int | None = None
    """Latents that a refill keeps and a prompt is read with, for decode=refill and frozen (None: half of them)."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name in ("history", "first_layer", "decode"):
            value, choices = getattr(self, name), get_args(hints[name])
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}; {suggest(str(value), choices)}")
        for name in ("latents", "segment", "projected", "history_tokens", "refill"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
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
        self._refuse_what_has_no_effect()
        if self.refill is not None and self.refill > self.latents:
            raise ValueError(f"refill must be at most latents, got refill={self.refill}, latents={self.latents}")
        if self.decode == "frozen" and self.kept == self.latents:
            raise ValueError(f"decode='frozen' needs refill below latents, got {self.kept} of {self.latents}")

    def _refuse_what_has_no_effect(self) -> None:
        """Raise `ValueError` for an option that is not its default and that nothing would read."""
        unread = {"segment"} if self.history != "segments" else set()
        unread |= {"projected", "first_layer"} if self.history != "compressed" else set()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in unread and value != field.default:
                raise ValueError(f"{field.name}={value!r} has no effect with history={self.history!r}; leave it out")
        if self.decode == "exact" and self.refill is not None:
            raise ValueError(f"refill={self.refill} has no effect with decode='exact'; leave it out")

    @property
    def fewest_latents(self) -> int:
        """Latents that a step of training may come down to."""
        return (self.latents + 1) // 2 if self.vary_latents else self.latents

    @property
    def fewest_predicted(self) -> int:
        """The fewest latents."""
        return self.fewest_latents

    @property
    def draws(self) -> bool:
        """Whether the number of latents or the history's tokens are drawn."""
        return self.vary_latents or self.prefix_dropout > 0

    def window_labels(self, length: int) -> int:
        """All latents but the first, of the fewest latents. Raises `ValueError` for none, and for no history."""
        if length <= self.latents:
            raise ValueError(
                f"perceiver_ar would have no history: batch.length={length} must be above its latents={self.latents}; "
                "give longer windows (batch.length) or fewer latents (model.options.perceiver_ar.latents)"
            )
        if self.fewest_latents < 2:
            raise ValueError(
                f"perceiver_ar needs at least {3 if self.vary_latents else 2} latents to train"
                f"{' with vary_latents' if self.vary_latents else ''}, got {self.latents}: what a window's last "
                "latent predicts lies after the window"
            )
        return self.fewest_latents - 1

    @property
    def kept(self) -> int:
        """Latents after a refill."""
        return max(1, self.latents // 2) if self.refill is None else self.refill

    @property
    def prompt_latents(self) -> int:
        """Latents that a prompt is read with before decoding."""
        return self.latents if self.decode == "exact" else self.kept
