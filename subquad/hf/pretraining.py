"""An encoder that learns from sequences without labels, as a transformers model.

Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput

from subquad.hf._encoder import EncoderModel, read_inputs
from subquad.hf.config import FIELDS, SubquadConfig
from subquad.models.encoder import EncoderConfig
from subquad.models.pretraining import Hiding, Objective, PretrainingModel, check_hiding

EVALUATION_SEED = 0
"""What is hidden in an evaluation is always the same."""


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
        """The encoder's own configuration; raises `ValueError` or `TypeError` as it does."""
        return EncoderConfig.from_dict({name: getattr(self, name) for name in (*FIELDS, "pooling", "causal")})

    @classmethod
    def from_encoder(cls, config: EncoderConfig, **kwargs: Any) -> Self:
        """The same encoder; `kwargs` are the other fields, and transformers' own."""
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

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """Logits `[B, T, V]` of `input_ids` `[B, T]` as they are; with `labels`, the loss in nats a predicted token.

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
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()
