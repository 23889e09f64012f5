"""Small randomly initialised models of transformers, and options of our attention that are small too."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from subquad import hf

KINDS = ("llama", "qwen3", "gpt2")
OPTIONS = {
    "bigbird": {"block": 4, "num_global": 1, "num_random": 1},
    "dilated": {"width": 3, "dilation": 2},
    "full": {},
    "llp": {"segment": 8},
    "longformer": {"width": 4, "num_global": 2},
    "shifted": {"group": 8},
    "strided": {"stride": 4},
    "window": {"width": 5},
}
"""Each implementation."""


def config_of(kind, **changes):
    """Two layers of 4 heads; llama and qwen3 with 2 heads of keys, qwen3 with heads that are no part of the width."""
    if kind == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "loss_type": "ForCausalLM"}
        shape = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return GPT2Config(**shape | dropouts | {"bos_token_id": 0, "eos_token_id": 0} | changes)
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    shape |= {"initializer_range": 0.2}
    if kind == "qwen3":
        return Qwen3Config(**shape | {"head_dim": 16} | changes)
    return LlamaConfig(**shape | changes)


def stock(kind, attention=None, dtype=torch.float64, options=None, **changes):
    """A model of transformers with one of our attentions (None: its own), the same weights for the same kind."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes), dtype=dtype).eval()
    if attention is not None:
        hf.set_attention(model, attention, **(OPTIONS[attention] if options is None else options))
    return model


def tokens(*shape):
    """Tokens 1 to 60, the same for the same shape."""
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(3))


def positions(mask):
    """The `position_ids` that `generate` gives to padded rows."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
