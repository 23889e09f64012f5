"""Parts that all models share: token table, mechanisms with their options, the block around a mechanism, running
blocks.

Shape letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Container
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subquad import attention
from subquad.attention import Attention
from subquad.layers.feedforward import build_feedforward
from subquad.layers.norm import build_norm
from subquad.layers.positions import Embedding, Learned, Sinusoidal
from subquad.models.config import DecoderConfig
from subquad.models.stacks import STACKS
from subquad.ops.documents import Documents
from subquad.ops.padding import Lengths
from subquad.parallel import ContextGroup, active_group, context_parallel
from subquad.state import State

PROJECTIONS = ("head_dim", "qk_norm", "qkv_bias", "out_bias")
"""Settings of projections; a layer's mechanism must support those that differ from their defaults."""


class ResidualBlock(nn.Module):
    """A module whose branches write into the residual stream."""

    def output_projections(self) -> list[nn.Linear]:
        """Return the last linear layer of each branch."""
        raise NotImplementedError


class Block(ResidualBlock):
    """`x + attention(norm(x))`, then `x + feedforward(norm'(x))`, with dropout on each branch.

    With `norm_position="post"` it is `norm(x + attention(x))`, then `norm'(x + feedforward(x))`. With
    `parallel_residual` both branches read the same x: `x + attention(norm(x)) + feedforward(norm'(x))`. With
    `feedforward="none"` there is no second branch. The output of a branch is multiplied by `residual_scale`.
    """

    def __init__(self, config: DecoderConfig, mixer: Attention) -> None:
        super().__init__()
        self.parallel_residual, self.post_norm = config.parallel_residual, config.norm_position == "post"
        self.attention_norm = build_norm(config.norm, config.dim, config.norm_eps)
        self.attention = mixer
        self.feedforward: Any = None
        if config.feedforward != "none":
            self.feedforward_norm = build_norm(config.norm, config.dim, config.norm_eps)
            self.feedforward = build_feedforward(
                config.feedforward,
                config.dim,
                mult=config.ff_mult,
                bias=config.bias if config.ff_bias is None else config.ff_bias,
                hidden=config.ff_dim,
            )
        self.residual_scale = config.residual_scale
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | Lengths | None = None,
        doc_ids: Tensor | Documents | None = None,
    ) -> tuple[Tensor, State]:
        """Return the tokens after the block, `[B, T, D]`, and the mechanism's new state; arguments as `Attention`'s."""
        y_BTD, state = self.attention(self.attention_input(x_BTD), state, mask=mask, doc_ids=doc_ids)
        return self.residual_and_feedforward(x_BTD, y_BTD), state

    if TYPE_CHECKING:
        __call__ = forward

    def attention_input(self, x_BTD: Tensor) -> Tensor:
        """Return the input of the mechanism if the input of the block is `x`."""
        return x_BTD if self.post_norm else self.attention_norm(x_BTD)

    def residual_and_feedforward(self, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        """Return the output of the block from its input `x` and the output `y` of its mechanism."""
        h_BTD = self._add(x_BTD, y_BTD, self.attention_norm)
        if self.feedforward is None:
            return h_BTD
        read_BTD = x_BTD if self.parallel_residual else h_BTD
        y_BTD = self.feedforward(read_BTD if self.post_norm else self.feedforward_norm(read_BTD))
        return self._add(h_BTD, y_BTD, self.feedforward_norm)

    def _add(self, x_BTD: Tensor, y_BTD: Tensor, norm: nn.Module) -> Tensor:
        # Without dropout it isn't called: in a decoding step a call costs as much as an operation.
        y_BTD = self.dropout(y_BTD) if self.dropout.p else y_BTD
        x_BTD = torch.add(x_BTD, y_BTD, alpha=self.residual_scale)
        return norm(x_BTD) if self.post_norm else x_BTD

    def output_projections(self) -> list[nn.Linear]:
        """Return the linear layers that write into the residual stream: the mechanism's `out` and `*_out`; `down`."""
        named = [(name.rpartition(".")[2], module) for name, module in self.attention.named_modules()]
        out = [m for name, m in named if isinstance(m, nn.Linear) and (name == "out" or name.endswith("_out"))]
        return out if self.feedforward is None else [*out, self.feedforward.down]


def run_blocks(
    model: Any,
    x_BTD: Tensor,
    state: State | None,
    layout: Lengths | Documents | None,
    entries: dict[str, Tensor | int | State] | None = None,
    place: str = "",
    between: list[Tensor] | None = None,
) -> Tensor:
    """Run `x` through the blocks in `model.layers`; a value that a layer hands on (Luna's memory) goes to the next such
    layer.

    Read each block's state from `state` and, unless `entries` is None, write its new state to `entries`, under names
    that begin with `place`; add the input of each block to `between`. With `model.gradient_checkpointing`, training
    keeps only the input of each block.
    """
    again = model.gradient_checkpointing and model.training and torch.is_grad_enabled()
    group = active_group()
    rows: dict[str, Any] = {"doc_ids" if isinstance(layout, Documents) else "mask": layout}
    handed: Tensor | None = None
    for i, block in enumerate(model.layers):
        before = None if state is None else state.child(f"{place}layers.{i}")
        takes_handed = block.attention.takes_handed
        if takes_handed and handed is not None:
            own = {} if before is None else before.entries
            before = State({**own, "handed": handed}, block.attention.config_hash)
        if between is not None:
            between.append(x_BTD)
        if again:
            # The backward pass recomputes the block, maybe outside of the group's context or in another thread: enter
            # it again.
            layer = block if group is None else partial(_in_group, group, block)
            x_BTD, after = checkpoint(layer, x_BTD, before, use_reentrant=False, **rows)
        else:
            x_BTD, after = block(x_BTD, before, **rows)
        if takes_handed:
            handed, after = after.tensor("handed"), after.without("handed")
        if entries is not None:
            entries[f"{place}layers.{i}"] = after
    return x_BTD


def _in_group(group: ContextGroup, block: nn.Module, *inputs: Any, **rows: Any) -> Any:
    with context_parallel(group):
        return block(*inputs, **rows)


class PassBias(nn.Module):
    """`x + b`, by which the layers of a looped stack can tell the passes apart."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return `x + b`, `[B, T, D]`."""
        return x_BTD + self.bias


def build_mechanisms(
    config: DecoderConfig, *, causal: bool = True, kind: type[Attention] | None = None
) -> list[Attention]:
    """Return the mechanism of each layer, in its causal or its bidirectional form; `kind` is a class in place of its.

    A mechanism's `options` override the decoder's settings (`bias`, `attention_dropout`, `num_kv_heads`, `rope`,
    `rope_base`). Options of registered mechanisms that no layer uses are checked and otherwise ignored, so one file can
    hold the options of several. Raises `ValueError` for unknown names and for settings that no layer supports,
    `TypeError` for an option of the wrong type.
    """
    check_options(config)
    chosen = {name: attention.mechanism(name) for name in config.mechanisms}
    listed = ", ".join(sorted(chosen))
    rotated = any(cls.rotates or config.options.get(name, {}).get("rotary") for name, cls in chosen.items())
    if config.position == "rope" and not rotated:
        raise ValueError(
            f"position='rope' needs a layer that rotates queries and keys, and {listed} does not; "
            "choose auto, sinusoidal, learned or none (--model.position auto)"
        )
    if config.num_kv_heads is not None and not any("num_kv_heads" in cls.option_names() for cls in chosen.values()):
        raise ValueError(f"num_kv_heads={config.num_kv_heads} has no effect: {listed} has no such option; leave it out")
    for key in PROJECTIONS:
        value = getattr(config, key)
        unsaid = value == DecoderConfig.__dataclass_fields__[key].default
        if not (unsaid or any(key in cls.option_names() for cls in chosen.values())):
            raise ValueError(f"{key}={value} has no meaning for attention {listed!r}; leave it out")
    layers: list[Attention] = []
    for name in config.layer_mechanisms:
        options = mechanism_options(config, name, causal=causal)
        known = chosen[name].option_names()
        if "own_memory" in known and any("own_memory" in layer.option_names() for layer in layers):
            options = {"own_memory": False} | options  # all such layers use the first one's memory
        cls = kind or chosen[name]
        layers.append(cls.from_config(cls.config_of(dim=config.dim, **options)))
        layers[-1].set_layer_index(len(layers) - 1, config.num_layers)
    return layers


def mechanism_options(config: DecoderConfig, name: str, *, causal: bool = True) -> dict[str, Any]:
    """Return all options of the mechanism `name` except `dim`, from the decoder's settings and its own options."""
    cls = attention.mechanism(name)
    shared = {
        "num_kv_heads": config.num_kv_heads,
        "rope": config.position == "rope",
        "rope_base": config.rope_base,
        "rope_fraction": config.rope_fraction,
        "rope_scaling": config.rope_scaling,
        **{key: getattr(config, key) for key in PROJECTIONS},
    }
    if "qk_norm" in cls.option_names():
        shared["norm_eps"] = config.norm_eps if config.qk_norm else None
        shared["zero_centred"] = config.qk_norm and config.norm == "zero_centred_rms"
    options = {key: value for key, value in shared.items() if key in cls.option_names()}
    options |= {"num_heads": config.num_heads, "bias": config.bias, "dropout": config.attention_dropout}
    options |= {"causal": causal} | config.options.get(name, {})
    if options["causal"] != causal:
        form = "causal" if causal else "bidirectional"
        raise ValueError(f"this model is {form}, but the options of attention {name!r} say causal={options['causal']}")
    return options


def check_options(config: DecoderConfig) -> None:
    """Raise `ValueError` or `TypeError` for options that their mechanism or stack does not take."""
    for name, options in config.options.items():
        if name in STACKS:
            STACKS[name].options.from_dict(options, where=f"options.{name}")
            continue
        cls = attention.mechanism(name)
        cls.check_names(options, given=["dim"])
        if name not in config.mechanisms:
            try:
                cls.Config.from_dict({"dim": config.dim, "num_heads": config.num_heads, **options})
            except (TypeError, ValueError) as error:
                raise type(error)(f"options of attention {name!r}, which no layer uses: {error}") from error


def token_embedding(config: DecoderConfig) -> Embedding:
    """Return the token table, with the added positions (sines or a learned table) that `config.position` asks for."""
    return Embedding(
        config.vocab_size,
        config.dim,
        position=added_positions(config, config.dim, config.max_positions),
        dropout=config.dropout,
        scale=config.embedding_scale,
    )


def added_positions(config: DecoderConfig, dim: int, rows: int) -> Sinusoidal | Learned | None:
    """Return the module that adds positions to vectors of `dim` channels: sines, a table of `rows`, or None."""
    if config.position == "sinusoidal":
        scale = config.init_std * math.sqrt(2) if config.position_scale is None else config.position_scale
        return Sinusoidal(dim, scale=scale)
    return Learned(dim, rows) if config.position == "learned" else None


def last_norm(config: DecoderConfig) -> nn.LayerNorm | nn.RMSNorm | nn.Identity:
    """Return the norm after all blocks; none for post-norm blocks, which end with a norm."""
    post = config.norm_position == "post"
    return nn.Identity() if post else build_norm(config.norm, config.dim, config.norm_eps)


def check_tokens_or_vectors(tokens_BT: Tensor, dim: int) -> None:
    """Raise as `check_tokens`, but accept floating-point vectors `[B, T, dim]`, which stand for rows of the table."""
    if tokens_BT.ndim != 3 or not tokens_BT.is_floating_point():
        check_tokens(tokens_BT)
    elif tokens_BT.shape[2] != dim:
        raise ValueError(f"vectors in place of tokens must have shape [B, T, {dim}], got {list(tokens_BT.shape)}")


def check_tokens(tokens_BT: Tensor, name: str = "tokens") -> None:
    """Raise `ValueError` unless the shape is `[B, T]`, `TypeError` unless the dtype is int64 or int32."""
    if tokens_BT.ndim != 2:
        raise ValueError(f"{name} must have shape [B, T], got {list(tokens_BT.shape)}")
    if tokens_BT.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {tokens_BT.dtype}")


@torch.no_grad()
def initialise(module: nn.Module, std: float, branch_outputs: Container[nn.Module], branches: int) -> None:
    """Set one module's initial weights: normal(std) in linear layers and tables, ones in norms, zero biases.

    Linear layers in `branch_outputs` get std / sqrt(branches), so that the size of the residual stream, into which all
    branches write, does not grow with the depth. Modules of other kinds are left alone.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        depth = branches if module in branch_outputs else 1
        nn.init.normal_(module.weight, std=std / math.sqrt(depth))
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
        module.reset_parameters()
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def branch_outputs(model: nn.Module) -> set[nn.Module]:
    """Return the linear layers by which the model's blocks write into the residual stream."""
    blocks = (module for module in model.modules() if isinstance(module, ResidualBlock))
    return {out for block in blocks for out in block.output_projections()}
