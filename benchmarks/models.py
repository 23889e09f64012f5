"""Models to time: decoders of this library's mechanisms, the same decoder on SDPA, and other libraries' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.operators import flash
from benchmarks.peers import load, own
from subquad.attention import mechanism, names
from subquad.attention.full import Full
from subquad.config import suggest
from subquad.layers.feedforward import SwiGLU
from subquad.models import Decoder, DecoderConfig
from subquad.models.build import build_model
from subquad.ops.patterns import Pattern

BASE = "sdpa"
STACK = "perceiver_ar"
OURS, THEIRS = "qwen3_5", "transformers-qwen3_5"
"""transformers' Qwen3.5, as our decoder imports it and as it is."""
SIZED = ("horizon", "max_tokens")
"""Options that bound the length; they are set to the longest measured one."""


class Sdpa(Full):
    """Full attention over whole sequences by `scaled_dot_product_attention` (on a GPU in 16 bits: its flash kernel)."""

    def attend_to(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, pattern: Pattern, **where: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, and a tensor with the shape of the logsumexp, which is unused here."""
        half = v_BGSK.is_cuda and v_BGSK.dtype.itemsize == 2
        with flash() if half else nullcontext():
            out = F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, is_causal=True)
        return out, out[..., 0]


def check_models(mechanisms: Sequence[str], options: Mapping[str, Any], *, stacks: bool) -> None:
    """Raise `ValueError` for an unknown name or a mechanism without a causal form."""
    causal = [name for name in names() if "causal" in mechanism(name).forms]
    valid = [*causal, *([STACK] if stacks else [])]
    for name in (*mechanisms, *options):
        if name not in valid:
            problem = "no causal form of" if name in names() else "unknown"
            raise ValueError(f"{problem} attention {name!r}; {suggest(name, valid)}")


def build_decoder(
    name: str, *, layers: int, dim: int, heads: int, vocab: int, longest: int, options: Mapping[str, Mapping[str, Any]]
) -> Decoder:
    """Build a decoder of one mechanism, of the stack perceiver_ar (half of `longest` are latents), or of SDPA.

    Positions are rotary if the mechanism can rotate; else there are none, as its weights know the order. Raises
    `ValueError` or `TypeError` for invalid options.
    """
    torch.manual_seed(0)
    attention = "full" if name == BASE else name
    decoder = build_model(
        DecoderConfig(
            vocab_size=vocab,
            dim=dim,
            num_layers=layers,
            num_heads=heads,
            attention=attention,
            position="rope" if attention == STACK or mechanism(attention).rotates else "none",
            options={attention: {**_sized(attention, longest), **options.get(attention, {})}},
        )
    )
    if name == BASE:
        for block in decoder.blocks():
            assert isinstance(block.attention, Full)
            mixer = Sdpa.from_config(block.attention.config)
            mixer.load_state_dict(block.attention.state_dict())
            block.attention = mixer
    return decoder


def _sized(name: str, longest: int) -> dict[str, int]:
    if name == STACK:
        return {"latents": max(1, longest // 2)}
    known = {field.name for field in fields(mechanism(name).Config)}
    return {option: max(2, longest) for option in SIZED if option in known}


class Llama(nn.Module):
    """transformers' Llama of the same sizes, feed-forward width included; its attention is SDPA, or one of ours."""

    classes = "LlamaConfig", "LlamaForCausalLM"
    counts: tuple[str, ...] = ()
    """More options that are the number of heads."""
    widths: tuple[str, ...] = ()
    """More options that are the channels of a head."""

    def __init__(
        self, *, layers: int, dim: int, heads: int, vocab: int, longest: int, attention: str | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        transformers = load("transformers")
        config, model = self.classes
        self.config = getattr(transformers, config)(
            vocab_size=vocab,
            hidden_size=dim,
            intermediate_size=SwiGLU(dim).up.out_features,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=longest,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
            **dict.fromkeys(self.counts, heads),
            **dict.fromkeys(self.widths, dim // heads),
        )
        self.model: Any = getattr(transformers, model)(self.config)
        if attention is not None:
            from subquad import hf  # loads transformers

            hf.set_attention(self.model, attention, **OF_LLAMA[attention])

    def loss(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return the cross-entropy of the labels; label t is the token to predict at t."""
        out = self.model(tokens_BT, labels=labels_BT, shift_labels=labels_BT, use_cache=False)
        loss: Tensor = out.loss
        return loss

    def prefill(self, tokens_BT: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Return the last token's logits and the cache."""
        out = self.model(tokens_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits, out.past_key_values

    def taken_back(self, cache: Any, tokens: int) -> Any:
        """Return the cache as it was after so many tokens."""
        if more := cache.get_seq_length() - tokens:
            cache.crop(-more)
        return cache


class Qwen(Llama):
    """transformers' Qwen3.5 of the same sizes: in turn three layers of the gated delta rule and one of attention."""

    classes = "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"
    counts = "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"
    widths = "head_dim", "linear_key_head_dim", "linear_value_head_dim"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        module = "transformers.models.qwen3_5.modeling_qwen3_5"
        if not torch.cuda.is_available():  # then kernels of other libraries, which transformers prefers, do not run
            for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
                setattr(load(module), name, own(module, name))

    def taken_back(self, cache: Any, tokens: int) -> Any:
        """Return a copy: states cannot be taken back."""
        return deepcopy(cache)


OF_LLAMA: dict[str, dict[str, int]] = {"llp": {"segment": 256}, "shifted": {"group": 256}, "window": {"width": 256}}
"""Mechanisms to put into transformers' Llama, with their options."""


def peer_model(name: str, **sizes: int) -> nn.Module:
    """Build a peer's model of the same width and depth."""
    if name == "perceiver-ar-pytorch":
        return LucidrainsPerceiverAR(**sizes)
    if name == THEIRS:
        return Qwen(**sizes)
    return Llama(**sizes, attention=name.partition("-")[2] or None)


class LucidrainsPerceiverAR(nn.Module):
    """perceiver-ar-pytorch's model of the same width and depth, with half of the sequence as its prefix."""

    def __init__(self, *, layers: int, dim: int, heads: int, vocab: int, longest: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = load("perceiver_ar_pytorch").PerceiverAR(
            num_tokens=vocab,
            dim=dim,
            depth=max(1, layers - 1),  # plus its first layer, which reads the prefix
            heads=heads,
            dim_head=dim // heads,
            max_seq_len=longest,
            cross_attn_seq_len=longest - max(1, longest // 2),
            dropout=0.0,
            cross_attn_dropout=0.0,
        )

    def loss(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return the cross-entropy of the tokens after the prefix."""
        loss: Tensor = self.model(tokens_BT, labels=labels_BT)
        return loss


def label_of(name: str, options: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the mechanism's name with its given options, or a peer's label."""
    if name in (OURS, THEIRS):
        return "Qwen3.5, imported" if name == OURS else "transformers' Qwen3.5"
    if name == BASE:
        return "full, by sdpa"
    if name == "perceiver-ar-pytorch":
        return f"{name}, half latents"
    if name.startswith("transformers"):
        ours = name.partition("-")[2]
        return "transformers' Llama" + (f", subquad_{ours}, {next(iter(OF_LLAMA[ours].values()))}" if ours else "")
    given = ", ".join(f"{key} {value}" for key, value in options.get(name, {}).items())
    latents = ", half latents" if name == STACK and "latents" not in options.get(name, {}) else ""
    return f"{name}{latents}" + (f", {given}" if given else "")
