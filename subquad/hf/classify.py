"""Classifiers of sequences and of tokens on the backbone of a language model, made from its folder or new.

Shape letters: B batch, T tokens, C labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast, TokenClassifierOutput
from transformers.utils import can_return_tuple

from subquad.hf.backbone import SubquadModel, given_inputs, padding_mask
from subquad.hf.cache import SubquadCache
from subquad.hf.config import SubquadConfig
from subquad.hf.loading import StrictModel


class LabelModel(StrictModel):
    """A `SubquadModel`, its attribute `model`, and the linear map `score` from its vectors to `config.num_labels`."""

    config: SubquadConfig
    config_class = SubquadConfig
    leaves_out = ("lm_head.", "lookup.")
    begins_with = ("score.",)
    model: SubquadModel
    score: nn.Linear

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.num_labels: int = config.num_labels or 0
        self.model = SubquadModel(config)
        self.score = nn.Linear(config.dim, self.num_labels, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of token vectors."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary as transformers does, and the decoder's configuration with it."""
        table = super().resize_token_embeddings(*args, **kwargs)
        self.model.take_vocabulary(table.num_embeddings)
        return table

    def _init_weights(self, module: nn.Module) -> None:
        self.model.decoder.initialise(module)


class SubquadForSequenceClassification(LabelModel):
    """Labels of sequences: `score` of the last real token's vector."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutputWithPast:
        """Return logits `[B, C]` and, with `labels`, the loss that `config.problem_type` names.

        `labels` are numbers of classes `[B]`, or values `[B]` or `[B, C]` for `regression` (the type of one label), or
        `[B, C]` of 0 and 1 for `multi_label_classification`. Without `attention_mask`, tokens `config.pad_token_id` at
        the end of a row are padding. Raises `ValueError` or `TypeError` as `SubquadModel` does.
        """
        given = given_inputs(input_ids, inputs_embeds)
        mask_BT = padding_mask(attention_mask, given)
        pad = self.config.pad_token_id
        if attention_mask is None and input_ids is not None and pad is not None:
            later_BT = (input_ids != pad).flip(1).cumsum(1).flip(1)  # tokens from here on that are not padding
            mask_BT = padding_mask(later_BT, given)
        found = self.model(
            input_ids,
            mask_BT,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=False if use_cache is None else use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        h_BTD = found.last_hidden_state
        if mask_BT is None or self.model.decoder.predicts_last is not None:  # latents are at the end of each row
            last_BD = h_BTD[:, -1]
        else:
            places_T = torch.arange(mask_BT.shape[1], device=h_BTD.device)
            last_B11 = (mask_BT * places_T).amax(1)[:, None, None]
            last_BD = h_BTD.gather(1, last_B11.expand(-1, 1, h_BTD.shape[2])).squeeze(1)
        logits_BC = self.score(self.dropout(last_BD))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BC, labels=labels, pooled_logits=logits_BC, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits_BC, past_key_values=found.past_key_values, hidden_states=found.hidden_states
        )


class SubquadForTokenClassification(LabelModel):
    """Labels of tokens: `score` of each token's vector, which depends on itself and earlier tokens."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        if self.model.decoder.predicts_last is not None:
            raise ValueError(
                f"attention={config.attention!r} has vectors of a sequence's last tokens alone: token classification "
                "needs a vector of each token; choose a mechanism (`subquad list`)"
            )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> TokenClassifierOutput:
        """Return logits `[B, T, C]` and, with `labels` `[B, T]`, the mean cross-entropy; -100 does not count."""
        found = self.model(
            input_ids,
            attention_mask,
            position_ids,
            None,
            inputs_embeds,
            use_cache=False,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits_BTC = self.score(self.dropout(found.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits_BTC, labels, self.config)
        return TokenClassifierOutput(loss=loss, logits=logits_BTC, hidden_states=found.hidden_states)
