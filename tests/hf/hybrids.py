"""Laws of tiny hybrid models in transformers and, imported, in subquad: logits that should be equal.

docs/make_hybrids.py writes the verdicts to docs/hybrids.md.

Shape letters: B rows, T tokens, V vocabulary.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from inspect import signature, unwrap
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from subquad.hf import from_transformers

MAMBA2 = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "state_size": 5,
    "n_groups": 2, "chunk_size": 16, "initializer_range": 0.2,
}  # fmt: skip
MIXERS = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.2, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 5, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
GRANITE = MIXERS | {
    "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 7.0, "attention_multiplier": 0.3,
}  # fmt: skip
QWEN = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5, "initializer_range": 0.2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba-2": ("Mamba2ForCausalLM", MAMBA2),
    "Mamba-2, biases, bounded steps": (
        "Mamba2ForCausalLM",
        MAMBA2 | {"use_bias": True, "time_step_limit": (0.01, 0.06)},
    ),
    "Bamba": (
        "BambaForCausalLM",
        MIXERS | {"intermediate_size": 40, "attn_layer_indices": [1], "num_attention_heads": 2, "pad_token_id": None},
    ),
    "Granite 4, no positions": ("GraniteMoeHybridForCausalLM", GRANITE | {"position_embedding_type": "nope"}),
    "Granite 4, rotary": ("GraniteMoeHybridForCausalLM", GRANITE | {"position_embedding_type": "rope"}),
    "Qwen3.5": ("Qwen3_5ForCausalLM", QWEN),
    "Qwen3-Next, dense": ("Qwen3NextForCausalLM", QWEN | {"num_experts": 0}),
}
"""Class in transformers and values of its configuration, by the name in the table."""
TOKENS = torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(1))
ROUNDING = 1e-4
"""Largest difference that counts as rounding, over the largest logit; float32 gives about 1e-6."""
Pair = tuple[Tensor, Tensor]


def theirs(name: str) -> PreTrainedModel:
    """Build the model of transformers, with random weights, norms and biases too."""
    torch.manual_seed(0)
    cls, values = getattr(transformers, MODELS[name][0]), MODELS[name][1]
    model: PreTrainedModel = cls(cls.config_class(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    module = sys.modules[cls.__module__]
    for operator in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        if hasattr(module, operator):  # not those of an installed package, which need a GPU
            setattr(module, operator, unwrap(getattr(module, operator)))
    return model.eval()


def read(model: Any, tokens_BT: Tensor, cache: Any = None, **inputs: Any) -> tuple[Tensor, Any]:
    """Return logits `[B, T, V]` and the cache."""
    name = "cache_params" if "cache_params" in signature(model.forward).parameters else "past_key_values"
    output = model(tokens_BT, use_cache=True, **({} if cache is None else {name: cache}), **inputs)
    return output.logits, output[name]


def alone(model: Any, *parts: Tensor) -> Tensor:
    """Return the logits of one row that holds these tokens and nothing else."""
    return read(model, torch.cat(parts)[None])[0][0]


def padded(*gap: int, tokens: int = 12) -> dict[str, Tensor]:
    """Return the mask of two rows, of which the first has padding from `gap[0]` to `gap[1]`, and their positions."""
    mask_BT = torch.ones(2, tokens, dtype=torch.long)
    mask_BT[0, slice(*gap)] = 0
    return {"attention_mask": mask_BT, "position_ids": (mask_BT.cumsum(-1) - 1).clamp(min=0)}


def until(inputs: dict[str, Tensor], stop: int, start: int = 0) -> dict[str, Tensor]:
    """Return the inputs for the tokens from `start` to `stop`: the mask covers the cache's tokens too."""
    return {
        "attention_mask": inputs["attention_mask"][:, :stop],
        "position_ids": inputs["position_ids"][:, start:stop],
    }


def left_padding(model: Any) -> Pair:
    """A row with padding before its tokens is as if alone."""
    return read(model, TOKENS, **padded(0, 4))[0][0, 4:], alone(model, TOKENS[0, 4:])


def right_padding(model: Any) -> Pair:
    """A prompt with padding after its tokens, then one token at a time."""
    inputs = padded(5, 8)
    _, cache = read(model, TOKENS[:, :8], **until(inputs, 8))
    found = []
    for t in range(8, 12):
        logits_B1V, cache = read(model, TOKENS[:, t : t + 1], cache, **until(inputs, t + 1, t))
        found.append(logits_B1V[0])
    return torch.cat(found), alone(model, TOKENS[0, :5], TOKENS[0, 8:])[5:]


