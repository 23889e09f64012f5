"""The decoder as a transformers model: training with `Trainer`, `generate`, `from_pretrained`.

Shape letters: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from subquad.hf.cache import SubquadCache
from subquad.hf.config import SubquadConfig
from subquad.hf.loading import StrictModel
from subquad.models.build import build_model
from subquad.models.decoder import IGNORED, next_tokens
from subquad.parallel import active_group


class SubquadForCausalLM(StrictModel, GenerationMixin):
    """A causal language model around `subquad.models.Decoder` or a stack, its attribute `model`.

    Tied weights are one tensor, `model.embedding.tokens.weight`; an untied head is `model.head.weight`.
    """

    config: SubquadConfig
    config_class = SubquadConfig
    accepts_loss_kwargs = True
    _is_stateful = True

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.model = build_model(config.decoder_config())
        # The Trainer would count labels of whole sequences, but those before the latents are not in the loss.
        self.accepts_loss_kwargs = self.model.predicts_last is None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        latents: int | None = None,
        doc_ids: Tensor | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits of the next token `[B, T, V]` and, with `labels`, the loss in nats.

        `labels` `[B, T]` are the tokens themselves, as everywhere in transformers: they are shifted here, and -100 and
        padding do not count. The loss is the mean over the labels that count or, if the Trainer gives
        `num_items_in_batch`, their sum divided by it; labels at padding, which that number includes, must then be -100,
        and a row that begins with padding still counts one label that no real token predicts. `attention_mask` is `[B,
        T]`, or longer by the tokens in `past_key_values`; padding may stand anywhere. A given cache is read, and
        advances unless `use_cache` is False. Positions count a row's real tokens; `position_ids` may repeat them, or
        pack documents. `logits_to_keep` keeps that many last logits (0: all), or those at the places in an integer
        tensor `[N]`. In training with labels, logits are None to save memory, unless `output_logits` is True. Raises
        `ValueError` or `TypeError` for unsupported inputs.

        `doc_ids` `[B, T]` (-1: padding) pack several documents into a row: a new one begins where the id changes, and
        each is read and predicted as if alone. Without `attention_mask`, `position_ids` that restart at 0 mean the
        same, as from `DataCollatorWithFlattening`. Packed documents take no cache and make none.

        Within `subquad.parallel.context_parallel(group)` every process gets the whole sequences, whose length must be a
        multiple of P, without padding, and reads its part. Logits are those of the part, a cache advances to the end on
        every process, and the loss is scaled so that its mean over processes is that of one process: average the
        gradients, as DistributedDataParallel does.

        A `PerceiverAR` predicts only with its latents: logits are `[B, min(m, T), V]`, right-aligned; `latents` sets
        their number. Without cached tokens the loss has a pass of its own, over all but each row's last token, so that
        each of the m latents has a label; logits and a cache take a second pass. After a cache every token is a latent.
        `generate` follows the option `decode` or `model.set_decode`; with `use_cache=False` each token is a whole pass,
        as with `decode=exact`.
        """
        refuse_inputs(inputs_embeds, output_attentions, output_hidden_states)
        if input_ids is None:
            raise ValueError("input_ids is needed: a tensor [B, T] of token numbers")
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(
                f"labels must have the shape of input_ids, {list(input_ids.shape)}, got {list(labels.shape)}"
            )
        doc_ids = packed_documents(doc_ids, position_ids, attention_mask, input_ids)
        if doc_ids is not None:
            self.model.check_packed()
            if past_key_values is not None or use_cache:
                raise ValueError(
                    "packed documents take no cache and make none: leave past_key_values and use_cache out"
                )
            position_ids, use_cache = None, False
        group = active_group()
        if group is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError(
                "logits_to_keep counts the outputs of a whole sequence, but each process has only a part: leave it out"
            )
        cache = self._cache(past_key_values, use_cache, labels)
        mask_BT = padding_mask(attention_mask, input_ids)
        tokens_BT = input_ids if group is None else group.part(input_ids)
        named = {} if latents is None else {"latents": latents}
        if named and self.model.prompt_latents is None:
            raise ValueError(f"latents is for perceiver_ar, and this model has attention={self.config.attention!r}")
        before = None if cache is None else cache.state
        wants_logits = output_logits or (output_logits is None and not (self.training and labels is not None))
        loss, logits_BTV = None, None
        if before is None:
            check_positions(position_ids, input_ids, mask_BT, 0)
        if labels is not None and before is None and self.model.predicts_last is not None:
            # A row's last token is only a label, so that every latent has one: the loss has a pass of its own.
            read_BT = None if mask_BT is None else (next_tokens(input_ids, mask_BT) != IGNORED)[:, :-1]
            passes = self.model.passes(input_ids[..., :-1], read_BT, **named)
            loss = self._loss(passes, labels, mask_BT, num_items_in_batch, None, last=False)
            labels = None
        if cache is not None:
            h_BTD, state = self.model.hidden(tokens_BT, before, mask_BT, **named)
            passes = [h_BTD]
            if before is not None:
                check_positions(position_ids, input_ids, mask_BT, before.seen)
            if use_cache is not False:
                cache.update_state(state, input_ids.shape[1])
        elif labels is not None or wants_logits:
            passes = self.model.passes(tokens_BT, mask_BT, doc_ids, **named)
        if labels is not None:
            loss = self._loss(passes, labels, mask_BT, num_items_in_batch, doc_ids)
        if wants_logits:
            logits_BTV = self.model.logits(passes[-1][:, _kept(logits_to_keep, passes[-1].shape[1])])
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=cache)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _cache(self, cache: Any, use_cache: bool | None, labels: Tensor | None) -> SubquadCache | None:
        if cache is not None and not isinstance(cache, SubquadCache):
            raise TypeError(f"past_key_values must be a subquad.hf.SubquadCache, got {type(cache).__name__}")
        if cache is None:
            wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
            cache = SubquadCache() if wanted else None
        if cache is not None and labels is not None and self.training and self.config.loop_loss == "all":
            raise ValueError("loop_loss='all' trains on every pass, which a cache does not give: set use_cache=False")
        return cache

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs as transformers does; a prompt read into a cache gets the latents that its decoding needs."""
        latents = kwargs.pop("latents", None)
        parent: Any = super()
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(*args, **kwargs)
        cache = inputs.get("past_key_values")
        fresh = cache is None or cache.state is None
        if self.model.prompt_latents is not None and inputs.get("use_cache") and fresh:
            inputs["latents"] = self.model.prompt_latents if latents is None else latents
        return inputs

    def _loss(
        self,
        passes: list[Tensor],
        labels_BT: Tensor,
        mask_BT: Tensor | None,
        items: Tensor | int | None,
        doc_ids: Tensor | None,
        last: bool = True,
    ) -> Tensor:
        """Return the loss of vectors of all tokens or, without `last`, of all but each row's last real one."""
        target_BT = self.model.aligned_labels(next_tokens(labels_BT, mask_BT, doc_ids), mask_BT)
        target_BT = target_BT if last else target_BT[:, :-1]
        group = active_group()
        if group is not None:
            count = (target_BT != IGNORED).sum().clamp(min=1) if items is None else items
            return self.model.loss_of_passes(passes, group.part(target_BT), reduction="sum") * group.size / count
        if items is None:
            return self.model.loss_of_passes(passes, target_BT)
        if not torch.compiler.is_compiling():
            # Dividing by a count that includes labels without a target would scale the loss wrongly.
            if mask_BT is not None and bool((labels_BT[~mask_BT] != IGNORED).any()):
                raise ValueError(
                    "num_items_in_batch counts labels at padding, which the loss leaves out: set labels to -100 where "
                    "attention_mask is 0, as the collators of transformers do"
                )
            if doc_ids is not None and int((labels_BT[:, 1:] != IGNORED).sum()) != int((target_BT != IGNORED).sum()):
                raise ValueError(
                    "num_items_in_batch counts labels at the first tokens of documents or at padding, which the loss "
                    "leaves out: set them to -100, as DataCollatorWithFlattening does"
                )
        return self.model.loss_of_passes(passes, target_BT, reduction="sum") / items

    def blocks_to_shard(self) -> list[nn.Module]:
        """Return the decoder's blocks that are called as modules."""
        return list(self.model.blocks_to_shard())

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding.tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary as transformers does, and the decoder's configuration with it; new biases are zero.

        Raises `ValueError` for a model with a look-up over the logits, whose matrices are as wide as the vocabulary.
        """
        if self.model.lookup is not None:
            raise ValueError(
                f"a look-up over the logits (lookup={self.config.lookup}) holds a column for each token of the "
                "vocabulary, which cannot change"
            )
        table = super().resize_token_embeddings(*args, **kwargs)
        if self.model.head_bias is not None:
            new = table.num_embeddings - len(self.model.head_bias)
            self.model.head_bias = nn.Parameter(F.pad(self.model.head_bias.detach(), (0, new)))
        self.model.config = self.config.decoder_config()
        self.model.config_hash = self.model.config.digest()
        return table

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


def refuse_inputs(
    inputs_embeds: Tensor | None, output_attentions: bool | None, output_hidden_states: bool | None
) -> None:
    """Raise `ValueError` for inputs and outputs of transformers' models that ours do not have."""
    if inputs_embeds is not None:
        raise ValueError("inputs_embeds is not supported: pass input_ids")
    if output_attentions:
        raise ValueError("output_attentions is not supported: no weights are computed; see a layer's method `weights`")
    if output_hidden_states:
        raise ValueError("output_hidden_states is not supported: `model.model.hidden(tokens)` gives the last ones")


