"""Small models as transformers models, and small models of transformers, which the tests of hf share."""

import inspect
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from subquad import hf
from subquad.attention import mechanism, names
from subquad.hf import SubquadConfig, SubquadEncoderForSequenceClassification, SubquadForCausalLM
from subquad.hf.encoders import SubquadClassifierConfig, SubquadForPreTraining, SubquadPretrainingConfig
from subquad.hf.image import SubquadImageConfig
from subquad.models import EncoderConfig, ImageModelConfig
from tests.models.small import HISTORIES, KINDS, LATENTS, POST, SLOW, VOCABULARY, settings_of

LOOPED = {"loops": 3, "lookup": 31, "feedforward": "bilinear"}


def language_model(name="llp", seed=0, **fields):
    """A causal language model in float64, in which another order of sums picks no other token, in evaluation mode."""
    torch.manual_seed(seed)
    fields = settings_of(name, **{"init_std": 1.2, "pad_token_id": 0} | fields)
    model = SubquadForCausalLM(SubquadConfig(**fields)).double().eval()
    for part, bias in model.named_parameters():
        if "pass_biases" in part or part == "lm_head.bias":
            torch.nn.init.normal_(bias)
    return model


def perceiver_ar(history="self-short", **options):
    options = {"perceiver_ar": {"latents": LATENTS, **HISTORIES[history], **options}}
    return language_model("perceiver_ar", num_layers=3, position="rope", options=options)


FORMS = {name: partial(language_model, name) for name in names() if "causal" in mechanism(name).forms}
FORMS["looped"] = partial(language_model, "latte", bias=True, tie_embeddings=False, **LOOPED)
FORMS["post"] = partial(language_model, "latte", position_scale=1.0, **POST)
FORMS |= {f"perceiver_ar {history}": partial(perceiver_ar, history) for history in HISTORIES}
QUICK = (*KINDS, "looped", "post", *(f"perceiver_ar {history}" for history in HISTORIES if history not in SLOW))
every_form = pytest.mark.parametrize("make", [
    pytest.param(make, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, make in FORMS.items()
])  # fmt: skip
"""Makers of causal language models: each kind of state, loops, each history; other mechanisms are slow tests."""


def encoder_config(name="llp", **fields):
    return EncoderConfig(**settings_of(name, **{"max_positions": 16} | fields))


def classifier(name="llp", classes=("red", "green", "blue"), **fields):
    torch.manual_seed(0)
    config = encoder_config(name, num_classes=len(classes), **fields)
    return SubquadEncoderForSequenceClassification(SubquadClassifierConfig.from_encoder(config, classes=classes)).eval()


def pretraining(name="llp", objective="denoise", **fields):
    """A model in training mode, whose last token of the vocabulary, with `denoise`, is the mask token."""
    torch.manual_seed(0)
    config = encoder_config(name, causal=objective == "causal", **fields)
    return SubquadForPreTraining(SubquadPretrainingConfig.from_encoder(config, objective=objective, mask_fraction=0.3))


def image_model(name="linear", **fields):
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "position": "none", "height": 4, "width": 4, "near": 1}
    torch.manual_seed(0)
    config = SubquadImageConfig.from_image(ImageModelConfig(**shape | {"attention": name} | fields))
    return hf.SubquadForImages(config).eval()


PIXELS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))


def prompt(batch=2, length=8, seed=1):
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(padding=3):
    """Inputs of `generate`: a row of 8 tokens, and one of fewer after padding."""
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :padding] = 0
    return {"inputs": prompt() * mask, "attention_mask": mask}


# --- models of transformers

STOCK_KINDS = ("llama", "qwen3", "gpt2")
STOCK_OPTIONS = {
    "bigbird": {"block": 4, "num_global": 1, "num_random": 1},
    "dilated": {"width": 3, "dilation": 2},
    "full": {},
    "llp": {"segment": 8},
    "longformer": {"width": 4, "num_global": 2},
    "shifted": {"group": 8},
    "strided": {"stride": 4},
    "window": {"width": 5},
}
"""Each attention implementation, with ranges shorter than the sequences."""


HYBRID = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
"""Three layers of Gated DeltaNet and one of full attention, as Qwen3.5 and Qwen3-Next name them."""


def by_torch(model):
    """Return the model of transformers, which then computes by its own functions on torch.

    Packages of kernels take their place where they are installed, also on a machine without the GPU that they need.
    """
    module = sys.modules[type(model).__module__]
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"):
        if hasattr(module, name):
            setattr(module, name, inspect.unwrap(getattr(module, name)))
    return model


def stock_config(kind, **changes):
    """Two layers of 4 heads; llama and qwen3 with 2 key heads, qwen3 with heads wider than the model's width."""
    if kind == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "loss_type": "ForCausalLM"}
        shape = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return GPT2Config(**shape | dropouts | {"bos_token_id": 0, "eos_token_id": 0} | changes)
    shape = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
    }  # fmt: skip
    return Qwen3Config(**shape | {"head_dim": 16} | changes) if kind == "qwen3" else LlamaConfig(**shape | changes)


def stock(kind="llama", attention=None, dtype=torch.float64, options=None, **changes):
    """A model of transformers with one of our attentions (None: its own), the same weights for the same kind."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(stock_config(kind, **changes), dtype=dtype).eval()
    if attention is not None:
        hf.set_attention(model, attention, **(STOCK_OPTIONS[attention] if options is None else options))
    return model


def stock_tokens(*shape):
    """Tokens 1 to 60, the same for the same shape."""
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(3))


def positions(mask):
    """The `position_ids` that `generate` gives to padded rows."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
