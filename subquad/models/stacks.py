"""The stacks: models that are more than a mechanism in each layer of a decoder. Read without loading torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from subquad.config import Config, suggest

if TYPE_CHECKING:
    from subquad.models.config import DecoderConfig
    from subquad.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class StackOptions(Config):
    """Options of a stack, and its answers to what a training asks; as they are, those of a decoder of mechanisms."""

    @property
    def fewest_predicted(self) -> int | None:
        """Last tokens of a window that a training step predicts from, at least; None: all of them."""
        return None

    @property
    def draws(self) -> bool:
        """Whether a training step draws random numbers, dropout apart."""
        return False

    def window_labels(self, length: int) -> int:
        """Labels of a training window of `length` tokens, its last ones. Raises `ValueError` for none."""
        return length - 1


@dataclass(frozen=True)
class Stack:
    """One line of the tables, and where its code is."""

    name: str
    """What `attention` is set to."""
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
    model: str
    """The model, as `module:class`."""
    options: str
    """The configuration of its options, as `module:class`; the module loads no torch."""
    exemptions: tuple[tuple[int, str], ...]
    """The laws of the contract that mean nothing for it, and why; tests/models hold it to the others."""

    def model_class(self) -> type[Any]:
        """The model's class."""
        return _load(self.model)

    def options_class(self) -> type[StackOptions]:
        """The class of its options."""
        return _load(self.options)


NO_MATRIX = "a stack of layers has no one matrix of weights"
WHOLE = "bidirectional: reads whole sequences and keeps no state"
ONE_DOCUMENT = "a row's latents read one document: it takes no packed ones"
BIDIRECTIONAL = (
    (1, NO_MATRIX),
    (3, WHOLE),
    (4, WHOLE),
    (5, WHOLE),
    (9, "bidirectional: a token sees later ones"),
    (15, ONE_DOCUMENT),
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
)
"""Settings of `DecoderConfig` that no stack has."""

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
            model="subquad.models.perceiver:PerceiverAR",
            options="subquad.models.perceiver_options:PerceiverAROptions",
            exemptions=((1, NO_MATRIX), (15, ONE_DOCUMENT)),
        ),
        Stack(
            name="perceiver",
            summary="every token, through latents that read the inputs",
            paper="Jaegle et al. 2021, arXiv:2103.03206",
            forms=("bidirectional",),
            cost_order="linear",
            state="none",
            model="subquad.models.perceiver_io:Perceiver",
            options="subquad.models.encoder_config:PerceiverOptions",
            exemptions=BIDIRECTIONAL,
        ),
        Stack(
            name="perceiver_io",
            summary="every token, through latents that read the inputs and are read by output queries",
            paper="Jaegle et al. 2021, arXiv:2107.14795",
            forms=("bidirectional",),
            cost_order="linear",
            state="none",
            model="subquad.models.perceiver_io:PerceiverIO",
            options="subquad.models.encoder_config:PerceiverIOOptions",
            exemptions=BIDIRECTIONAL,
        ),
    )
}


def stack_of(config: DecoderConfig) -> Stack | None:
    """The stack that `config.attention` names; None for mechanisms. `ValueError` where a stack is part of a list."""
    for name in config.mechanisms:
        if name in STACKS:
            if len(config.mechanisms) > 1:
                raise ValueError(
                    f"attention {name!r} is a whole stack and cannot be one layer of several, got {config.attention!r}"
                )
            _check_plain(config, name)
            return STACKS[name]
    return None


def options_of(config: DecoderConfig) -> StackOptions:
    """The options of the stack that `config.attention` names; those of no stack where it names mechanisms."""
    stack = stack_of(config)
    if stack is None:
        return StackOptions()
    where = f"model.options.{stack.name}"
    return stack.options_class().from_dict(config.options.get(stack.name, {}), where=where)


def _check_plain(config: DecoderConfig, name: str) -> None:
    """Raise `ValueError` for settings that the decoder's layers have and a stack's do not."""
    for key in DECODERS_OWN:
        value = getattr(config, key)
        if value != type(config).__dataclass_fields__[key].default:
            raise ValueError(f"{key}={value} has no meaning for attention {name!r}; leave it out")


def build_model(config: DecoderConfig) -> Decoder:
    """The causal language model that `config.attention` names: a stack, or a `Decoder` of mechanisms.

    Raises `ValueError` for an unknown name, for a stack that has no causal form, and as the model itself does.
    """
    stack = stack_of(config)
    if stack is None:
        from subquad.attention import names
        from subquad.models.decoder import Decoder

        valid = {*names(), *STACKS}
        for name in config.mechanisms:
            if name not in valid:
                raise ValueError(f"unknown attention {name!r}; {suggest(name, valid)}")
        return Decoder(config)
    if "causal" not in stack.forms:
        raise ValueError(f"attention {stack.name!r} has no causal form and cannot predict the next token")
    model: Decoder = stack.model_class()(config)
    return model


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
