"""Matrices for pictures: weights of fresh and trained layers, receptive fields, position terms.

Shape letters: T tokens that read, S tokens that are read, D model width, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad.attention import Attention, build, mechanism
from subquad.models.blocks import Block
from subquad.models.config import DecoderConfig
from subquad.models.stacks import stack_of

SEED = 3
NOT_DRAWN = "only the layers of mechanisms can be drawn"


def short_options(name: str, tokens: int, parts: int) -> dict[str, int]:
    """Return options that show a mechanism within `tokens` tokens: local ranges of about 1/`parts`, few latents."""
    known = {f.name for f in fields(mechanism(name).Config)}
    unit = max(2, tokens // parts)
    short = {
        "segment": 2 * unit,
        "group": 2 * unit,
        "width": max(2, unit // 3) if "dilation" in known else unit,
        "stride": max(2, unit // 2),
        "block": max(1, unit // 3),
        "num_random": 1,
        "num_global": 1,
        "columns": 1,
        "num_latents": 8,
        "max_tokens": tokens,
        "horizon": tokens,
    }
    return {option: value for option, value in short.items() if option in known}


def fresh_layer(
    name: str, *, dim: int, num_heads: int, tokens: int, parts: int, options: Mapping[str, Any], seed: int = SEED
) -> Attention:
    """Build the mechanism with random weights; options not given come from `short_options`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(name, dim=dim, num_heads=num_heads, **{**short_options(name, tokens, parts), **options}).eval()


def drifting_input(tokens: int, dim: int) -> Tensor:
    """Return a random `[1, T, D]` whose neighbours are similar, as in text."""
    noise_BTD = torch.randn(1, tokens, dim, generator=torch.Generator().manual_seed(SEED))
    return 2 * (noise_BTD + noise_BTD.roll(1, 1) + noise_BTD.roll(2, 1))


@torch.no_grad()
def fresh_weights(layer: Attention, tokens: int) -> Tensor:
    """Return the weights `[H, T, S]` of a layer on `drifting_input`."""
    return layer.weights(drifting_input(tokens, layer.config.dim))[0]


def blocks(model: nn.Module) -> list[Block]:
    """Return the layers of a decoder or an encoder of mechanisms, once for each pass of a looped stack.

    Layers that were handed a memory (Luna's) get it as their own. Raises `ValueError` for other models.
    """
    config: Any = next(
        (m.config for m in model.modules() if isinstance(getattr(m, "config", None), DecoderConfig)), None
    )
    found = [module for module in model.modules() if isinstance(module, Block)]
    if config is None or stack_of(config) is not None or not found:
        what = type(model).__name__ if config is None else ", ".join(config.mechanisms)
        raise ValueError(f"{NOT_DRAWN}, and this model is a stack of its own: {what}")
    handed: Tensor | None = None
    for block in found:
        handed = block.attention.adopt(handed)
    return found * config.loops


class WeightMatrix(NamedTuple):
    """The weights of one attention in a model."""

    layer: int
    name: str
    """The name of the mechanism, or of the queries."""
    weights_HTS: Tensor
    causal: bool
    keys: Sequence[str] = ()
    """Names of the keys, of which the last T are those of the queries; empty: 0 to S - 1."""


@torch.no_grad()
def trained_weights(model: nn.Module, tokens_T: Sequence[int]) -> list[WeightMatrix]:
    """Return the weights of each layer, pass by pass, of a decoder or encoder of mechanisms that reads `tokens`.

    A class token counts as one more token before the others. Raises as `blocks` does.
    """
    layers, given = blocks(model), list[tuple[Any, ...]]()
    hooks = [block.register_forward_pre_hook(lambda _, args: given.append(args)) for block in dict.fromkeys(layers)]
    try:
        model(torch.tensor([list(tokens_T)]))
    finally:
        for hook in hooks:
            hook.remove()
    found: list[WeightMatrix] = []
    for block, (x_BTD, before) in zip(layers, given, strict=True):
        layer = block.attention
        layer.adopt(before.tensor("handed")[0] if before is not None and "handed" in before else None)
        w_BHTS = layer.weights(block.attention_input(x_BTD))
        found.append(WeightMatrix(len(found), layer.name, w_BHTS[0], layer.causal))
    return found


@torch.no_grad()
def allowed(layer: Attention, tokens: int) -> Tensor:
    """Return bool `[T, S]`: whether any head's weight is nonzero, for inputs so small that no weight underflows."""
    x_BTD = torch.randn(1, tokens, layer.config.dim, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return (layer.double().weights(1e-2 * x_BTD)[0] != 0).any(0)


def reach(layers: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield, for each layer's `allowed` matrix A_l, bool `[T, S]`: whether token t after it may depend on the input at
    s.

    `R_l = (A_l or I) R_{l-1}`, a product of booleans; the identity is the residual path.
    """
    reached_TS: Tensor | None = None
    for allowed_TS in layers:
        step_TS = allowed_TS | torch.eye(len(allowed_TS), dtype=torch.bool)
        reached_TS = step_TS if reached_TS is None else (step_TS.double() @ reached_TS.double()) > 0
        yield reached_TS


def first_layer(reached: Sequence[Tensor]) -> Tensor:
    """Return, for each pair, the first layer (counted from 1) after which t may depend on s; 0 if there is none."""
    stacked_LTS = torch.stack(list(reached))
    return torch.where(stacked_LTS.any(0), stacked_LTS.int().argmax(0) + 1, 0)


@torch.no_grad()
def position_terms(layer: Attention, tokens: int) -> Tensor:
    """Return the part of each logit that depends on positions only, `p2_t + p1_s`, `[H, T, S]` (ELiTA, Attention2).

    Raises `ValueError` for a mechanism without position terms.
    """
    p1_HS, p2_HT = layer.position_terms(tokens)
    return p2_HT[:, :, None] + p1_HS[:, None, :]
