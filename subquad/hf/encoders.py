"""Encoders as transformers models, to classify and to learn without labels: `Trainer`, `from_pretrained`, Auto classes.

Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput
from transformers.utils import can_return_tuple

from subquad.hf.config import FIELDS, SubquadConfig
from subquad.hf.loading import StrictModel
from subquad.hf.model import padding_mask, refuse_inputs
from subquad.models.classifier import Classifier, check_pair
from subquad.models.decoder import IGNORED
from subquad.models.encoder import EncoderConfig
from subquad.models.pretraining import (
    Hiding,
    Objective,
    PretrainingModel,
    check_hiding,
    denoising_loss,
    mask_token,
)

EVALUATION_SEED = 0
"""What is hidden in an evaluation is always the same."""


class EncoderModel(StrictModel):
    """A model whose attribute `model` has an `encoder`; its configuration gives `encoder_config()`."""

    _no_split_modules = ["Block", "CrossBlock"]  # noqa: RUF012 (transformers declares it so)

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of token vectors."""
        table: nn.Module = self.model.encoder.embedding.tokens
        return table

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table of token vectors."""
        self.model.encoder.embedding.tokens = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the vocabulary, as transformers does; the encoder's configuration follows."""
        table = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = self.model.encoder.config = self.config.encoder_config()
        return table


