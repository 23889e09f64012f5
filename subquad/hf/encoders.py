"""Encoders as transformers models, for classification and pretraining: `Trainer`, `from_pretrained`, Auto classes.

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

from subquad.hf.backbone import padding_mask
from subquad.hf.config import FIELDS, SubquadConfig, fields_of
from subquad.hf.loading import StrictModel
from subquad.layers.criterion import IGNORED
from subquad.layers.head import new_head
from subquad.models.classifier import Classifier, check_pair
from subquad.models.encoder import EncoderConfig
from subquad.models.pretraining import Hiding, Objective, PretrainingModel, check_hiding, denoising_loss, mask_token
from subquad.ops.precision import at_least_float32

EVALUATION_SEED = 0
"""Evaluations always hide the same tokens."""
LABELS = ("num_classes", "towers")
"""Fields of `EncoderConfig` about labels."""


class EncoderModel(StrictModel):
    """A model whose attribute `model` has an `encoder` and whose configuration has `encoder_config()`."""

    _no_split_modules = ["Block", "CrossBlock"]  # noqa: RUF012 (transformers declares it so)

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of token vectors."""
        table: nn.Module = self.model.encoder.embedding.tokens
        return table

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.encoder.embedding.tokens = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary as transformers does, and the encoder's configuration with it."""
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
    """Return the tokens `[B, T]` and which are real (None: all); `ValueError` for inputs that encoders do not take."""
    if inputs_embeds is not None:
        raise ValueError("inputs_embeds is not supported by encoders: pass input_ids")
    if output_attentions:
        raise ValueError("output_attentions is not supported: no weights are computed; see a layer's method `weights`")
    if output_hidden_states:
        raise ValueError(
            "output_hidden_states is not supported by encoders: `model.model.encoder(tokens)` gives the last"
        )
    if input_ids is None:
        raise ValueError("input_ids is needed: a tensor [B, T] of token numbers")
    return input_ids, padding_mask(attention_mask, input_ids)


class SubquadClassifierConfig(fields_of(EncoderConfig, "num_classes"), SubquadConfig):  # type: ignore[misc]
    """The fields of `EncoderConfig`; `num_classes` is transformers' `num_labels`, and `id2label` names the classes."""

    model_type = "subquad-classifier"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoModelForSequenceClassification": "SubquadEncoderForSequenceClassification"
    }
    own_fields: ClassVar[tuple[str, ...]] = (*FIELDS, "pooling", "causal", "towers", "num_labels")

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.encoder_config()

    def encoder_config(self) -> EncoderConfig:
        """Return the `EncoderConfig`; raises `ValueError` or `TypeError` as it does."""
        values = {name: getattr(self, name) for name in (*FIELDS, "pooling", "causal", "towers")}
        return EncoderConfig.from_dict({**values, "num_classes": self.num_labels})

    @classmethod
    def from_encoder(cls, config: EncoderConfig, *, classes: Sequence[str] | None = None, **kwargs: Any) -> Self:
        """Return the same model's configuration, with class names `classes`; `kwargs` are transformers' own fields.

        Raises `ValueError` unless there are as many names as classes.
        """
        values = config.to_dict()
        count = values.pop("num_classes")
        if classes is not None and len(classes) != count:
            raise ValueError(f"classes must name {count} classes, got {len(classes)}: {list(classes)}")
        names = dict(enumerate(classes)) if classes is not None else {i: f"LABEL_{i}" for i in range(count)}
        return cls(**values, id2label=names, label2id={name: i for i, name in names.items()}, **kwargs)


@dataclass(frozen=True)
class Denoising:
    """A second training loss: predict hidden tokens from the vectors that also predict the label."""

    weight: float
    """Weight of this loss; that of the labels has weight 1."""
    hiding: Hiding


