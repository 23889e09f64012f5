"""Perceiver AR and its relatives: a decoder whose last tokens, the latents, predict, and read a cheaper history.

Shape letters: B batch, T tokens, W window, S keys, M latents, D model width, H heads, K channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subquad.layers.criterion import IGNORED
from subquad.models.blocks import Block, build_mechanisms
from subquad.models.config import DecoderConfig
from subquad.models.decoder import Decoder
from subquad.models.matrices import WeightMatrix
from subquad.models.perceiver_layer import Kept, LatentAttention, LatentBlock, draw
from subquad.models.perceiver_window import History, LastTokens, Number, Parts, compress, cut, neighbours, thin
from subquad.models.stacks import Decode, PerceiverAROptions
from subquad.ops.caches import advance, last_slots
from subquad.ops.padding import Compaction, compaction, real_slots, scatter
from subquad.ops.patterns import Blocks, Full
from subquad.state import State

MODES = get_args(Decode)


class PerceiverAR(Decoder):
    """A decoder over the last m tokens (`latents`) that also reads the h tokens before them (the history).

    In each layer latent i attends to the history and to latents up to i: `x' = x + out(softmax(q k^T / sqrt(K)) v)`,
    with `q` of the latents `x`, and `k` and `v` of the history and `x`; the feed-forward network follows. No history
    token ever sees a latent. The option `history` says what the history is:

    - `cross`: the embeddings, read by the first layer only (Perceiver AR: Hawthorne et al. 2022, arXiv:2202.07765,
      section 3). The parameters are those of `Decoder` with `attention=full`, under the same names.
    - `self`: in each layer, the output of an unmasked self-attention with its own projections and the latents' norms
      and feed-forward network (V1: Mahmood and Huang 2024, arXiv:2412.06106, section 4.1).
    - `segments`: as `self`, within segments of `segment` tokens, counted from the first history token (V2, section
      4.2).
    - `compressed`: as `self`, on `x_p = W x_h` with a learned `W` `[p, h]` over the sequence (V3, section 4.3). The
      last history token meets the last column of `W`, so a shorter history uses the last columns, as if zeros preceded
      it.

    The last layer does not update the history, since no layer would read it. With `latents >= T` there is no history
    and every form is the plain decoder. Positions are those in the sequence; the rows of `compressed` are at the ends
    of p equal parts of the h positions before the latents. Tokens before the history are not read. Outputs, logits and
    losses are those of the latents, `[B, min(m, T), ...]`, right-aligned, with zeros before shorter rows; other labels
    do not count.

    Decoding reads token by token, however many are given at once, and every new token is a latent. With fewer than m
    latents the first one stays and the layers' keys are kept, which equals one pass with that first latent. When all m
    are used, `decode` says how to continue:

    - `exact`: one pass over the window for each token. It equals `model(all tokens)` and costs m latents a token.
    - `refill`: the next token starts again with `refill` latents; the others become history. It equals a pass with that
      first latent (`latents=`), which changes every m - refill + 1 tokens.
    - `frozen`: raise an error. Until then the history is the prompt's, whatever the length.

    `set_decode` changes the mode. A state holds the mode, the tokens in reach (all of them if `history_tokens` is None)
    and the keys and values of each layer, except in mode `exact` with all latents used.
    """

    def __init__(self, config: DecoderConfig, *, head: bool = True) -> None:
        options = PerceiverAROptions.from_dict(config.options.get("perceiver_ar", {}), where="options.perceiver_ar")
        if config.loops != 1:
            raise ValueError(f"perceiver_ar runs its layers once: loops must be 1, got {config.loops}")
        if options.first_layer == "full" and config.num_layers < 2:
            raise ValueError("first_layer='full' needs a second layer to read the compressed history, got num_layers=1")
        plain = config.replace(attention="full")
        super().__init__(plain, head=head)
        self.config, self.config_hash = config, config.digest()
        self._set = {"options": options}  # a dict, which the same decoder with another head shares
        self.latents = options.latents
        self.limit = None if options.history_tokens is None else options.history_tokens + options.latents
        compressed, late = options.history == "compressed", options.first_layer == "full"
        updated = range(int(late), config.num_layers - 1) if options.history != "cross" else ()
        self.history_pattern = Blocks(options.segment) if options.history == "segments" else Full()
        mixers: list[Any] = [*build_mechanisms(plain, kind=LatentAttention)]
        self.history = nn.ModuleDict({str(i): mixers[i] for i in updated})
        self.compress = nn.Linear(options.history_tokens or 1, options.projected, bias=False) if compressed else None
        self.branch_outputs |= {mixers[i].out for i in updated}
        for module in (self.history, self.compress):
            if module is not None:
                module.apply(self.initialise)

    def new_layers(self, config: DecoderConfig) -> list[Block]:
        """Return blocks of latents."""
        return [LatentBlock(config, mixer) for mixer in build_mechanisms(config, kind=LatentAttention)]

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """Initialise as `Decoder` does; the projection over the sequence preserves the variance of its inputs."""
        if module is getattr(self, "compress", None):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        else:
            super().initialise(module)

    def forward(
        self,
        tokens_BT: Tensor,
        /,
        state: State | None = None,
        mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        *,
        latents: int | None = None,
        **named: Any,
    ) -> Any:
        """Return the logits of the token after each latent, `[B, min(latents, T), V]`; with a state, after each of
        `tokens`.

        `latents` is the number of last tokens that are latents, at most (and by default) the configured number; it is
        refused with a state, and `doc_ids` always are. Otherwise as `Decoder.forward`.
        """
        return super().forward(tokens_BT, state, mask, doc_ids, latents=latents, **named)

    def hidden(
        self,
        tokens_BT: Tensor,
        /,
        state: State | None = None,
        mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        *,
        between: list[Tensor] | None = None,
        latents: int | None = None,
    ) -> tuple[Tensor, State]:
        """Return vectors `[B, min(latents, T), D]`, with a state `[B, T, D]`: `forward` without the head.

        The input of each layer is added to `between`, which is refused with a state.
        """
        self._check(tokens_BT, state, mask, doc_ids)
        if latents is not None and state is not None:
            raise ValueError(f"latents is for new sequences and cannot be given with a state, got latents={latents}")
        moved = None if mask is None else compaction(mask)
        if state is not None:
            if between is not None:
                raise ValueError("perceiver_ar gives what its layers read (hidden states) for whole sequences alone")
            return self._go_on(tokens_BT, state, moved)
        window, parts = self._cut(tokens_BT, moved, latents)
        h_BMD, state = self._restart(window, parts, between)
        return window.at_the_end(h_BMD, parts), state

    def read(self, tokens_BT: Tensor, /, state: State | None = None) -> State:
        """Return the state after more tokens: prompts get `prompt_latents`, `exact` skips passes it does not need."""
        self._check(tokens_BT, state, None)
        seen, start = (0, 0) if state is None else (state.seen, _first_latent(state))
        after = seen + tokens_BT.shape[1]
        used = after - start
        alone = isinstance(used, int) and used >= self.latents and self.options.decode == "exact"
        if alone and isinstance(after, int):
            tokens_BW = tokens_BT if state is None else self._last_tokens(tokens_BT, state, None)
            return self._state(LastTokens.of(tokens_BW, None, self.limit).tokens_BW, after, after - self.latents, {})
        if state is not None:
            return self.hidden(tokens_BT, state)[1]
        return self.hidden(tokens_BT, latents=self.options.prompt_latents)[1]

    def passes(
        self,
        ids_BT: Tensor,
        /,
        mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        *,
        between: list[Tensor] | None = None,
        latents: int | None = None,
    ) -> list[Tensor]:
        """Return the vectors of `hidden` for whole sequences, without a state; training applies `vary_latents`, unless
        `latents` are given, and `prefix_dropout`."""
        self._check(ids_BT, None, mask, doc_ids)
        options = self.options
        if self.training and options.vary_latents and latents is None:
            latents = int(torch.randint(options.fewest_predicted, self.latents + 1, ()))
        window, parts = self._cut(ids_BT, None if mask is None else compaction(mask), latents)
        h_BMD = self._through(window, parts, None, options.prefix_dropout if self.training else 0.0, between)
        return [window.at_the_end(h_BMD, parts)]

    @torch.no_grad()
    def weights(self, tokens_T: Sequence[int], /) -> list[WeightMatrix]:
        """Return for each layer the weights of the history over itself, if it is updated, and of the latents."""
        drawn: list[WeightMatrix] = []
        tokens_BT = torch.tensor([list(tokens_T)], device=next(self.parameters()).device)
        with ExitStack() as hooks:
            for i in range(len(self.layers)):
                block: Any = self.layers[i]
                watched = {"latents": block.attention}
                watched |= {"history": self.history[str(i)]} if str(i) in self.history else {}
                for name, attention in watched.items():
                    hook = attention.register_forward_hook(partial(draw, drawn, i, name), with_kwargs=True)
                    hooks.callback(hook.remove)
            self._through(*self._cut(tokens_BT, None))
        return drawn

    @property
    def options(self) -> PerceiverAROptions:
        """The configuration's options, with the decoding mode that is set."""
        return self._set["options"]

    # Differences from other decoders.

    @property
    def predicts_last(self) -> int:
        """Number of latents."""
        return self.latents

    def aligned_labels(self, labels_BT: Tensor, mask: Tensor | None = None, /) -> Tensor:
        """Return the labels at the places of the outputs: a row's real ones moved to its end, -100 before them."""
        if mask is None:
            return labels_BT
        order_BT = mask.to(torch.uint8).argsort(dim=-1, stable=True)
        return labels_BT.masked_fill(~mask, IGNORED).gather(1, order_BT)

    @property
    def prompt_latents(self) -> int:
        """Latents that a prompt is read with, by the decoding mode."""
        return self.options.prompt_latents

    def most_new_tokens(self, prompt: int, state: State | None = None) -> int | None:
        """Return how many tokens can follow the prompt: with decode=frozen, the number of latents that are left."""
        options = self.options
        if options.decode != "frozen":
            return None
        if state is None:
            return self.latents - min(options.kept, prompt - 1)
        return max(0, self.latents - prompt + 1 - _used_latents(state))

    @property
    def static_shapes(self) -> bool:
        """False: a state holds the keys of a varying number of latents."""
        return False

    def trim_state(self, state: State) -> State:
        """Return a single row's state without the slots that only longer rows of its batch needed."""
        seen, start = int(state.seen), int(_first_latent(state))
        entries = {**state.entries, "tokens": state.tensor("tokens")[:, -seen:]}
        for i in range(len(self.layers)):
            if f"layers.{i}" in state:
                kept = state.child(f"layers.{i}")
                unused = kept.tensor("keys").shape[2] - (int(self._history_keys(i, start)) + seen - start)
                last = {name: kept.tensor(name)[:, :, unused:] for name in kept}
                entries[f"layers.{i}"] = State(last, kept.config_hash)
        return State(entries, state.config_hash)

    @property
    def inexact_decoding(self) -> str | None:
        """Reason why decoding differs from a full pass, for modes other than `exact`."""
        if self.options.decode == "exact":
            return None
        return (
            f"decode={self.options.decode!r} goes on with other latents, which by design equals no full pass "
            "(see PerceiverAR); set_decode('exact') can be checked"
        )

    def set_decode(self, decode: str | None = None, refill: int | None = None) -> None:
        """Decode as `decode` says (None: as before) from now on, without training; states of another mode are refused.

        `config` and its hash do not change. Raises `ValueError` as `PerceiverAROptions` does.
        """
        self._set["options"] = self.options.replace(decode=decode or self.options.decode, refill=refill)

    def check_state(self, state: State, batch: int | None = None, *, owner: str = "this decoder") -> None:
        """Raise `ValueError` as `Decoder.check_state` does, and for a state made in another mode."""
        super().check_state(state, batch, owner=owner)
        now = self._mode()
        made: dict[str, Any] = {name: state[name] for name in now}
        if made != now:
            raise ValueError(
                f"the state was made with {_named(made)} and the model has {_named(now)}; restore the former with "
                "set_decode, or read the tokens again"
            )

    def _check(self, tokens_BT: Tensor, state: State | None, mask: Tensor | None, docs: Tensor | None = None) -> None:
        if tokens_BT.is_floating_point():
            raise ValueError("perceiver_ar reads tokens, which its state keeps, and no vectors (inputs_embeds)")
        super()._check(tokens_BT, state, mask, docs)

    def check_packed(self) -> None:
        """Raise `ValueError`."""
        raise ValueError("perceiver_ar predicts only a row's last tokens and takes no packed documents")

    def check_shared(self) -> None:
        """Raise `ValueError`: the latents are in the last rank's part and read the history of all parts."""
        raise ValueError(
            "perceiver_ar cannot read a sequence that several processes share: its latents are all in the last "
            "part and read a history from all parts; use a decoder of mechanisms, or leave `context_parallel`"
        )

    def token_settings(self) -> dict[str, Any]:
        """Return the lengths of history, latents and window, and of segments if the history has them."""
        options = self.options
        segment = options.segment if options.history == "segments" else None
        window = {"window": self.limit, "history_window": options.history_tokens}
        return {"latents": options.latents, **window, "segment": segment}

    # The pass over a window.

    def _cut(self, tokens_BT: Tensor, moved: Compaction | None, latents: int | None = None) -> tuple[LastTokens, Parts]:
        """Return the last tokens of whole rows, and their latents and history."""
        if latents is not None and not 1 <= latents <= self.latents:
            raise ValueError(f"latents must be between 1 and the model's {self.latents}, got {latents}")
        window = LastTokens.of(tokens_BT, moved, self.limit)
        return window, window.parts(latents or self.latents, self.options.history_tokens)

    def _history_keys(self, i: int, start: Number) -> Number:
        """Return the number of history keys in layer i if the first latent is at position `start`."""
        options = self.options
        if options.history == "cross" and i:
            return 0
        if options.history == "compressed" and (i or options.first_layer == "compressed"):
            rows = options.projected
            return rows * min(start, 1) if isinstance(start, int) else rows * start.clamp(max=1)
        if isinstance(start, int):
            return min(start, options.history_tokens or start)
        return start if self.limit is None else start.clamp(max=options.history_tokens)

    def _restart(self, window: LastTokens, parts: Parts, between: list[Tensor] | None = None) -> tuple[Tensor, State]:
        """Run one pass and return the vectors of the latents, each row's first one in slot 0, and the state."""
        layers: dict[str, State] = {}
        # In mode exact, once all latents are used, each token recomputes all keys: keep none. A row with latents left
        # needs its own, as it may go on without the rows that have used all.
        full = self.options.decode == "exact" and parts.latents == self.latents
        if full and isinstance(used := window.seen - parts.start, Tensor):
            full = bool((used >= self.latents).all())
        h_BMD = self._through(window, parts, None if full else layers, between=between)
        return h_BMD, self._state(window.last(), window.seen, parts.start, layers)

    def _state(self, last_BW: Tensor, seen: Number, start: Number, layers: dict[str, State]) -> State:
        """Make a state: the last tokens (right-aligned), two positions, the mode, keys and values."""
        tokens = {"seen": seen, "start": start, "tokens": last_BW.clone()}
        return State({**tokens, **self._mode(), **layers}, self.config_hash)

    def _through(
        self,
        window: LastTokens,
        parts: Parts,
        layers: dict[str, State] | None = None,
        prefix_dropout: float = 0.0,
        between: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the latents after the last norm; write the keys and values of each layer to `layers`, and its
        input to `between`."""
        start, latents, history = parts
        x_BWD = self.embedding(window.tokens_BW, window.first, window.lengths_B)
        before, x_BMD = cut(x_BWD, window, parts)
        past = before if history else None
        if past is not None and prefix_dropout:
            past = thin(past, prefix_dropout)
        if past is not None and self.compress is not None and self.options.first_layer == "compressed":
            past = self._compressed(past, start)
        for i in range(len(self.layers)):
            if between is not None:
                between.append(x_BMD)
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                x_BMD, (k_BHSK, v_BHSK), past = checkpoint(self._layer, i, x_BMD, start, past, use_reentrant=False)
            else:
                x_BMD, (k_BHSK, v_BHSK), past = self._layer(i, x_BMD, start, past)
            if layers is not None:
                if isinstance(window.seen, Tensor):
                    filled_B = k_BHSK.shape[2] - latents + window.seen - start
                    k_BHSK, v_BHSK = (last_slots(x, x.shape[2], filled_B) for x in (k_BHSK, v_BHSK))
                layers[f"layers.{i}"] = State({"keys": k_BHSK, "values": v_BHSK}, self.config_hash)
        if between is not None:
            between[:] = [window.at_the_end(x, parts) for x in between]
        return self.norm(x_BMD)

    def _counted(self, tokens_BT: Tensor) -> tuple[Tensor, State]:
        """Return the logits and the state with all latents."""
        return self(tokens_BT)

    def _kept(self, tokens_BT: Tensor) -> Tensor:
        """Return the loss with all latents and the whole history, without the random choices of training."""
        return self.loss_of_hidden(self._through(*self._cut(tokens_BT, None)), tokens_BT)

    def _layer(self, i: int, x_BMD: Tensor, start: Number, past: History | None) -> tuple[Tensor, Kept, History | None]:
        """Return the latents after layer i, its keys and values, and the history that the next layer reads."""
        update = self.history[str(i)] if str(i) in self.history else None  # noqa: SIM401 (a ModuleDict has no get)
        x_BMD, kept, after = self.layers[i](x_BMD, start, past, update=update, pattern=self.history_pattern)
        if past is not None and i == 0 and self.options.first_layer == "full":
            after = self._compressed(past, start)
        return x_BMD, kept, after

    def _compressed(self, past: History, start: Number) -> History | None:
        """Return the history compressed as in V3."""
        options = self.options
        if self.compress is None:
            return None
        return compress(past, self.compress, options.history_tokens or 1, options.projected, start)

    # Decoding: add latents while there is room, then divide the window again.

    def _mode(self) -> dict[str, int]:
        """Return the decoding mode as entries of a state."""
        options = self.options
        return {"decode": MODES.index(options.decode), "refill": 0 if options.decode == "exact" else options.kept}

    def _go_on(self, tokens_BT: Tensor, state: State, moved: Compaction | None) -> tuple[Tensor, State]:
        """Return the vectors `[B, T, D]` of more tokens, as if read one at a time, and the state after them."""
        lengths_B = None
        if moved is not None:
            lengths_B = moved.lengths_B
            tokens_BT = tokens_BT.gather(1, moved.order_BT).masked_fill(~real_slots(lengths_B, tokens_BT.shape[1]), 0)
        outputs = [self.embedding(tokens_BT[:, :0])]
        done = 0
        while done < tokens_BT.shape[1]:
            room = self.latents - _used_latents(state) if "layers.0" in state else 0
            part_BT = tokens_BT[:, done : done + max(1, room)]
            new_B = None if lengths_B is None else (lengths_B - done).clamp(0, part_BT.shape[1])
            h_BTD, state = (self._grow if room else self._begin_anew)(part_BT, state, new_B)
            outputs.append(h_BTD)
            done += part_BT.shape[1]
        h_BTD = torch.cat(outputs, 1)
        return (h_BTD if moved is None else scatter(h_BTD, moved)), state

    def _grow(self, tokens_BT: Tensor, state: State, new_B: Tensor | None) -> tuple[Tensor, State]:
        """Add latents after those whose keys and values are kept; row b gets `new_B[b]` of them (None: T)."""
        seen, start = state.seen, _first_latent(state)
        x_BTD = self.embedding(tokens_BT, seen, new_B)
        layers: dict[str, State] = {}
        for i in range(len(self.layers)):
            before = state.child(f"layers.{i}")
            kept, count = (before.tensor("keys"), before.tensor("values")), self._history_keys(i, start) + seen - start
            x_BTD, (k_BHSK, v_BHSK), _ = self.layers[i](x_BTD, seen, kept=kept, count=count)
            if new_B is not None:
                filled_B = kept[0].shape[2] + new_B
                k_BHSK, v_BHSK = (last_slots(x, x.shape[2], filled_B) for x in (k_BHSK, v_BHSK))
            layers[f"layers.{i}"] = State({"keys": k_BHSK, "values": v_BHSK}, self.config_hash)
        after = advance(seen, tokens_BT.shape[1], new_B)
        return self.norm(x_BTD), self._state(self._last_tokens(tokens_BT, state, new_B), after, start, layers)

    def _begin_anew(self, token_B1: Tensor, state: State, new_B: Tensor | None) -> tuple[Tensor, State]:
        """Read one more token by a full pass; rows whose latents are all used get another first latent."""
        options, seen, start = self.options, state.seen, _first_latent(state)
        after = advance(seen, 1, new_B)
        full = torch.as_tensor(seen - start >= self.latents, device=token_B1.device)
        if new_B is not None:
            full = full & (new_B > 0)
        if options.decode == "frozen" and bool(full.any()):
            raise ValueError(
                f"decode='frozen' has used all {self.latents} latents after the history of the prompt; generate fewer "
                "tokens, give the prompt fewer latents (refill), or choose decode exact or refill"
            )
        first = after - (self.latents if options.decode == "exact" else options.kept)
        window = LastTokens.from_last(self._last_tokens(token_B1, state, new_B), after)
        if isinstance(first, int) and isinstance(after, int):
            # A row taken out of a batch that restarted may have latents left.
            start = first if bool(full) else start
            assert isinstance(start, int)
            used, history = after - start, window.tokens_BW.shape[1] - (after - start)
        else:
            start = torch.where(full, first, start)
            used, history = int((after - start).max()), int(start.max())
        parts = Parts(start, used, min(history, options.history_tokens or history))
        h_BMD, state = self._restart(window, parts)
        newest = torch.as_tensor(after - parts.start - 1, device=h_BMD.device)
        return neighbours(h_BMD, newest.expand(h_BMD.shape[0]), 1), state

    def _last_tokens(self, tokens_BT: Tensor, state: State, new_B: Tensor | None) -> Tensor:
        """Return the tokens in reach, right-aligned."""
        old_BW = state.tensor("tokens")
        tokens_BW = torch.cat([old_BW, tokens_BT.to(old_BW.dtype)], 1)
        if new_B is not None:
            tokens_BW = neighbours(tokens_BW, new_B - tokens_BT.shape[1], tokens_BW.shape[1])
        return tokens_BW if self.limit is None else tokens_BW[:, -self.limit :]


def _first_latent(state: State) -> Number:
    """Return the position of the first latent."""
    start = state["start"]
    assert not isinstance(start, State)
    return start


def _used_latents(state: State) -> int:
    """Return the largest number of latents used by any row."""
    used = state.seen - _first_latent(state)
    return used if isinstance(used, int) else int(used.max())


def _named(mode: dict[str, int]) -> str:
    with_refill = f" and refill={mode['refill']}" if mode["refill"] else ""
    return f"decode={MODES[mode['decode']]}{with_refill}"