def read_inputs(
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the tokens `[B, T]` and which are real (None: all); `ValueError` for inputs that no encoder takes."""
    refuse_inputs(inputs_embeds, output_attentions, output_hidden_states)
    if input_ids is None:
        raise ValueError("input_ids is needed: a tensor [B, T] of token numbers")
    return input_ids, padding_mask(attention_mask, input_ids)


class SubquadClassifierConfig(SubquadConfig):
    """The fields of `EncoderConfig`; its `num_classes` is transformers' `num_labels`, `id2label` names the classes."""

    model_type = "subquad-classifier"
    own_fields: ClassVar[tuple[str, ...]] = (*FIELDS, "pooling", "causal", "towers", "num_labels")

    pooling: str = EncoderConfig.pooling
    causal: bool = EncoderConfig.causal
    towers: int = EncoderConfig.towers

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.encoder_config()

    def encoder_config(self) -> EncoderConfig:
        """Return the classifier's own configuration; raises `ValueError` or `TypeError` as it does."""
        values = {name: getattr(self, name) for name in (*FIELDS, "pooling", "causal", "towers")}
        return EncoderConfig.from_dict({**values, "num_classes": self.num_labels})

    @classmethod
    def from_encoder(cls, config: EncoderConfig, *, classes: Sequence[str] | None = None, **kwargs: Any) -> Self:
        """Return the same model; `classes` names its classes, and `kwargs` are transformers' own fields.

        Raises `ValueError` where there are more or fewer names than classes.
        """
        values = config.to_dict()
        count = values.pop("num_classes")
        if classes is not None and len(classes) != count:
            raise ValueError(f"classes must name {count} classes, got {len(classes)}: {list(classes)}")
        names = dict(enumerate(classes)) if classes is not None else {i: f"LABEL_{i}" for i in range(count)}
        return cls(**values, id2label=names, label2id={name: i for i, name in names.items()}, **kwargs)


@dataclass(frozen=True)
class Denoising:
    """A second loss in training: tokens are hidden, and predicted by the vectors that the label is read from too."""

    weight: float
    """What it counts, beside 1 of the labels' loss."""
    hiding: Hiding


class SubquadForSequenceClassification(EncoderModel):
    """A classifier around `subquad.models.Classifier`, which is its attribute `model`.

    With `denoising` set, training hides tokens and adds the loss of predicting them, by the table's own rows (joint
    denoising, Miralles-Gonzalez et al. 2025, arXiv:2501.14850); the last row of the vocabulary is the mask token then.
    It is not saved.
    """

    config: SubquadClassifierConfig
    config_class = SubquadClassifierConfig

    def __init__(self, config: SubquadClassifierConfig) -> None:
        super().__init__(config)
        self.model = Classifier(config.encoder_config())
        self.denoising: Denoising | None = None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutput:
        """Return logits `[B, classes]` of `input_ids` `[B, T]` and, with `labels` `[B]`, the mean cross-entropy.

        `attention_mask` is `[B, T]`, 0 at padding, which may stand anywhere. With `towers=2` the other sequence of each
        pair is `pair_input_ids` with `pair_attention_mask`. The label -100 does not count. Raises `ValueError` or
        `TypeError` for inputs that the model does not take, labels that name no class among them.
        """
        read = [read_inputs(input_ids, attention_mask, inputs_embeds, output_attentions, output_hidden_states)]
        check_pair(self.model.config, pair_input_ids, pair_attention_mask)
        if pair_input_ids is not None:
            read.append((pair_input_ids, padding_mask(pair_attention_mask, pair_input_ids)))
        loss = None
        if labels is not None and self.training and self.denoising is not None:
            logits_BC, loss = self._denoise(self.denoising, read)
            loss = loss + self._loss(logits_BC, labels)
        else:
            logits_BC = self.model(*(value for tokens_and_mask in read for value in tokens_and_mask))
            loss = None if labels is None else self._loss(logits_BC, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits_BC)

    def _denoise(self, denoising: Denoising, read: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
        """Return the logits of sequences with hidden tokens, and the weighted loss of predicting those."""
        encoder = self.model.encoder
        pooled, losses = [], []
        for tokens_BT, mask in read:
            shown_BT, hidden_BT = denoising.hiding(tokens_BT, mask, mask_token(encoder))
            h_BTD, pooled_BD = encoder.read(shown_BT, mask)
            pooled.append(pooled_BD)
            losses.append(denoising_loss(encoder, h_BTD, tokens_BT, hidden_BT))
        return self.model.logits(*pooled), denoising.weight * torch.stack(losses).mean()

    def _loss(self, logits_BC: Tensor, labels_B: Tensor) -> Tensor:
        B, classes = logits_BC.shape
        if labels_B.shape != (B,) or labels_B.dtype != torch.int64:
            raise ValueError(f"labels must be int64 [{B}], got {labels_B.dtype} {list(labels_B.shape)}")
        if not torch.compiler.is_compiling():
            wrong_B = ((labels_B < 0) | (labels_B >= classes)) & (labels_B != IGNORED)
            if bool(wrong_B.any()):
                raise ValueError(
                    f"labels must lie in 0..{classes - 1}, or be {IGNORED}, got {labels_B[wrong_B].tolist()}"
                )
        return F.cross_entropy(logits_BC.float(), labels_B, ignore_index=IGNORED)


class SubquadPretrainingConfig(SubquadConfig):
    """The fields of `EncoderConfig` but those of the labels, and what is learned: `denoise` or `causal`."""

    model_type = "subquad-pretraining"
    own_fields: ClassVar[tuple[str, ...]] = (
        *FIELDS, "pooling", "causal", "objective", "mask_fraction", "random_fraction"
    )  # fmt: skip

    pooling: str = EncoderConfig.pooling
    causal: bool = EncoderConfig.causal
    objective: str = "denoise"
    mask_fraction: float = 0.15
    random_fraction: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.encoder_config()
        check_hiding(self.mask_fraction, self.random_fraction)
        if self.objective not in ("denoise", "causal"):
            raise ValueError(f"unknown objective {self.objective!r}; valid: causal, denoise")

    def encoder_config(self) -> EncoderConfig:
        """Return the encoder's own configuration; raises `ValueError` or `TypeError` as it does."""
        return EncoderConfig.from_dict({name: getattr(self, name) for name in (*FIELDS, "pooling", "causal")})

    @classmethod
    def from_encoder(cls, config: EncoderConfig, **kwargs: Any) -> Self:
        """Return the same encoder; `kwargs` are the other fields, and transformers' own."""
        values = {name: value for name, value in config.to_dict().items() if name not in ("num_classes", "towers")}
        return cls(**values, **kwargs)


class SubquadForPreTraining(EncoderModel):
    """An encoder that predicts tokens, around `subquad.models.pretraining.PretrainingModel`: its attribute `model`.

    `model.encoder` is what a classifier takes over.
    """

    config: SubquadPretrainingConfig
    config_class = SubquadPretrainingConfig

    def __init__(self, config: SubquadPretrainingConfig) -> None:
        super().__init__(config)
        objective: Objective = "causal" if config.objective == "causal" else "denoise"
        self.model = PretrainingModel(config.encoder_config(), objective)
        self.hiding = Hiding(config.mask_fraction, config.random_fraction)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> MaskedLMOutput:
        """Return logits `[B, T, V]` of `input_ids` `[B, T]` or, with `labels`, the loss in nats a predicted token.

        `labels` are the tokens themselves, as `input_ids`: which of them are hidden, or that each is to follow those
        before it, is the objective's. In training the hidden ones are drawn anew, in an evaluation they are always the
        same. `attention_mask` is `[B, T]`, 0 at padding, which may stand anywhere. Raises `ValueError` or `TypeError`
        for inputs that the model does not take.
        """
        tokens_BT, mask_BT = read_inputs(
            input_ids, attention_mask, inputs_embeds, output_attentions, output_hidden_states
        )
        output = MaskedLMOutput()
        if labels is None:
            output["logits"] = self.model(tokens_BT, mask_BT)
        else:
            if not torch.equal(labels, tokens_BT):
                raise ValueError("labels must be input_ids: what is hidden is drawn inside of the model")
            generator = None
            if not self.training:
                generator = torch.Generator(device=tokens_BT.device).manual_seed(EVALUATION_SEED)
            output["loss"] = self.model.loss(tokens_BT, self.hiding, mask_BT, generator=generator)
        return output