def padding_in_a_piece(model: Any) -> Pair:
    """After a cache, several tokens, of which a row's first are padding."""
    inputs = padded(6, 8)
    _, cache = read(model, TOKENS[:, :6], **until(inputs, 6))
    logits_BTV, _ = read(model, TOKENS[:, 6:], cache, **until(inputs, 12, 6))
    return logits_BTV[0, 2:], alone(model, TOKENS[0, :6], TOKENS[0, 8:])[6:]


def a_row_waits(model: Any) -> Pair:
    """After a cache, one token, which is padding in a row, then one more."""
    inputs = padded(6, 7)
    _, cache = read(model, TOKENS[:, :6], **until(inputs, 6))
    _, cache = read(model, TOKENS[:, 6:7], cache, **until(inputs, 7, 6))
    logits_B1V, _ = read(model, TOKENS[:, 7:8], cache, **until(inputs, 8, 7))
    return logits_B1V[0], alone(model, TOKENS[0, :6], TOKENS[0, 7:8])[6:]


def between(model: Any) -> Pair:
    """Padding between the tokens of a row, and no positions given."""
    mask_BT = padded(4, 7)["attention_mask"]
    logits_BTV, _ = read(model, TOKENS, attention_mask=mask_BT)
    return logits_BTV[0, mask_BT[0].bool()], alone(model, TOKENS[0, :4], TOKENS[0, 7:])


def documents(model: Any) -> Pair:
    """Two documents in one row, told by positions that begin again, as `DataCollatorWithFlattening` packs them."""
    positions_BT = torch.tensor([[*range(5), *range(7)]])
    logits_BTV = model(TOKENS[:1], position_ids=positions_BT, use_cache=False).logits
    return logits_BTV[0], torch.cat([alone(model, TOKENS[0, :5]), alone(model, TOKENS[0, 5:])])


def several_tokens(model: Any) -> Pair:
    """Several tokens after a cache."""
    _, cache = read(model, TOKENS[:, :6])
    return read(model, TOKENS[:, 6:], cache, **until(padded(0, 0), 12, 6))[0], read(model, TOKENS)[0][:, 6:]


def after_a_cache(model: Any) -> Pair:
    """Several tokens after a cache, and no positions given."""
    _, cache = read(model, TOKENS[:, :6])
    return read(model, TOKENS[:, 6:], cache)[0], read(model, TOKENS)[0][:, 6:]


def single_tokens(model: Any) -> Pair:
    """One token at a time after a cache."""
    _, cache = read(model, TOKENS[:, :6])
    found = []
    for t in range(6, 12):
        logits_B1V, cache = read(model, TOKENS[:, t : t + 1], cache, **until(padded(0, 0), t + 1, t))
        found.append(logits_B1V)
    return torch.cat(found, 1), read(model, TOKENS)[0][:, 6:]


LAWS: dict[str, Callable[[Any], Pair]] = {
    "one token after a cache": single_tokens,
    "several tokens after a cache": several_tokens,
    "left padding": left_padding,
    "right padding, then decode": right_padding,
    "padding in a continued piece": padding_in_a_piece,
    "a row waits for one step": a_row_waits,
    "default positions after a cache": after_a_cache,
    "default positions, padding between tokens": between,
    "packed documents": documents,
}


@torch.no_grad()
def verdict(law: Callable[[Any], Pair], model: Any) -> str:
    """Return `same`, by how much of the largest logit the logits differ, or the error's name."""
    try:
        found, expected = law(model)
    except Exception as error:
        return type(error).__name__
    share = ((found - expected).abs().max() / expected.abs().max()).item()
    return "same" if share < ROUNDING else f"{100 * float(f'{share:.0e}'):g} % off"


def rows(names: Iterable[str] = tuple(MODELS)) -> Iterator[list[str]]:
    """Yield the table's rows: a model, whose code runs it, and a verdict for each law."""
    for name in names:
        model = theirs(name)
        for code, run in (("transformers", model), ("subquad", from_transformers(model))):
            yield [name, code, *(verdict(law, run) for law in LAWS.values())]
