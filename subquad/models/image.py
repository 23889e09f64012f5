"""Autoregressive image model on any causal mechanism: each pixel from those before it, row by row.

Shape letters: B batch, T tokens (start and pixels), D model width, V levels (256), P parameters of a pixel's
distribution, R tokens that the input looks back to, K nearby places, H rows, W columns, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from subquad.config import check_at_least
from subquad.layers.criterion import IGNORED
from subquad.layers.head import new_head
from subquad.layers.positions import positions
from subquad.models.blocks import (
    Block,
    added_positions,
    branch_outputs,
    build_mechanisms,
    check_tokens,
    initialise,
    last_norm,
    run_blocks,
)
from subquad.models.config import DecoderConfig, check_choices
from subquad.models.pixels import LEVELS, Output, build_output, draw
from subquad.models.stacks import STACKS
from subquad.ops.backends import without_autocast
from subquad.parallel.group import refuse
from subquad.state import State, check_is_state

START = LEVELS
"""Token before the first pixel."""


@dataclass(frozen=True, kw_only=True)
class ImageModelConfig(DecoderConfig):
    """A decoder over the pixels of an image, row by row, with the channels of a pixel one after another.

    The decoder's fields keep their meaning, except that the vocabulary is 256 levels and a start token, a table of
    positions has a row for each pixel (`max_positions` has no effect), `loops`, `lookup`, `head_bias` (the head always
    has a bias) and `embedding_scale` are refused, and neither a mixture nor `position_channels` tie the head.
    """

    vocab_size: int = LEVELS + 1
    """256 levels and the start token; other values are refused."""
    height: int = 28
    """Rows H."""
    width: int = 28
    """Columns W."""
    channels: int = 1
    """Channels C: 1 for grey, 3 for red, green and blue."""
    output: Output = "categorical"
    """Distribution of a pixel: 256 free probabilities, or a mixture of logistic distributions in 256 bins."""
    mixtures: int = 10
    """Logistic distributions in the mixture (output=logistic)."""
    axes: bool = False
    """Add learned vectors for the row, column and channel of the predicted pixel."""
    near: int = 0
    """Also feed the known pixels within this many rows and columns to the input, by a masked convolution as in
    PixelCNN's first layer (0: only the previous pixel)."""
    position_channels: int = 0
    """Channels of positions (sinusoidal or learned) beside those of the token's vector, together dim: half and half in
    Katharopoulos et al. 2020 (0: both have dim channels and are added)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(height=1, width=1, channels=1, mixtures=1)
        if self.vocab_size != LEVELS + 1:
            raise ValueError(
                f"vocab_size of an image model must be {LEVELS + 1} (256 levels and a start), got {self.vocab_size}"
            )
        check_choices(self, "output")
        if not 0 <= self.near < max(self.height, self.width):
            raise ValueError(
                f"near must be at least 0 and below the image's sides, {self.height} x {self.width}, got {self.near}"
            )
        if not 0 <= self.position_channels < self.dim:
            raise ValueError(
                f"position_channels must be at least 0 and below dim={self.dim}, got {self.position_channels}"
            )
        if self.position not in ("sinusoidal", "learned"):
            self.check_default(f"position={self.position!r}", "position_channels")
        self.check_default("an image model", "loops", "lookup", "embedding_scale", "logit_divisor", "head_bias")
        for name in self.mechanisms:
            if name in STACKS:
                raise ValueError(f"attention {name!r} is a whole stack; an image model needs mechanisms")

    @property
    def tokens(self) -> int:
        """Tokens in an image: H x W x C."""
        return self.height * self.width * self.channels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns, channels."""
        return self.height, self.width, self.channels

    @classmethod
    def from_decoder(cls, config: DecoderConfig, **own: Any) -> Self:
        """Return a configuration with the settings of `config` and the vocabulary of pixels."""
        return super().from_decoder(config, **{"vocab_size": LEVELS + 1} | own)