class SubquadEncoderForSequenceClassification(EncoderModel):
    """A classifier around `subquad.models.Classifier`, its attribute `model`.

    If `denoising` is set, training hides tokens and adds the loss of predicting them by the table's own rows (joint
    denoising, Miralles-Gonzalez et al. 2025, arXiv:2501.14850). The vocabulary's last row is then the mask token.
    `denoising` is not saved.
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

        `attention_mask` is `[B, T]`, 0 at padding, which may stand anywhere. With `towers=2`, `pair_input_ids` and
        `pair_attention_mask` are each pair's other sequence. The label -100 does not count. Raises `ValueError` or
        `TypeError` for unsupported inputs and for labels outside the classes.
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
        """Return the logits of sequences with hidden tokens, and the weighted loss of predicting the hidden tokens."""
        encoder = self.model.encoder
        if not encoder.vector_per_token:
            raise ValueError(
                f"attention {encoder.config.attention!r} keeps no vector for each token and cannot predict tokens"
            )
        table = encoder.embedding.tokens
        head = new_head(table.embedding_dim, table.num_embeddings, bias=False, table=table)
        pooled, losses = [], []
        for tokens_BT, mask in read:
            shown_BT, hidden_BT = denoising.hiding(tokens_BT, mask, mask_token(encoder))
            h_BTD, pooled_BD = encoder(shown_BT, mask, pooled=True)
            pooled.append(pooled_BD)
            losses.append(denoising_loss(head, h_BTD, tokens_BT, hidden_BT))
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
        return F.cross_entropy(at_least_float32(logits_BC), labels_B, ignore_index=IGNORED)


class SubquadPretrainingConfig(fields_of(EncoderConfig, *LABELS), SubquadConfig):  # type: ignore[misc]
    """The fields of `EncoderConfig` except those about labels, and the objective: `denoise` or `causal`."""

    model_type = "subquad-pretraining"
    auto_classes: ClassVar[dict[str, str]] = {"AutoModelForPreTraining": "SubquadForPreTraining"}
    own_fields: ClassVar[tuple[str, ...]] = (
        *FIELDS, "pooling", "causal", "objective", "mask_fraction", "random_fraction"
    )  # fmt: skip

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
        """Return the `EncoderConfig`; raises `ValueError` or `TypeError` as it does."""
        return EncoderConfig.from_dict({name: getattr(self, name) for name in (*FIELDS, "pooling", "causal")})

    @classmethod
    def from_encoder(cls, config: EncoderConfig, **kwargs: Any) -> Self:
        """Return the configuration of the same encoder; `kwargs` are the other fields, and transformers' own."""
        values = {name: value for name, value in config.to_dict().items() if name not in LABELS}
        return cls(**values, **kwargs)


class SubquadForPreTraining(EncoderModel):
    """An encoder that predicts tokens (its attribute `model`); classifiers start from its `encoder`."""

    config: SubquadPretrainingConfig
    config_class = SubquadPretrainingConfig

    def __init__(self, config: SubquadPretrainingConfig) -> None:
        super().__init__(config)
        objective: Objective = "causal" if config.objective == "causal" else "denoise"
        self.model = PretrainingModel(config.encoder_config(), objective)
        self.hiding = Hiding(config.mask_fraction, config.random_fraction)
        self._tied_weights_keys = {"model.head.weight": "model.encoder.embedding.tokens.weight"}
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, whose weights are the table's."""
        head: nn.Module = self.model.head
        return head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary; `ValueError` where tokens are hidden: the mask token is the table's last row."""
        if self.config.objective == "denoise":
            raise ValueError('the mask token of objective="denoise" is the table\'s last row: it cannot be resized')
        return super().resize_token_embeddings(*args, **kwargs)

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
        """Return logits `[B, T, V]` of `input_ids` `[B, T]` or, with `labels`, the loss in nats per predicted token.

        `labels` must equal `input_ids`; the objective decides which tokens are predicted. Training draws the hidden
        tokens anew, evaluation always hides the same ones. `attention_mask` is `[B, T]`, 0 at padding, which may stand
        anywhere. Raises `ValueError` or `TypeError` for unsupported inputs.
        """
        tokens_BT, mask_BT = read_inputs(
            input_ids, attention_mask, inputs_embeds, output_attentions, output_hidden_states
        )
        output = MaskedLMOutput()
        if labels is None:
            output["logits"] = self.model(tokens_BT, mask_BT)
        else:
            if not torch.equal(labels, tokens_BT):
                raise ValueError("labels must equal input_ids: the model itself draws which tokens to hide")
            generator = None
            if not self.training:
                generator = torch.Generator(device=tokens_BT.device).manual_seed(EVALUATION_SEED)
            output["loss"] = self.model.loss(tokens_BT, self.hiding, mask_BT, generator=generator)
        return output
