"""The backbone of a language model for transformers: `AutoModel`, which heads of all kinds call.

Shape letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from subquad.hf.cache import SubquadCache
from subquad.hf.config import SubquadConfig
from subquad.hf.loading import StrictModel
from subquad.models.build import build_model
from subquad.models.decoder import Decoder
from subquad.parallel import active_group
from subquad.state import State


@dataclass
class BackboneOutput(BaseModelOutputWithPast):
    """Output of `SubquadModel`."""

    passes: tuple[Tensor, ...] | None = None
    """Vectors that a loss is computed from: the last ones or, in training with `loop_loss="all"`, each pass's."""


class SubquadModel(StrictModel):
    """A decoder without its head, its attribute `decoder`: vectors `[B, T, D]` of tokens `[B, T]`."""

    config: SubquadConfig
    config_class = SubquadConfig
    leaves_out = ("lm_head.", "lookup.", "score.")
    decoder: Decoder

    def __init__(self, config: SubquadConfig, decoder: Decoder | None = None) -> None:
        super().__init__(config)
        self.decoder = build_model(config.decoder_config(), head=False) if decoder is None else decoder
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        doc_ids: Tensor | None = None,
        latents: int | None = None,
        **packed: Any,
    ) -> BackboneOutput | tuple[Any, ...]:
        """Return vectors `[B, T, D]` after the last norm and, if asked for, the cache and the hidden states.

        `inputs_embeds` `[B, T, D]` take the place of rows of the table of tokens. `attention_mask` is `[B, T]`, or
        longer by the tokens in `past_key_values`; padding may stand anywhere, and its vectors are zero. A given cache
        is read, and advances unless `use_cache` is False. Positions count a row's real tokens; `position_ids` may
        repeat them, or pack documents. Hidden states are the inputs of each block, and the last vectors. Raises
        `ValueError` or `TypeError` for unsupported inputs.

        `doc_ids` `[B, T]` (-1: padding) pack several documents into a row: a new one begins where the id changes, and
        each is read as if alone. Without `attention_mask`, `position_ids` that restart at 0 mean the same, and so do
        the other arguments (`packed`) of transformers' collators for packed rows: `seq_idx`, `cu_seq_lens_q`. Packed
        documents take no cache and make none.

        Within `subquad.parallel.context_parallel(group)` every process gets the whole sequences, whose length must be a
        multiple of P, without padding, and returns its part of the vectors; a cache is the whole sequence's.

        A `PerceiverAR` has vectors only at its latents: `[B, min(m, T), D]`, right-aligned; `latents` sets their
        number. After a cache every token is a latent.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError(
                "output_attentions is not supported: no weights are computed; see a layer's method `weights`"
            )
        given = given_inputs(input_ids, inputs_embeds)
        cache = checked_cache(past_key_values)
        mask_BT = padding_mask(attention_mask, given)
        doc_ids = packed_documents(doc_ids, position_ids, attention_mask, given, packed)
        if doc_ids is not None:
            self.decoder.check_packed()
            if cache is not None or use_cache:
                raise ValueError(
                    "packed documents take no cache and make none: leave past_key_values and use_cache out"
                )
            position_ids, use_cache = None, False
        named: dict[str, Any] = {} if latents is None else {"latents": latents}
        if named and self.decoder.prompt_latents is None:
            raise ValueError(f"latents is for perceiver_ar, and this model has attention={self.config.attention!r}")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if cache is None and (self.config.use_cache and not self.training if use_cache is None else use_cache):
            cache = SubquadCache()
        before = None if cache is None else cache.state
        check_positions(position_ids, given, mask_BT, 0 if before is None else before.seen)
        group = active_group()
        tokens = given if group is None else group.part(given)
        named |= {"keep_state": cache is not None, "keep_between": bool(output_hidden_states)}
        if cache is not None and cache.slot.rollback is not None and use_cache is not False:
            call = partial(self._passes, named)
            (passes, between), state = cache.slot.rollback.read(call, tokens, before, mask_BT)
        else:
            read: Any = self.decoder(tokens, before, mask_BT, doc_ids, **named)  # without a head: three values
            passes, state, between = read
        if cache is not None and use_cache is not False:
            cache.update_state(state, given.shape[1])
        hidden_states = None if between is None else (*between, passes[-1])
        if not (self.config.return_dict if return_dict is None else return_dict):
            return tuple(value for value in (passes[-1], cache, hidden_states) if value is not None)
        return BackboneOutput(passes[-1], cache, hidden_states, passes=tuple(passes))

    def _passes(self, named: dict[str, Any], tokens_BT: Tensor, state: State | None, mask_BT: Tensor | None) -> Any:
        read: Any = self.decoder(tokens_BT, state, mask_BT, None, **named)
        return (read[0], read[2]), read[1]

    def blocks_to_shard(self) -> list[nn.Module]:
        """Return the decoder's blocks."""
        return list(self.decoder.blocks_to_shard())

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of token vectors."""
        return self.decoder.embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embedding.tokens = value  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary as transformers does, and the decoder's configuration with it."""
        table = super().resize_token_embeddings(*args, **kwargs)
        self.take_vocabulary(table.num_embeddings)
        return table

    def take_vocabulary(self, size: int) -> None:
        """Set the vocabulary size in the decoder's configuration, after its table was resized."""
        self.decoder.config = replace(self.decoder.config, vocab_size=size)
        self.decoder.config_hash = self.decoder.config.digest()

    def get_decoder(self) -> nn.Module:
        """Return this model, as transformers' backbones do."""
        return self

    def _init_weights(self, module: nn.Module) -> None:
        self.decoder.initialise(module)


