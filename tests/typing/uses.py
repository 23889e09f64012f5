"""What type checkers see of the public names: `make lint` checks this file, and nothing runs it.

An unused `type: ignore` is an error there, so each one below is a mistake that a checker catches.
"""

from typing import assert_type

from torch import Tensor

from subquad import State, attention, hf, models


def layers(x: Tensor, mask: Tensor) -> None:
    """A layer gives outputs and a state, with options that are checked."""
    layer = attention.Latte(dim=16, num_heads=2, num_latents=8)
    y, state = layer(x)
    assert_type(layer(y, state, mask=mask), tuple[Tensor, State])
    assert_type(attention.build("llp", dim=16, num_heads=2)(x), tuple[Tensor, State])
    layer(layer(x))  # type: ignore[arg-type]
    layer(x, mask)  # type: ignore[arg-type]
    layer(x) + x  # type: ignore[operator]
    attention.Latte(16, 2)  # type: ignore[call-arg]
    attention.Latte(dim=16, num_heads=2, hidden_size=16)  # type: ignore[call-arg]


def whole_models(tokens: Tensor, x: Tensor) -> None:
    """A decoder and its blocks give the same pair."""
    config = models.DecoderConfig(vocab_size=10, dim=16)
    decoder = models.Decoder(config)
    assert_type(decoder(tokens), tuple[Tensor, State])
    assert_type(decoder.blocks()[0](x), tuple[Tensor, State])
    assert_type(models.PerceiverAR(config)(tokens), tuple[Tensor, State])
    models.DecoderConfig(hidden_size=16)  # type: ignore[call-arg]


def transformers_models() -> None:
    """Loading gives the class it is asked of, and its configuration has typed fields."""
    model = hf.SubquadForCausalLM.from_pretrained("folder")
    assert_type(model, hf.SubquadForCausalLM)
    assert_type(hf.SubquadModel.from_pretrained("folder"), hf.SubquadModel)
    assert_type(model.config.dim, int)
    assert_type(hf.SubquadConfig(dim=16, eos_token_id=1).head_dim, int | None)
    assert_type(hf.SubquadConfig.from_decoder(models.DecoderConfig()), hf.SubquadConfig)