class PixelInputs(nn.Module):
    """`dropout(E[token] + position + convolution of nearby pixels)`: the inputs that predict pixels.

    With `position_channels`, token and position are concatenated instead: `[E[token], position]`. Token p is the pixel
    before pixel p (the start token for p = 0) but has pixel p's position and neighbourhood.
    """

    def __init__(self, config: ImageModelConfig) -> None:
        super().__init__()
        self.shape = config.shape
        self.position_channels = config.position_channels
        self.tokens = nn.Embedding(config.vocab_size, config.dim - config.position_channels)
        self.position = added_positions(config, config.position_channels or config.dim, config.tokens)
        self.axes = nn.ModuleList(nn.Embedding(size, config.dim) for size in config.shape if config.axes and size > 1)
        self.near: nn.Linear | None = None
        self.places: list[tuple[int, int, int]] = []
        if config.near:
            self.places = _places(config.near, config.channels)
            self.near = nn.Linear(len(self.places), config.dim, bias=False)
        self.before = max([0, *(self._distance(*place) + config.channels - 1 for place in self.places)])
        """Number of earlier tokens that the neighbourhood needs."""
        self._near: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BT: Tensor, start: int, recent_BR: Tensor | None) -> Tensor:
        """Return vectors `[B, T, D]` of the tokens from `start` on; `recent` holds the `before` tokens before them."""
        x_BTD = self.tokens(tokens_BT)
        if self.position is not None and self.position_channels:
            empty_BTP = x_BTD.new_zeros(*x_BTD.shape[:2], self.position_channels)
            x_BTD = torch.cat((x_BTD, self.position(empty_BTP, start)), -1)
        elif self.position is not None:
            x_BTD = self.position(x_BTD, start)
        T = tokens_BT.shape[1]
        p_T = positions(start, T, tokens_BT.device)[0]
        axes = iter(self.axes)
        for size, place_T in zip(self.shape, self._split(p_T), strict=True):
            if self.axes and size > 1:
                x_BTD = x_BTD + next(axes)(place_T)
        if self.near is not None:
            assert recent_BR is not None
            x_BTD = x_BTD + self.near(self._values(torch.cat((recent_BR, tokens_BT), 1), start).to(x_BTD.dtype))
        return self.dropout(x_BTD)

    def recent(self, tokens_BT: Tensor, recent_BR: Tensor | None) -> Tensor:
        """Return the last `before` tokens, with start tokens where the image has none."""
        if recent_BR is None:
            recent_BR = tokens_BT.new_full((tokens_BT.shape[0], self.before), LEVELS)
        return torch.cat((recent_BR, tokens_BT), 1)[:, tokens_BT.shape[1] :]

    def _split(self, p_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the row, column and channel of each pixel in `p`."""
        _, width, channels = self.shape
        pixel_T = p_T // channels
        return pixel_T // width, pixel_T % width, p_T % channels

    def _distance(self, row: int, column: int, channel: int) -> int:
        """Count tokens from `channel` of the pixel at offset (`row`, `column`; negative: up, left) to channel 0."""
        _, width, channels = self.shape
        return -((row * width + column) * channels + channel)

    def _values(self, tokens_BS: Tensor, start: int) -> Tensor:
        """Return (level + 1) / 256 of each place near pixel p, `[B, T, K]`; 0 if outside the image or unknown."""
        q_TK, known_TK = (
            table[start : start + tokens_BS.shape[1] - self.before] for table in self._tables(tokens_BS.device)
        )
        # Pixel q is token q + 1, and tokens[0] is token start - before.
        index_TK = torch.where(known_TK, q_TK + 1 - start + self.before, 0)
        return (tokens_BS[:, index_TK] + 1) / LEVELS * known_TK

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the pixels near each pixel, `[H W C, K]`, and whether each is known by then."""
        if device not in self._near:
            height, width, channels = self.shape
            p_T = torch.arange(height * width * channels, device=device)
            place_K3 = torch.tensor(self.places, device=device)
            row_T, column_T, _ = self._split(p_T)
            row_TK = row_T[:, None] + place_K3[:, 0]
            column_TK = column_T[:, None] + place_K3[:, 1]
            q_TK = (row_TK * width + column_TK) * channels + place_K3[:, 2]
            known_TK = (row_TK >= 0) & (column_TK >= 0) & (column_TK < width) & (q_TK < p_T[:, None])
            self._near[device] = q_TK, known_TK
        return self._near[device]


def _places(near: int, channels: int) -> list[tuple[int, int, int]]:
    """Return the (row offset, column offset, channel) of each place near a pixel that can be known before it."""
    above = [(row, column) for row in range(-near, 0) for column in range(-near, near + 1)]
    beside = [(0, column) for column in range(-near, 0)]
    every = [(row, column, channel) for row, column in above + beside for channel in range(channels)]
    return every + [(0, 0, channel) for channel in range(channels - 1)]


@without_autocast
def _called(h: Tensor, head: nn.Module) -> Tensor:
    """Call the head in the weights' precision: a mean in bfloat16 would be off by half a level."""
    parameters: Tensor = head(h)
    return parameters


class ImageModel(nn.Module):
    """`p(image) = prod_p p(x_p | x_0, .., x_(p-1))` over all H x W x C bytes of an image.

    Token 0 is the start token and token p is pixel p - 1, so the first pixel is modelled too. The layers are those of
    `subquad.models.Decoder`; `config.output` sets the distribution of a pixel, whose 256 probabilities both the loss
    and the sampler use. A sequence may be cut anywhere, as with a decoder.
    """

    def __init__(self, config: ImageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.config_hash = config.digest()
        self.gradient_checkpointing = False
        self.output = build_output(config.output, config.mixtures)
        self.embedding = PixelInputs(config)
        self.layers = nn.ModuleList(Block(config, mixer) for mixer in build_mechanisms(config))
        self.norm = last_norm(config)
        self.tied = config.tie_embeddings and config.output == "categorical" and not config.position_channels
        # A tied head has a row for the start token too, whose logit is left out.
        size, table = (config.vocab_size, self.embedding.tokens) if self.tied else (self.output.parameters, None)
        self.head = new_head(config.dim, size, bias=False, table=table)
        self.bias = nn.Parameter(self.output.first_biases())
        self.branch_outputs = branch_outputs(self)
        self.apply(self.initialise)

    def blocks(self) -> list[Block]:
        """Return the layers, from the inputs to the head."""
        return [block for block in self.layers if isinstance(block, Block)]

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """Set one module's initial weights, as in a decoder."""
        if module is not self.head or not self.tied:  # tied: drawn with the table
            initialise(module, self.config.init_std, self.branch_outputs, self.config.branches)
        if module is self:
            self.bias.copy_(self.output.first_biases())

    def forward(self, tokens_BT: Tensor, /, state: State | None = None) -> tuple[Tensor, State]:
        """Return the parameters `[B, T, P]` of the pixel after each of `tokens` `[B, T]`, which continue `state`, and
        the state.

        Raises `TypeError` or `ValueError` for wrong shapes and dtypes, for more tokens than the image has, and for a
        state of another configuration or batch size.
        """
        h_BTD, state = self.hidden(tokens_BT, state)
        return self.parameters_of(h_BTD), state

    def parameters_of(self, h_BTD: Tensor, /) -> Tensor:
        """Return the parameters `[.., P]` of vectors `[.., D]` from `hidden`."""
        return _called(h_BTD.to(self.bias.dtype), self.head)[..., : self.output.parameters] + self.bias

    def hidden(self, tokens_BT: Tensor, /, state: State | None = None) -> tuple[Tensor, State]:
        """Return the vectors `[B, T, D]` after the last norm, and the new state: `forward` without the head."""
        entries: dict[str, Tensor | int | State] = {}
        h_BTD = self._run(tokens_BT, state, entries)
        return h_BTD, State(entries, self.config_hash)

    def inputs(self, pixels_BT: Tensor, /) -> Tensor:
        """Return the tokens that predict `pixels` `[B, T]`: the start token, then all pixels but the last.

        Raises `TypeError` or `ValueError` unless `pixels` are integers `[B, T]` in 0..255.
        """
        check_tokens(pixels_BT, "pixels")
        if not torch.compiler.is_compiling() and pixels_BT.numel():
            low, high = (int(x) for x in torch.aminmax(pixels_BT))
            if low < 0 or high >= LEVELS:
                raise ValueError(f"pixels must lie in 0..{LEVELS - 1}, got {low if low < 0 else high}")
        return torch.cat((pixels_BT.new_full((pixels_BT.shape[0], 1), START), pixels_BT[:, :-1]), 1)

    def log_prob(self, pixels_BT: Tensor, /) -> Tensor:
        """Return `log p(x_p | x_0, .., x_(p-1))` of each of the first T pixels, `[B, T]`, in nats."""
        parameters_BTP = self.parameters_of(self._run(self.inputs(pixels_BT), None, None))
        return self.output.log_prob(parameters_BTP.flatten(0, 1), pixels_BT.flatten().long()).view(pixels_BT.shape)

    def loss(
        self, pixels_BT: Tensor, labels_BT: Tensor | None = None, /, *, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Return `-log p` of the pixels in nats: the mean or sum over those whose label is not -100 (None: all)."""
        nats_BT = -self.log_prob(pixels_BT)
        if labels_BT is None:
            return nats_BT.mean() if reduction == "mean" else nats_BT.sum()
        if labels_BT.shape != pixels_BT.shape:
            raise ValueError(f"labels must have the pixels' shape {list(pixels_BT.shape)}, got {list(labels_BT.shape)}")
        counts_BT = labels_BT != IGNORED
        total = (nats_BT * counts_BT).sum()
        return total if reduction == "sum" else total / counts_BT.sum().clamp(min=1)

    def sample(self, parameters_BP: Tensor, random_B: Tensor, /, *, temperature: float = 1.0) -> Tensor:
        """Draw levels `[B]` from parameters `[B, P]` by inverting the distribution at `random` `[B]`, numbers in `[0,
        1)`.

        The distribution is `softmax(log p / temperature)`, where p are the 256 probabilities of the loss; temperature 0
        takes the likeliest level. Raises `ValueError` for a negative temperature and for probabilities that are NaN.
        """
        check_at_least(0, temperature=temperature)
        return draw(self.output.log_probs(parameters_BP), random_B, temperature)

    def num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel() for p in self.parameters())

    def _run(self, tokens_BT: Tensor, state: State | None, entries: dict[str, Tensor | int | State] | None) -> Tensor:
        """Return the vectors of `hidden`; unless `entries` is None, write the new state's entries to it."""
        start = self._check(tokens_BT, state)
        before = None
        if self.embedding.before:
            before = self.embedding.recent(tokens_BT[:, :0], None) if state is None else state.tensor("recent").long()
        x_BTD = self.embedding(tokens_BT, start, before)
        x_BTD = run_blocks(self, x_BTD, state, None, entries)
        if entries is not None:
            entries["seen"] = start + tokens_BT.shape[1]
            if before is not None:  # 257 values fit in two bytes
                entries["recent"] = self.embedding.recent(tokens_BT, before).to(torch.int16)
        h_BTD: Tensor = self.norm(x_BTD)
        return h_BTD

    def _check(self, tokens_BT: Tensor, state: State | None) -> int:
        """Raise for wrong tokens or a wrong state; return the position of the first token."""
        check_tokens(tokens_BT)
        refuse("an image model")
        start = 0
        if state is not None:
            check_is_state(state)
            state.check(self.config_hash, "this image model", tokens_BT.shape[0])
            start = int(state.seen)
        if start + tokens_BT.shape[1] > self.config.tokens:
            raise ValueError(
                f"an image of {' x '.join(map(str, self.config.shape))} has {self.config.tokens} tokens, "
                f"got {start + tokens_BT.shape[1]}"
            )
        return start
