"""LongLoRA's shifted attention as published, in a tiny Llama with random weights, and its audit beside ours.

docs/make_transformers.py writes the reports to docs/transformers.md.

Shape letters: B batch, H query heads, G key heads, T queries, K channels of a head, N groups of C tokens.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import sdpa_mask

from subquad import hf
from subquad.evaluation.audit import AuditReport, audit

PUBLISHED = "published_shift"


def published_shift(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attend in groups of a quarter of the sequence; roll half of the heads by half a group before and back after.

    In each group the mask is causal in the order after the roll, so tokens that wrap around are not masked.
    """
    _, H, T, _ = query.shape
    if T % 8 or key.shape[2] != T:
        raise ValueError(f"the published form takes whole sequences of 8 n tokens, got {T} of {key.shape[2]}")
    group = T // 4
    q_BHTK, k_BHTK, v_BHTK = query, *(x.repeat_interleave(H // x.shape[1], 1) for x in (key, value))

    def rolled(x_BHTK, by):
        return torch.cat([x_BHTK[:, : H // 2], x_BHTK[:, H // 2 :].roll(by, 2)], 1)

    groups = (rolled(x, -(group // 2)).unflatten(2, (-1, group)) for x in (q_BHTK, k_BHTK, v_BHTK))
    y_BHNCK = F.scaled_dot_product_attention(*groups, is_causal=True, scale=scaling)
    return rolled(y_BHNCK.flatten(2, 3), group // 2).transpose(1, 2).contiguous(), None


def tiny_llama() -> LlamaForCausalLM:
    """Build a Llama with 19,424 random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def reports() -> dict[str, AuditReport]:
    """Return the audit of each implementation, by its name."""
    AttentionInterface.register(PUBLISHED, published_shift)
    AttentionMaskInterface.register(PUBLISHED, sdpa_mask)
    found = {}
    for name in (PUBLISHED, "subquad_shifted"):
        model = tiny_llama()
        if name == PUBLISHED:
            model.set_attn_implementation(name)
        else:
            hf.set_attention(model, "shifted", group=8)
        found[name] = audit(model, tokens=32, contexts=[], long=0)
    return found
