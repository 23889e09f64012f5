"""The decoder: a causal language model whose layers each mix tokens by a mechanism of `subquad.attention`.

Shape letters: B batch, T tokens, D model width, V vocabulary, N = B * T.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention import Attention, Cost
from subquad.attention.base import check_fresh
from subquad.attention.conversions import after_all_ranks
from subquad.attention.sharing import check_dropout, check_whole
from subquad.layers.criterion import IGNORED, CrossEntropy, Reduction
from subquad.layers.head import Lookup, is_tied, logits_of, new_head
from subquad.models.blocks import (
    Block,
    PassBias,
    branch_outputs,
    build_mechanisms,
    check_tokens_or_vectors,
    initialise,
    last_norm,
    run_blocks,
    token_embedding,
)
from subquad.models.config import DecoderConfig
from subquad.models.matrices import WeightMatrix, trained_weights
from subquad.ops.caches import advance
from subquad.ops.counting import cost_of, one_sequence, state_bytes
from subquad.ops.documents import Documents, before_others, lay_out, real_tokens
from subquad.ops.padding import Lengths, check_mask, compact, compaction, real_slots, scatter
from subquad.parallel import ContextGroup, Sent, active_group
from subquad.state import State, check_is_state


class Decoder(nn.Module):
    """`logits = norm(h) / logit_divisor @ E^T + b`, with h the embeddings `E[tokens]` after `num_layers` blocks.

    The head is a module, tied (its weight is then the embedding's) or not; a decoder built with `head=False` has none,
    and returns only vectors until `with_head`. After post-norm blocks, which end with a norm, there is no other; the
    bias b is used with `head_bias`. With `loops` P > 1 the blocks run P times, `h <- blocks(h + b_p)`, with a learned
    bias and a state for each pass; the last norm is applied only before the head. With `lookup` the logits go through
    `subquad.layers.head.Lookup`. Both come from ELiTA (A. C. O. Sharma, 2023, Other Methods, which says neither where
    the bias is added nor which loss is used) and work with every mechanism.

    A sequence may be cut anywhere: `decoder(tokens)` gives the logits of `decoder(tokens[:, :n])` followed by those of
    `decoder(tokens[:, n:], state)`. With `gradient_checkpointing = True`, training keeps only the input of each block
    and recomputes the rest in the backward pass.

    Within `subquad.parallel.context_parallel(group)` several processes share each sequence: `tokens`, logits, vectors
    and losses are this rank's part; a state or a mask is refused. The state returned is that of the whole sequence, on
    every rank, without gradients.
    """

    head: nn.Module | None
    lookup: Lookup | None

    def __init__(self, config: DecoderConfig, *, head: bool = True) -> None:
        super().__init__()
        self.config = config
        self.config_hash = config.digest()
        self.gradient_checkpointing = False
        self.embedding = token_embedding(config)
        self.layers = nn.ModuleList(self.new_layers(config))
        self.pass_biases = nn.ModuleList(PassBias(config.dim) for _ in range(config.loops if config.loops > 1 else 0))
        self.norm = last_norm(config)
        self.register_module("head", None)
        self.register_module("lookup", None)
        if head:
            table = self.embedding.tokens if config.tie_embeddings else None
            self.head = new_head(config.dim, config.vocab_size, bias=config.head_bias, table=table)
            if config.lookup is not None:
                self.lookup = Lookup(config.vocab_size, config.lookup, residual=config.lookup_residual)
        self.criterion = CrossEntropy()
        self.branch_outputs = branch_outputs(self)
        self.apply(self.initialise)

    def new_layers(self, config: DecoderConfig) -> list[Block]:
        """Return the blocks of a new model."""
        return [Block(config, mixer) for mixer in build_mechanisms(config)]

    def with_head(self, head: nn.Module | None, lookup: Lookup | None) -> Self:
        """Return the same decoder, its modules shared and not copied, with another head and lookup (None: without)."""
        other = copy.copy(self)
        other._modules = {**self._modules, "head": head, "lookup": lookup}
        for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate's, bound to this decoder and its head
            vars(other).pop(name, None)
        return other

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """Convert as `nn.Module` does, and keep a tied head tied, which `to_empty` would give weights of its own."""
        tied = is_tied(self.head, self.embedding.tokens)
        super()._apply(*args, **kwargs)
        if tied and self.head is not None:
            self.head.weight = self.embedding.tokens.weight
        return self

    def blocks(self) -> list[Block]:
        """Return the layers, from the embeddings to the head."""
        return [block for block in self.layers if isinstance(block, Block)]

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """Set one module's initial weights: normal(init_std) in linear layers and tables, ones in norms, zero biases.

        The projections that write into the residual stream (`Block.output_projections`) are
        `sqrt(config.branches)` smaller, so that its size does not grow with the depth.
        """
        tied = module is self.head and self.config.tie_embeddings  # its weights are drawn with the embedding's
        if not tied:
            initialise(module, self.config.init_std, self.branch_outputs, self.config.branches)
        if isinstance(module, PassBias):
            nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens_BT: Tensor,
        /,
        state: State | None = None,
        mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        *,
        keep_state: bool = True,
        keep_between: bool = False,
        **named: Any,
    ) -> Any:
        """Return the logits `[B, T, V]` of the token after each of `tokens` `[B, T]`, which continue `state`, and the
        new state. Floating-point vectors `[B, T, D]` in place of tokens stand for rows of the embedding.

        A decoder without a head returns three values: a list of vectors, as `passes` does; the state, or None with
        `keep_state=False`; and with `keep_between` a list of each block's input. `named` are arguments of `hidden`.

        `mask` is a bool `[B, T]`, True for a real token. Padding may stand anywhere: positions and mechanisms count
        real tokens only, and logits at padding are zero (with `head_bias`, the bias). `doc_ids`, integers `[B, T]` (-1:
        padding), pack documents: a new one begins where the id changes, each is read as if alone, with positions from
        0, a previous state is refused, and the state returned is that of each row's last document. Raises `TypeError`
        or `ValueError` for wrong shapes and dtypes, a position beyond a learned table, and a state of another
        configuration or batch size.
        """
        if self.head is not None:
            h_BTD, state = self.hidden(tokens_BT, state, mask, doc_ids, **named)
            return self.logits(h_BTD), state
        between: list[Tensor] | None = [] if keep_between else None
        if not keep_state:
            return self.passes(tokens_BT, mask, doc_ids, between=between, **named), None, between
        h_BTD, state = self.hidden(tokens_BT, state, mask, doc_ids, between=between, **named)
        return [h_BTD], state, between

    if TYPE_CHECKING:  # the type with a head; without one the caller annotates it

        def __call__(
            self,
            tokens_BT: Tensor,
            /,
            state: State | None = None,
            mask: Tensor | None = None,
            doc_ids: Tensor | None = None,
            **named: Any,
        ) -> tuple[Tensor, State]: ...

    def hidden(
        self,
        tokens_BT: Tensor,
        /,
        state: State | None = None,
        mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        *,
        between: list[Tensor] | None = None,
    ) -> tuple[Tensor, State]:
        """Return the vectors `[B, T, D]` after the last norm, and the new state: `forward` without the head.

        The input of each block is added to `between`.
        """
        layers: dict[str, Tensor | int | State] = {}
        passes, seen = self._run(tokens_BT, state, mask, doc_ids, layers, between)
        group = active_group()
        if group is not None:
            return passes[-1], State(self._whole_states(layers, tokens_BT, group), self.config_hash)
        return passes[-1], State({"seen": seen, **layers}, self.config_hash)

    def logits(self, h_BTD: Tensor, /) -> Tensor:
        """Return the logits `[.., V]` of vectors `[.., D]` from `hidden`."""
        if self.head is None:
            raise ValueError("this decoder was built without a head: give it one (with_head), or call `hidden`")
        return logits_of(h_BTD, self.head, self.lookup)

    def read(self, tokens_BT: Tensor, /, state: State | None = None) -> State:
        """Return the state after more tokens, without outputs."""
        return self.hidden(tokens_BT, state)[1]

    def vectors(self, tokens_BT: Tensor, /, mask: Tensor | None = None) -> Tensor:
        """Return the vectors of `hidden` for whole sequences, without a state, which would cost training memory."""
        return self.passes(tokens_BT, mask)[-1]

    def passes(
        self,
        tokens_BT: Tensor,
        /,
        mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        *,
        between: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return the vectors that the loss is computed from: the last pass's or, in training with `loop_loss="all"`,
        each pass's. The input of each block is added to `between`."""
        return self._run(tokens_BT, None, mask, doc_ids, None, between)[0]

    def loss(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        /,
        mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the cross-entropy in nats of `labels` `[B, T]`, where label t is the token to predict at t.

        The label -100 and padding do not count, nor, with `doc_ids`, does the last token of a document before another
        one. `reduction` is `mean` (over the labels that count), `sum`, or `none` for `[B, T]` with zeros where nothing
        counts. In training with `loop_loss="all"` it is the mean of the losses after each pass. Logits are computed in
        chunks, so `[B, T, V]` is never held.
        """
        if labels_BT.shape != tokens_BT.shape:
            raise ValueError(f"labels must have the tokens' shape {list(tokens_BT.shape)}, got {list(labels_BT.shape)}")
        passes = self.passes(tokens_BT, mask, doc_ids)
        if doc_ids is not None:
            mask = real_tokens(doc_ids, mask) & ~before_others(doc_ids, mask)
        if mask is not None:
            labels_BT = labels_BT.masked_fill(~mask, IGNORED)
        return self.loss_of_passes(passes, self.aligned_labels(labels_BT, mask), reduction=reduction)

    def loss_of_passes(self, passes: list[Tensor], labels_BT: Tensor, /, *, reduction: Reduction = "mean") -> Tensor:
        """Return the loss of the vectors that `passes` returned, the mean over them."""
        if self.head is None:
            raise ValueError("this decoder was built without a head: give it one (with_head)")
        loss: Tensor = self.criterion(passes, labels_BT, self.head, self.lookup, self.config.vocab_size, reduction)
        return loss

    def loss_of_hidden(self, h_BTD: Tensor, labels_BT: Tensor, /, *, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of `loss` from the vectors that `hidden` returned."""
        return self.loss_of_passes([h_BTD], labels_BT, reduction=reduction)

    def weights(self, tokens_T: Sequence[int], /) -> list[WeightMatrix]:
        """Return the weights of each layer and pass for one sequence of tokens. Quadratic: for pictures."""
        return trained_weights(self, tokens_T)

    def num_parameters(self) -> int:
        """Return the number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def cost(self, tokens: int) -> Cost:
        """Return the cost of all layers and the head for one sequence of `tokens` tokens.

        Layers count once a pass, their parameters once, the head once for each pass that has a loss, activations as in
        training by `loss`. Recomputation that saves memory is not counted.
        """
        return cost_of(self, tokens, self._counted, partial(one_sequence, tokens), keep=self._kept)

    def state_bytes(self, tokens: int) -> int:
        """Return the bytes of the state after `tokens` tokens of one sequence, in float32."""
        return state_bytes(self, self._counted, partial(one_sequence, tokens))

    def communication(self, tokens: int, ranks: int) -> tuple[Sent, ...]:
        """Return the bytes that each of `ranks` processes sends for one sequence in all layers and passes, in float32.

        Raises `ValueError` as `subquad.attention.Attention.communication` does.
        """
        self.check_shared()
        layers = [block.attention.communication(tokens, ranks) for block in self.blocks()] * self.config.loops
        return tuple(reduce(Sent.plus, each) for each in zip(*layers, strict=True))

    # Properties that `PerceiverAR` overrides, so that callers need no isinstance.

    @property
    def predicts_last(self) -> int | None:
        """Number of last tokens of a sequence that predict, at most; None: all tokens predict."""
        return None

    def aligned_labels(self, labels_BT: Tensor, mask: Tensor | None = None, /) -> Tensor:
        """Return the labels at the places of the outputs that predict them, for `loss_of_passes`, `loss_of_hidden`."""
        return labels_BT

    @property
    def prompt_latents(self) -> int | None:
        """The argument `latents` for reading a prompt before decoding; None if the model has no such argument."""
        return None

    @property
    def most_tokens(self) -> int | None:
        """Longest sequence: the rows of a learned table of positions; None: no limit."""
        return self.config.max_positions if self.config.position == "learned" else None

    def most_new_tokens(self, prompt: int, state: State | None = None) -> int | None:
        """Return how many tokens can follow a prompt of `prompt` tokens whose last one is unread; None: no limit."""
        return None

    @property
    def state_grows(self) -> bool:
        """Whether any layer's state grows with the number of tokens."""
        return any(block.attention.state_grows for block in self.blocks())

    @property
    def static_shapes(self) -> bool:
        """Whether the state's shapes depend only on the number of tokens, so that a decoding step can be compiled."""
        return True

    def warn_on_length(self, tokens: int) -> None:
        """Log warnings of layers that are made for fewer than `tokens` tokens."""
        for block in self.blocks():
            block.attention.warn_on_length(tokens)

    def change_layers(self, state: State, change: Callable[[Attention, State], State]) -> State:
        """Return `state` with `change(layer, its state)` for each layer."""
        layers = {f"layers.{i}": block.attention for i, block in enumerate(self.blocks())}
        entries = {
            name: change(layers[name[name.index("layers.") :]], entry) if isinstance(entry, State) else entry
            for name, entry in state.entries.items()
        }
        return State(entries, state.config_hash)

    def trim_state(self, state: State) -> State:
        """Return a single row's state without the slots that only longer rows of its batch needed."""
        return state

    @property
    def inexact_decoding(self) -> str | None:
        """Reason why decoding token by token differs from one pass over the sequence by design; None if it does not."""
        return None

    def set_decode(self, decode: str | None = None, refill: int | None = None) -> None:
        """Raise `ValueError`: a decoder has one way of decoding (`PerceiverAR` has several)."""
        name = "refill" if decode is None else "decode"
        raise ValueError(f"{name} is for perceiver_ar, and this model has attention={self.config.attention!r}")

    def check_state(self, state: State, batch: int | None = None, *, owner: str = "this decoder") -> None:
        """Raise `TypeError` unless it is a `State`, `ValueError` for another configuration, batch size or mode."""
        check_is_state(state)
        state.check(self.config_hash, owner, batch)

    def check_packed(self) -> None:
        """Raise `ValueError` if the model takes no packed documents."""

    def check_shared(self) -> None:
        """Raise `ValueError` if the model cannot read a sequence that several processes share."""

    def blocks_to_shard(self) -> list[Block]:
        """Return the blocks that can be sharded one by one: those that are called as modules."""
        return self.blocks()

    def token_settings(self) -> dict[str, Any]:
        """Return settings by name; an audit tests lengths around those that count tokens."""
        return {f"layers.{i}": block.attention.config.to_dict() for i, block in enumerate(self.blocks())}

    def _counted(self, tokens_BT: Tensor) -> tuple[Tensor, State]:
        """Return the logits of each pass that has a training loss, and the state."""
        layers: dict[str, Tensor | int | State] = {}
        passes = self._passes(self.embedding(tokens_BT), None, None, layers, training=True)
        return torch.stack([self.logits(h_BTD) for h_BTD in passes]), State(layers, self.config_hash)

    def _kept(self, tokens_BT: Tensor) -> Tensor:
        """Return the loss, whose saved activations are counted."""
        return self.loss(tokens_BT, tokens_BT)

    def _run(
        self,
        tokens_BT: Tensor,
        state: State | None,
        mask: Tensor | None,
        doc_ids: Tensor | None,
        layers: dict[str, Tensor | int | State] | None,
        between: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], int | Tensor]:
        """Return the vectors of `passes` and the tokens seen; unless they are None, write each layer's new state to
        `layers`, and the input of each block to `between`."""
        vectors = tokens_BT.is_floating_point()
        self._check(tokens_BT, state, mask, doc_ids)
        if doc_ids is not None:
            check_fresh(state)
            documents = lay_out(doc_ids, mask, *tokens_BT.shape[:2], last_apart=layers is not None)
            padding_BT = ~documents.real_BT
            tokens_BT = tokens_BT.masked_fill(padding_BT[..., None] if vectors else padding_BT, 0)
            x_BTD = self.embedding(tokens_BT.flatten(0, 1)[:, None], documents.positions_BT.flatten())
            x_BTD = x_BTD.view(*padding_BT.shape, -1)
            passes = self._passes(x_BTD, None, documents, layers, training=self.training, between=between)
            if between is not None:
                between[:] = [x.masked_fill(padding_BT[..., None], 0.0) for x in between]
            return [h.masked_fill(padding_BT[..., None], 0.0) for h in passes], documents.seen
        group = active_group()
        start = state.seen if state is not None else 0 if group is None else group.offset(tokens_BT.shape[1])
        moved, layout = None, None
        if mask is not None:
            moved = compaction(mask)
            layout = Lengths(moved.lengths_B)
            real_BT = real_slots(moved.lengths_B, tokens_BT.shape[1])
            if vectors:
                tokens_BT = compact(tokens_BT, moved)
            else:
                tokens_BT = tokens_BT.gather(1, moved.order_BT).masked_fill(~real_BT, 0)
        lengths_B = None if layout is None else layout.lengths_B
        x_BTD = self.embedding(tokens_BT, start, lengths_B)
        passes = self._passes(x_BTD, state, layout, layers, training=self.training, between=between)
        seen = advance(start, tokens_BT.shape[1], lengths_B)
        if moved is None:
            return passes, seen
        if between is not None:
            between[:] = [scatter(x, moved) for x in between]
        return [scatter(h, moved) for h in passes], seen

    def _passes(
        self,
        x_BTD: Tensor,
        state: State | None,
        layout: Lengths | Documents | None,
        layers: dict[str, Tensor | int | State] | None,
        *,
        training: bool,
        between: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return the vectors after the last norm: of the last pass or, if `training` uses their losses, of each
        pass."""
        loops = self.config.loops
        passes: list[Tensor] = []
        for p in range(loops):
            x_BTD = self.pass_biases[p](x_BTD) if loops > 1 else x_BTD
            x_BTD = run_blocks(self, x_BTD, state, layout, layers, f"passes.{p}." if loops > 1 else "", between)
            if (training and self.config.loop_loss == "all") or p == loops - 1:
                h_BTD = self.norm(x_BTD)
                passes.append(h_BTD if self.config.logit_divisor == 1 else h_BTD / self.config.logit_divisor)
        return passes

    def _check(self, tokens_BT: Tensor, state: State | None, mask: Tensor | None, docs: Tensor | None = None) -> None:
        check_tokens_or_vectors(tokens_BT, self.config.dim)
        if docs is not None:
            self.check_packed()
        group = active_group()
        if group is not None:
            self.check_shared()
            check_whole(state, mask, docs)
            check_dropout(self.config.dropout if self.training else 0.0)
            group.check_same(tokens_BT.shape[1], tokens_BT.device)
        if mask is not None:
            check_mask(mask, *tokens_BT.shape[:2])
        if state is not None:
            self.check_state(state, tokens_BT.shape[0])

    def _whole_states(
        self, states: Mapping[str, Any], tokens_BT: Tensor, group: ContextGroup
    ) -> dict[str, Tensor | int | State]:
        """Combine the ranks' states into the entries of the state after all ranks' tokens, the same on every rank."""
        mixers = {f"layers.{i}": block.attention for i, block in enumerate(self.blocks())}
        entries: dict[str, Tensor | int | State] = {"seen": group.size * tokens_BT.shape[1]}
        for place, state in states.items():
            entries[place] = after_all_ranks(mixers[place[place.index("layers.") :]], state, tokens_BT.device)
        return entries


def next_tokens(tokens_BT: Tensor, mask: Tensor | None, doc_ids: Tensor | None = None) -> Tensor:
    """Return, at each real token, the next real token of its row or document; -100 at the last one and at padding."""
    if doc_ids is not None:
        labels_BT = next_tokens(tokens_BT, real_tokens(doc_ids, mask))
        return labels_BT.masked_fill(before_others(doc_ids, mask), IGNORED)
    if mask is None:
        return F.pad(tokens_BT, (0, 1), value=IGNORED)[:, 1:]
    moved = compaction(mask)
    real_BT = real_slots(moved.lengths_B, tokens_BT.shape[1])
    labels_BT = tokens_BT.gather(1, moved.order_BT).masked_fill(~real_BT, IGNORED)
    return F.pad(labels_BT, (0, 1), value=IGNORED)[:, 1:].gather(1, moved.inverse_BT)
