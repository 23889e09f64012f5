"""Small models and inputs that the tests of whole models share."""

import pytest
import torch

from subquad.attention import mechanism, names
from subquad.models import Classifier, Decoder, DecoderConfig, EncoderConfig, PerceiverAR
from subquad.models.stacks import STACKS
from subquad.testing import assert_exact

VOCABULARY, TOKENS = 23, 17
SHAPE = {"vocab_size": VOCABULARY, "dim": 16, "num_layers": 2, "num_heads": 2, "init_std": 0.3}
OPTIONS = {
    "bigbird": {"block": 3, "num_global": 1, "num_random": 1},
    "dilated": {"width": 2, "dilation": 3},
    "elita": {"horizon": 64},
    "latte_macchiato": {"width": 4},
    "llp": {"segment": 6},
    "llp_printed": {"segment": 6},
    "logsparse": {"width": 2, "max_tokens": 5},
    "longformer": {"width": 4},
    "shifted": {"group": 4},
    "strided": {"stride": 4, "columns": 2},
    "window": {"width": 4},
}
"""Segments and windows shorter than the sequence."""
LATENTS, COLUMNS, ROWS, SEGMENT = 5, 7, 3, 3
COMPRESSED = {"history": "compressed", "history_tokens": COLUMNS, "projected": ROWS}
HISTORIES = {
    "cross": {"history": "cross"},
    "cross-short": {"history": "cross", "history_tokens": 6},
    "self": {"history": "self"},
    "self-short": {"history": "self", "history_tokens": 4},
    "segments": {"history": "segments", "segment": SEGMENT},
    "segments-short": {"history": "segments", "segment": SEGMENT, "history_tokens": 7},
    "compressed": COMPRESSED,
    "compressed-late": COMPRESSED | {"first_layer": "full"},
}
"""Kinds of history of Perceiver AR, with and without a limit."""
SLOW = ("cross-short", "self-short", "segments")
every_history = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow if form in SLOW else []) for form in HISTORIES]
)
LOOPED = {"loops": 3, "loop_loss": "all", "lookup": 31, "feedforward": "bilinear"}
POST = {"norm_position": "post", "norm": "layer", "feedforward": "relu", "head_bias": True}
KINDS = ("full", "llp", "latte", "luna")
"""One mechanism for each kind of state: growing, segments, constant, and one that passes a memory between layers."""


def mechanisms(form="causal", quick=KINDS):
    """Parameters for all mechanisms that have `form`; those not in `quick` are slow tests."""
    found = [name for name in names() if form in mechanism(name).forms]
    return [pytest.param(name, id=name, marks=[] if name in quick else pytest.mark.slow) for name in found]


def settings_of(attention, **fields):
    """Fields of a configuration, with positions that the mechanisms support."""
    listed = [attention] if isinstance(attention, str) else attention
    rotates = any(mechanism(name).rotates for name in listed if name not in STACKS)
    return (
        SHAPE | {"attention": attention, "options": OPTIONS, "position": "rope" if rotates else "sinusoidal"} | fields
    )


def decoder(attention="full", **fields):
    """A decoder in float64 and evaluation mode; biases of passes and of the head, zero at first, are random."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**settings_of(attention, **fields))).double().eval()
    for name, bias in model.named_parameters():
        if name.startswith(("pass_biases", "head.bias")):
            torch.nn.init.normal_(bias)
    return model


def looped(attention, **fields):
    """A decoder whose layers run in three passes, with a look-up over the logits of each."""
    return decoder(attention, **LOOPED | fields)


def classifier(attention="full", **fields):
    """A classifier of three classes in float64 and evaluation mode."""
    torch.manual_seed(0)
    return Classifier(EncoderConfig(**settings_of(attention, num_classes=3, **fields))).double().eval()


def perceiver_ar(form, options=None, **fields):
    """A Perceiver AR of three layers with rotary positions, in float64 and evaluation mode."""
    torch.manual_seed(0)
    options = {"perceiver_ar": {"latents": LATENTS, **HISTORIES[form], **(options or {})}}
    fields = {"attention": "perceiver_ar", "num_layers": 3, "max_positions": TOKENS} | fields
    model = PerceiverAR(DecoderConfig(**SHAPE | fields, options=options)).double().eval()
    if model.head.bias is not None:
        torch.nn.init.normal_(model.head.bias)
    return model


def tokens(batch=3, tokens=TOKENS):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def mask():
    """Padding on the left, on the right and in the middle."""
    real = torch.ones(3, TOKENS, dtype=torch.bool)
    real[0, :5] = real[1, 11:] = real[2, 3:9] = False
    return real


def sparse_mask():
    """Padding on the left, in the middle with few tokens left, on the right, everywhere."""
    real = torch.ones(4, TOKENS, dtype=torch.bool)
    real[0, :5] = real[1, 2:15] = real[2, 9:] = real[3] = False
    return real


def in_pieces(model, x, cuts):
    """Outputs and last state of a model that reads the parts of `x` between `cuts` one after another."""
    outputs, state = [], None
    for part in x.tensor_split(cuts, dim=1):
        output, state = model(part, state)
        outputs.append(output)
    return torch.cat(outputs, 1), state


def assert_checkpointing_changes_no_bit(model, loss):
    """Gradients of `loss()` with and without checkpointing, which computes each block a second time."""
    gradients, calls = [], []
    model.layers[0].attention_norm.register_forward_pre_hook(lambda *_: calls.append(model.gradient_checkpointing))
    for model.gradient_checkpointing in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        loss().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert_exact(checkpointed[name], gradient, name)
    assert sum(calls) == 2 * (len(calls) - sum(calls)) > 0


def assert_refused(*cases):
    """Each case is a call, its error and a pattern of the message."""
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def sines(channels, places=TOKENS):
    """`sin(p / 10000^(2c / D))`, then the cosines, `[T, D]` (Vaswani et al. 2017, section 3.5)."""
    angles = torch.arange(places).double()[:, None] / 10000 ** (torch.arange(0, channels, 2).double() / channels)
    return torch.cat([angles.sin(), angles.cos()], -1)
