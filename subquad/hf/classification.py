"""The classifier as a transformers model: training with `Trainer`, `from_pretrained`, the Auto class.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from subquad.hf._encoder import EncoderModel, read_inputs
from subquad.hf._inputs import padding_mask
from subquad.hf.config import FIELDS, SubquadConfig
from subquad.models.classifier import Classifier, check_pair
from subquad.models.decoder import IGNORED
from subquad.models.encoder import Encoder, EncoderConfig
from subquad.models.pretraining import Hiding, denoising_loss, mask_token


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
        """The classifier's own configuration; raises `ValueError` or `TypeError` as it does."""
        values = {name: getattr(self, name) for name in (*FIELDS, "pooling", "causal", "towers")}
        return EncoderConfig.from_dict({**values, "num_classes": self.num_labels})

    @classmethod
    def from_encoder(cls, config: EncoderConfig, *, classes: Sequence[str] | None = None, **kwargs: Any) -> Self:
        """The same model; `classes` names its classes, and `kwargs` are transformers' own fields.

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
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits `[B, classes]` of `input_ids` `[B, T]` and, with `labels` `[B]`, the mean cross-entropy in nats.

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
        output = SequenceClassifierOutput(loss=loss, logits=logits_BC)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _denoise(self, denoising: Denoising, read: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
        """The logits of sequences with hidden tokens, and the weighted loss of predicting those."""
        encoder = self.model.encoder
        if not isinstance(encoder, Encoder):
            raise ValueError(f"attention {self.config.attention!r} keeps no vector for each token to predict it from")
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
