"""What a sequence costs in Perceiver AR. Letters: T tokens, M latents, h history tokens, p projected rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from subquad.attention import Cost
from subquad.attention._activations import activation_bytes
from subquad.attention.blocked import BlockedAttention
from subquad.models.perceiver_window import Window
from subquad.ops._torch.tiles import static_groups
from subquad.ops.patterns import Blocks, Causal, Pattern

if TYPE_CHECKING:
    from subquad.models.perceiver_ar import PerceiverAR


class LayerCost(NamedTuple):
    """One layer's numbers for one sequence, one head."""

    keys: int
    """Keys of the history."""
    rows: int
    """Rows of the history that the papers' layer mixes, whether anything reads them or not."""
    mixer: BlockedAttention | None
    """What computes them; None where nothing does."""


def cost(model: PerceiverAR, tokens: int) -> Cost:
    """`PerceiverAR.cost`."""
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, got {tokens}")
    config, M = model.config, min(tokens, model.latents)
    layers = _layers(model, tokens)
    pattern = model.history_pattern
    pairs = sum(_allowed_pairs(pattern, layer.rows) for layer in layers)
    computed = sum(_computed(Causal(), layer.keys, M, layer.keys + M) for layer in layers)
    computed += sum(_computed(pattern, 0, layer.rows, layer.rows) for layer in layers if layer.mixer is not None)
    mixing_flops = 4 * config.dim * computed
    projection_flops = _projection_flops(model, tokens, layers)
    return Cost(
        tokens=tokens,
        score_entries=config.num_heads * (sum(M * (layer.keys + M) for layer in layers) + pairs),
        unmasked_entries=config.num_heads * (sum(M * layer.keys + M * (M + 1) // 2 for layer in layers) + pairs),
        mixing_flops=mixing_flops,
        projection_flops=projection_flops,
        backward_flops=mixing_flops * 5 // 2 + 2 * projection_flops,
        parameters=model.num_parameters(),
        activation_bytes=_kept_in_training(model, tokens),
        state_bytes=state_bytes(model, tokens),
    )


def state_bytes(model: PerceiverAR, tokens: int) -> int:
    """`PerceiverAR.state_bytes`."""
    numbers = 8 * (tokens if model.limit is None else min(tokens, model.limit))
    M = min(tokens, model.latents)
    if model.options.decode == "exact" and model.latents == M:
        return numbers
    mixer = model.block(0)[1]
    return numbers + 2 * 4 * mixer.kv_dim * sum(layer.keys + M for layer in _layers(model, tokens))


def _layers(model: PerceiverAR, tokens: int) -> list[LayerCost]:
    options = model.options
    start = tokens - min(tokens, model.latents)
    layers = []
    for i in range(len(model.layers)):
        keys = model.history_keys(i, start)
        assert isinstance(keys, int)
        late = i == 0 and options.first_layer == "full"
        rows = 0 if options.history == "cross" or late else keys
        layers.append(LayerCost(keys, rows, model.history_mixer(i)))
    return layers


def _allowed_pairs(pattern: Pattern, rows: int) -> int:
    """Return weights of the history, all unmasked."""
    if isinstance(pattern, Blocks):
        whole, part = divmod(rows, pattern.size)
        return whole * pattern.size**2 + part**2
    return rows * rows


def _computed(pattern: Pattern, q_start: int, queries: int, keys: int) -> int:
    """Return weights in the tiles of the engine, the queries being the last of the keys."""
    return sum(g.rows * g.keys * g.count for g in static_groups(pattern, q_start, queries, 0, keys)) if queries else 0


def _projection_flops(model: PerceiverAR, tokens: int, layers: list[LayerCost]) -> int:
    """Return the matrices of the layers and of the head, and the projection over the sequence."""
    M = min(tokens, model.latents)
    total = M * sum(_weights(part) for part in (model.head_weight, model.lookup))
    for i, layer in enumerate(layers):
        block, mixer = model.block(i)
        branch = _weights(block.feedforward)
        total += M * (branch + _weights(mixer)) + layer.keys * (_weights(mixer.key) + _weights(mixer.value))
        if layer.mixer is not None:
            total += layer.rows * (branch + _weights(layer.mixer))
    read = model.capped(tokens - M)
    if read and model.compress is not None:
        total += model.options.projected * read * model.config.dim
    return 2 * total


def _weights(part: nn.Module | Tensor | None) -> int:
    """Multiply-adds for one row."""
    if part is None or isinstance(part, Tensor):
        return 0 if part is None else part.numel()
    return sum(m.in_features * m.out_features for m in part.modules() if isinstance(m, nn.Linear))


class _Loss(nn.Module):
    """The loss of training with all latents, as a module of its own."""

    def __init__(self, model: PerceiverAR) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        window = Window.of(tokens_BT, None, self.model.limit)
        h_BMD = self.model.through(window, window.parts(self.model.latents, self.model.options.history_tokens), None)
        return self.model.loss_of_hidden(h_BMD, tokens_BT)


def _kept_in_training(model: PerceiverAR, tokens: int) -> int:
    """Return bytes that autograd keeps of the loss of one sequence."""
    return activation_bytes(_Loss(model), lambda: torch.zeros(1, tokens, dtype=torch.int64))