def _kept(logits_to_keep: int | Tensor, outputs: int) -> slice | Tensor:
    """Return the index of the places whose logits are wanted, among `outputs` places."""
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.ndim != 1 or logits_to_keep.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                "logits_to_keep must be an integer or a tensor [N] of int64 or int32, got a tensor "
                f"{list(logits_to_keep.shape)} of {logits_to_keep.dtype}"
            )
        compiling = torch.compiler.is_compiling()
        if not compiling and bool(((logits_to_keep < -outputs) | (logits_to_keep >= outputs)).any()):
            raise ValueError(
                f"logits_to_keep must be places among the {outputs} outputs, below {outputs}, got "
                f"{logits_to_keep.tolist()}; a perceiver_ar has outputs only at its latents, the first at 0"
            )
        return logits_to_keep
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep must be at least 0 (0: all), got {logits_to_keep}")
    return slice(-logits_to_keep, None) if logits_to_keep else slice(None)


def padding_mask(attention_mask: Tensor | None, tokens_BT: Tensor) -> Tensor | None:
    """Return which tokens are real, bool `[B, T]`, or None if all are (which it looks up, unless compiling)."""
    if attention_mask is None:
        return None
    B, T = tokens_BT.shape
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
    T = tokens_BT.shape[1]
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, tokens_BT.shape[0]) or position_ids.shape[1] != T:
        raise ValueError(f"position_ids must have shape {list(tokens_BT.shape)}, got {list(position_ids.shape)}")
    real_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if mask_BT is None else mask_BT
    start_B = torch.as_tensor(seen, device=tokens_BT.device).expand(tokens_BT.shape[0])
    counted_BT = start_B[:, None] + real_BT.cumsum(1) - 1
    if bool(((position_ids != counted_BT) & real_BT).any()):
        raise ValueError(
            "position_ids must count the row's real tokens or, without attention_mask, those of each packed document "
            "from 0: leave position_ids out, and mark padding in attention_mask"
        )


def packed_documents(
    doc_ids: Tensor | None, position_ids: Tensor | None, attention_mask: Tensor | None, tokens_BT: Tensor
) -> Tensor | None:
    """Return documents `[B, T]` of packed rows (None: unpacked): `doc_ids`, or new ones where positions restart at 0.

    Raises `ValueError` if both are given.
    """
    if position_ids is None or torch.compiler.is_compiling():
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
    return begins_PT.cumsum(1).expand(tokens_BT.shape)