def given_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Return the argument that is given; `ValueError` for none or both."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(
            "input_ids is needed, a tensor [B, T] of token numbers, or inputs_embeds [B, T, D] in its place"
            if input_ids is None
            else "input_ids and inputs_embeds are two forms of one input: give one of them"
        )
    return input_ids if inputs_embeds is None else inputs_embeds  # type: ignore[return-value]


def checked_cache(cache: Any) -> SubquadCache | None:
    """Return the cache; `TypeError` for one of another kind."""
    if cache is not None and not isinstance(cache, SubquadCache):
        raise TypeError(f"past_key_values must be a subquad.hf.SubquadCache, got {type(cache).__name__}")
    return cache


def padding_mask(attention_mask: Tensor | None, tokens_BT: Tensor) -> Tensor | None:
    """Return which tokens are real, bool `[B, T]`; None if all are, which is not checked while compiling."""
    if attention_mask is None:
        return None
    B, T = tokens_BT.shape[:2]
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask must have shape [{B}, {T}], or more columns for tokens in the cache, "
            f"got {list(attention_mask.shape)}"
        )
    mask_BT = attention_mask[:, attention_mask.shape[1] - T :] != 0
    if not torch.compiler.is_compiling() and bool(mask_BT.all()):
        return None
    return mask_BT


def check_positions(position_ids: Tensor | None, tokens_BT: Tensor, mask_BT: Tensor | None, seen: int | Tensor) -> None:
    """Raise `ValueError` if a real token's position isn't the number of real tokens before it in its row."""
    if position_ids is None or torch.compiler.is_compiling():
        return
    B, T = tokens_BT.shape[:2]
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, B) or position_ids.shape[1] != T:
        raise ValueError(f"position_ids must have shape {[B, T]}, got {list(position_ids.shape)}")
    real_BT = torch.ones(B, T, dtype=torch.bool, device=tokens_BT.device) if mask_BT is None else mask_BT
    start_B = torch.as_tensor(seen, device=tokens_BT.device).expand(B)
    counted_BT = start_B[:, None] + real_BT.cumsum(1) - 1
    if bool(((position_ids != counted_BT) & real_BT).any()):
        raise ValueError(
            "position_ids must count the row's real tokens or, without attention_mask, those of each packed document "
            "from 0: leave position_ids out, and mark padding in attention_mask"
        )


PACKED = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments by which transformers' collators describe packed rows: documents, their borders in one row, the longest."""


def packed_documents(
    doc_ids: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    tokens_BT: Tensor,
    packed: Mapping[str, Any],
) -> Tensor | None:
    """Return documents `[B, T]` of packed rows (None: unpacked): `doc_ids`, or new ones where positions restart at 0.

    Without `doc_ids`, `packed` (of `PACKED`) gives them. Raises `ValueError` if `doc_ids` and positions are given, for
    positions that do not count from 0 in each document of `packed`, and for borders that fit no row; `TypeError` for
    other arguments. While compiling, positions that restart raise an error when they are read: `doc_ids` are needed.
    """
    for name in packed:
        if name not in PACKED:
            raise TypeError(f"a subquad model takes no argument {name!r}; of packed rows it takes {', '.join(PACKED)}")
    if packed and doc_ids is None:
        found_BT = packed.get("seq_idx")
        borders = packed.get("cu_seq_lens_q", packed.get("cu_seq_lens_k"))
        if found_BT is None and borders is not None:
            if tokens_BT.shape[0] != 1 or int(borders[-1]) != tokens_BT.shape[1]:
                raise ValueError(
                    f"cu_seq_lens_q are the borders of the documents of one row, from 0 to its {tokens_BT.shape[1]} "
                    f"tokens, got {len(tokens_BT)} rows and {borders.tolist()}"
                )
            lengths = borders.diff()
            found_BT = torch.arange(len(lengths), device=borders.device).repeat_interleave(lengths)[None]
        if found_BT is not None:
            if position_ids is not None and not torch.compiler.is_compiling():
                check_restarts(position_ids, found_BT)
            return found_BT
    if position_ids is None:
        return doc_ids
    if torch.compiler.is_compiling():
        if doc_ids is None and attention_mask is None:
            message = (
                "position_ids restart in a row: compiled, a model takes packed rows as seq_idx, with fullgraph=False"
            )
            torch._assert_async((position_ids[:, 1:] != 0).all(), message)
        return doc_ids
    if doc_ids is not None:
        raise ValueError("doc_ids already set the positions, from 0 in each document: leave position_ids out")
    if attention_mask is not None or position_ids.ndim != 2 or position_ids.shape[1] != tokens_BT.shape[1]:
        return None
    begins_PT = position_ids == 0
    if not bool(begins_PT[:, 1:].any()) or position_ids.shape[0] not in (1, tokens_BT.shape[0]):
        return None
    steps_PT = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if not bool(begins_PT[:, :1].all() & (steps_PT | begins_PT[:, 1:]).all()):
        return None  # not packed: `check_positions` reports what is wrong
    return begins_PT.cumsum(1).expand(tokens_BT.shape[:2])


def check_restarts(position_ids: Tensor, doc_ids_BT: Tensor) -> None:
    """Raise `ValueError` if positions `[B, T]` do not count from 0 in each document of the rows."""
    begins_BT = F.pad(doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1], (1, 0), value=True)
    places_T = torch.arange(doc_ids_BT.shape[1], device=doc_ids_BT.device)
    counted_BT = places_T - torch.where(begins_BT, places_T, 0).cummax(1).values
    if position_ids.shape[-1] != len(places_T) or bool((position_ids != counted_BT).any()):
        raise ValueError(
            "position_ids must count from 0 in each document of seq_idx or cu_seq_lens_q: leave position_ids out"
        )
