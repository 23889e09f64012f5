"""Build the model that a configuration names."""

from __future__ import annotations

from subquad.attention import names
from subquad.config import suggest
from subquad.models.config import DecoderConfig
from subquad.models.decoder import Decoder
from subquad.models.encoder import Encoder, EncoderConfig
from subquad.models.perceiver import PerceiverEncoder
from subquad.models.perceiver_ar import PerceiverAR
from subquad.models.stacks import STACKS, stack_of


def build_model(config: DecoderConfig, *, head: bool = True) -> Decoder:
    """Return the causal language model that `config.attention` names: a stack, or a `Decoder` of mechanisms.

    Without `head` it gives vectors alone. Raises `ValueError` for an unknown name, for a stack without a causal
    form, and as the model's constructor does.
    """
    stack = stack_of(config)
    if stack is None:
        valid = {*names(), *STACKS}
        for name in config.mechanisms:
            if name not in valid:
                raise ValueError(f"unknown attention {name!r}; {suggest(name, valid)}")
        return Decoder(config, head=head)
    if "causal" not in stack.forms:
        raise ValueError(f"attention {stack.name!r} has no causal form and cannot predict the next token")
    return PerceiverAR(config, head=head)


def build_encoder(config: EncoderConfig) -> Encoder | PerceiverEncoder:
    """Return the encoder that `config.attention` names; `ValueError` for a stack without a bidirectional form."""
    stack = stack_of(config)
    if stack is None:
        return Encoder(config)
    if "bidirectional" not in stack.forms:
        raise ValueError(f"attention {stack.name!r} has no bidirectional form; it has: {', '.join(stack.forms)}")
    return PerceiverEncoder(config)
