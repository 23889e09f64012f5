"""An autoregressive model of images on any causal mechanism: each pixel from those before it, row by row.

Shape letters: B batch, T tokens (start and pixels), D model width, V levels (256), P parameters of a pixel's
distribution, R tokens that the input looks back to.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.layers.norm import build_norm
from subquad.models._initial import initialise
from subquad.models._layers import Block, build_mechanisms, run_blocks
from subquad.models._pixel_inputs import PixelInputs
from subquad.models._pixel_outputs import build_output, draw
from subquad.models._tokens import check_tokens
from subquad.models.decoder import IGNORED
from subquad.models.image_config import LEVELS, START, ImageModelConfig
from subquad.ops.backends import without_autocast
from subquad.parallel.group import refuse
from subquad.state import State


@without_autocast
def _project(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The head in the weights' precision: a mean in bfloat16 would be off by half a level."""
    return F.linear(h.to(weight.dtype), weight, bias)


class ImageModel(nn.Module):
    """`p(image) = prod_p p(x_p | x_0, .., x_(p-1))`, over all H x W x C bytes of it.

    Token 0 is a start, token p the pixel p - 1, so that every pixel is modelled, the first one too. The layers are
    those of `subquad.models.Decoder`; `config.output` says what a pixel is drawn from, and the loss and the sampler
    both take the same 256 probabilities. A sequence may be cut anywhere, as a decoder's.
    """

    def __init__(self, config: ImageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.config_hash = config.digest()
        self.gradient_checkpointing = False
        self.output = build_output(config)
        self.embedding = PixelInputs(config)
        self.layers = nn.ModuleList(Block(config, mixer) for mixer in build_mechanisms(config))
        self.norm = build_norm(config.norm, config.dim, config.norm_eps)
        tied = config.tie_embeddings and config.output == "categorical"
        self.head = None if tied else nn.Linear(config.dim, self.output.parameters, bias=False)
        self.bias = nn.Parameter(self.output.first_biases())
        self.branch_outputs = {out for block in self.blocks() for out in block.output_projections()}
        self.apply(self.initialise)

    def blocks(self) -> list[Block]:
        """The layers, from the inputs to the head."""
        return [block for block in self.layers if isinstance(block, Block)]

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """Give one module its first weights, as a decoder does."""
        initialise(module, self.config.init_std, self.branch_outputs, 2 * self.config.num_layers)
        if module is self:
            self.bias.copy_(self.output.first_biases())

    def forward(self, tokens_BT: Tensor, /, state: State | None = None) -> tuple[Tensor, State]:
        """Parameters `[B, T, P]` of the pixel after each of `tokens` `[B, T]`, which follow those that made `state`.

        Raises `TypeError` or `ValueError` for wrong shapes and dtypes, for more tokens than the image has, and for a
        state of another configuration or batch size.
        """
        h_BTD, state = self.hidden(tokens_BT, state)
        return self.parameters_of(h_BTD), state

    def parameters_of(self, h_BTD: Tensor, /) -> Tensor:
        """The head: from what `hidden` returned, or some of its tokens, `[.., D]`, to parameters `[.., P]`."""
        weight = self.embedding.tokens.weight[:LEVELS] if self.head is None else self.head.weight
        return _project(h_BTD, weight, self.bias)

    def hidden(self, tokens_BT: Tensor, /, state: State | None = None) -> tuple[Tensor, State]:
        """As `forward`, without the head: vectors `[B, T, D]` after the last norm."""
        entries: dict[str, Tensor | int | State] = {}
        h_BTD = self._run(tokens_BT, state, entries)
        return h_BTD, State(entries, self.config_hash)

    def inputs(self, pixels_BT: Tensor, /) -> Tensor:
        """The tokens that `pixels` `[B, T]` follow from: the start, then all pixels but the last.

        Raises `TypeError` or `ValueError` for what is no `[B, T]` of whole numbers in 0..255.
        """
        self._check_pixels(pixels_BT)
        return torch.cat((pixels_BT.new_full((pixels_BT.shape[0], 1), START), pixels_BT[:, :-1]), 1)

    def log_prob(self, pixels_BT: Tensor, /) -> Tensor:
        """`log p(x_p | x_0, .., x_(p-1))` of each of the first T pixels, `[B, T]`, in nats."""
        parameters_BTP = self.parameters_of(self._run(self.inputs(pixels_BT), None, None))
        return self.output.log_prob(parameters_BTP.flatten(0, 1), pixels_BT.flatten().long()).view(pixels_BT.shape)

    def loss(
        self, pixels_BT: Tensor, labels_BT: Tensor | None = None, /, *, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """`-log p` of the pixels in nats: the mean or the sum over those whose label is not -100 (None: over all)."""
        nats_BT = -self.log_prob(pixels_BT)
        if labels_BT is None:
            return nats_BT.mean() if reduction == "mean" else nats_BT.sum()
        if labels_BT.shape != pixels_BT.shape:
            raise ValueError(f"labels must have the pixels' shape {list(pixels_BT.shape)}, got {list(labels_BT.shape)}")
        counts_BT = labels_BT != IGNORED
        total = (nats_BT * counts_BT).sum()
        return total if reduction == "sum" else total / counts_BT.sum().clamp(min=1)

    def sample(self, parameters_BP: Tensor, random_B: Tensor, /, *, temperature: float = 1.0) -> Tensor:
        """Levels `[B]` drawn from parameters `[B, P]`, with one number in `[0, 1)` each from `random` `[B]`.

        They are drawn from `softmax(log p / temperature)`, where p are the 256 probabilities of the loss; temperature 0
        takes the likeliest. Raises `ValueError` for a negative temperature and for probabilities that are NaN.
        """
        if not temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        return draw(self.output.log_probs(parameters_BP), random_B, temperature)

    def num_parameters(self) -> int:
        """Numbers that training changes."""
        return sum(p.numel() for p in self.parameters())

    def _run(self, tokens_BT: Tensor, state: State | None, entries: dict[str, Tensor | int | State] | None) -> Tensor:
        """The vectors of `hidden`; the new state's entries go to `entries` (None: nowhere)."""
        start = self._check(tokens_BT, state)
        before = None
        if self.embedding.before:
            before = self.embedding.recent(tokens_BT[:, :0], None) if state is None else state.tensor("recent").long()
        x_BTD = self.embedding(tokens_BT, start, before)
        x_BTD = run_blocks(self, x_BTD, state, None, entries)
        if entries is not None:
            entries["seen"] = start + tokens_BT.shape[1]
            if before is not None:  # 257 values need no more than two bytes
                entries["recent"] = self.embedding.recent(tokens_BT, before).to(torch.int16)
        h_BTD: Tensor = self.norm(x_BTD)
        return h_BTD

    def _check(self, tokens_BT: Tensor, state: State | None) -> int:
        """The place of the first token."""
        check_tokens(tokens_BT)
        refuse("an image model")
        start = 0
        if state is not None:
            state.check(self.config_hash, "this image model", tokens_BT.shape[0])
            start = int(state.seen)
        if start + tokens_BT.shape[1] > self.config.tokens:
            raise ValueError(
                f"an image of {' x '.join(map(str, self.config.shape))} has {self.config.tokens} tokens, "
                f"got {start + tokens_BT.shape[1]}"
            )
        return start

    def _check_pixels(self, pixels_BT: Tensor) -> None:
        check_tokens(pixels_BT, "pixels")
        if not torch.compiler.is_compiling() and pixels_BT.numel():
            low, high = (int(x) for x in torch.aminmax(pixels_BT))
            if low < 0 or high >= LEVELS:
                raise ValueError(f"pixels must lie in 0..{LEVELS - 1}, got {low if low < 0 else high}")
